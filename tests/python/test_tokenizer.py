"""Token ids against `tiktoken`, which the published tokenizer of Kimi K3 is built on."""

import random
import time
from itertools import pairwise
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from k3rs import pretokenizer
from k3rs.exceptions import InputError
from k3rs.pretokenizer import PIECE_PATTERN, guard_rail_cuts
from k3rs.tokenizer import Tokenizer
from k3rs.vocabulary import SPECIAL_SLOT_COUNT, Vocabulary, read_vocabulary

FIXTURES = Path(__file__).parents[2] / "fixtures"
VOCABULARY = read_vocabulary(FIXTURES / "vocabulary")
TOKENIZER = Tokenizer(VOCABULARY)
TINY_VOCABULARY = read_vocabulary(FIXTURES / "tiny_k3" / "model")
TINY = Tokenizer.from_directory(FIXTURES / "tiny_k3" / "model")

# Written from the table of alternatives alone, apart from `PIECE_PATTERN`.
REFERENCE_PATTERN = (
    r"[\p{Han}]+"
    r"|(?:[^\p{L}\p{N}\r\n])?(?:[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}--\p{Han}])*"
    r"(?:[\p{Ll}\p{Lm}\p{Lo}\p{M}--\p{Han}])+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|(?:[^\p{L}\p{N}\r\n])?(?:[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}--\p{Han}])+"
    r"(?:[\p{Ll}\p{Lm}\p{Lo}\p{M}--\p{Han}])*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}"
    r"|[ ]?(?:[^\s\p{L}\p{N}])+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def reference_encoding(vocabulary: Vocabulary) -> tiktoken.Encoding:
    count = len(vocabulary.ordinary)
    return tiktoken.Encoding(
        "reference",
        pat_str=REFERENCE_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(vocabulary.ordinary)},
        special_tokens={text: count + slot for slot, text in enumerate(vocabulary.special)},
    )


REFERENCE = reference_encoding(VOCABULARY)


def reference_parts(text: str, cut_length: int = 400_000, run_length: int = 25_000) -> list[str]:
    """The guard rails by counting, one character at a time."""
    parts = []
    for start in range(0, len(text), cut_length):
        part = ""
        run = 0
        for character in text[start : start + cut_length]:
            run = run + 1 if part and part[-1].isspace() == character.isspace() else 1
            if run > run_length:
                parts.append(part)
                part, run = "", 1
            part += character
        parts.append(part)
    return parts


def reference_encode(text: str) -> list[int]:
    return [token for part in reference_parts(text) for token in REFERENCE.encode_ordinary(part)]


WORDS = (FIXTURES / "vocabulary" / "text.txt").read_text(encoding="utf-8").split()
CONTRACTIONS = ["'s", "'T", "'re", "'VE", "'m", "'lL", "'D", "’s", "'\u017f", "'x", "'", "''s"]
SPACES = [" ", "  ", "\n", "\r\n", "\r", "\t", " \n ", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85"]
MARKS = ["\u0301", "\u0323", "\u20dd", "\u3099", "\u302a", "\u0e31", "\u094d", "\ufe0f", "\u200d"]
EMOJI = ["😀", "👩\u200d💻", "👍🏽", "🇫🇷", "🏳️\u200d🌈", "1️⃣"]
OTHERS = [*"ǅʰªⅫ½٣〇々〆⺀ー", "\U0003134f", "\ue000", "\x00"]
RANGES = [(0x21, 0x7E), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x3041, 0x30FF), (0x1F300, 0x1F6FF)]


def random_fragment(source: random.Random) -> str:
    kind = source.randrange(9)
    if kind <= 1:
        return source.choice(WORDS)
    if kind == 2:
        word = source.choice(WORDS)
        return "".join(source.sample(word, len(word)))
    if kind == 3:
        word = source.choice(WORDS)
        return source.choice([word.upper(), word.title(), word.swapcase()])
    if kind == 4:
        return source.choice(SPACES) * source.randint(1, 3)
    if kind == 5:
        return str(source.randrange(10 ** source.randint(1, 8)))
    if kind == 6:
        first, last = source.choice(RANGES)
        return "".join(chr(source.randint(first, last)) for _ in range(source.randint(1, 4)))
    if kind == 7:
        return source.choice(CONTRACTIONS)
    kinds: list[list[str]] = [MARKS, EMOJI, OTHERS]
    return source.choice(source.choice(kinds))


def random_text(source: random.Random) -> str:
    separator = source.choice(["", "", " "])
    return separator.join(random_fragment(source) for _ in range(source.randint(1, 9)))


def test_random_text_has_the_ids_of_tiktoken() -> None:
    source = random.Random(1)
    for number in range(20_000):
        text = random_text(source)
        ids = TOKENIZER.encode(text)
        assert ids == REFERENCE.encode_ordinary(text), f"text {number}: {text!r}"
        assert TOKENIZER.decode(ids) == text


def test_every_split_of_a_token_is_a_merge() -> None:
    """Most tokens of this vocabulary can be reached in several ways: listing one merge fails."""
    source = random.Random(2)
    parts = [letter.encode() for letter in "abcdehinorst"]
    known = set(parts)
    while len(parts) < 8_000:
        token = source.choice(parts) + source.choice(parts)
        if token not in known and len(token) <= 12:
            known.add(token)
            parts.append(token)
    bytes_and_parts = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *parts])
    vocabulary = Vocabulary(list(bytes_and_parts), VOCABULARY.special)
    tokenizer, reference = Tokenizer(vocabulary), reference_encoding(vocabulary)
    for _ in range(3_000):
        text = "".join(source.choice("abcdehinorst") for _ in range(source.randint(1, 40)))
        assert tokenizer.encode(text) == reference.encode_ordinary(text), repr(text)


def test_a_whole_piece_needs_no_merges() -> None:
    """`xyz` has no split into tokens, so that merging alone never reaches it."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"xyz"]
    tokenizer = Tokenizer(Vocabulary(tokens, VOCABULARY.special))
    assert tokenizer.encode("xyz") == [256]
    assert tokenizer.encode("xyzx") == list(b"xyzx")


@pytest.mark.parametrize(
    "unit", ["a", "A", " ", "\n", "世", "😀", "=", "1", "\u0301", "é", "ab", "\t "]
)
def test_long_runs(unit: str) -> None:
    text = unit * (100_000 // len(unit)) + "end"
    start_s = time.perf_counter()
    ids = TOKENIZER.encode(text)
    elapsed_s = time.perf_counter() - start_s
    assert ids == reference_encode(text)
    assert elapsed_s < 5, "a quadratic merge takes minutes"


@pytest.mark.parametrize("character", ["a", " ", "\n", "世", "😀"])
def test_a_million_times_one_character(character: str) -> None:
    ids = TOKENIZER.encode(character * 1_000_000)
    # Of 25,000 characters in a row each guard rail makes one part, and each part the same ids.
    assert ids == REFERENCE.encode_ordinary(character * 25_000) * 40
    assert TOKENIZER.decode(ids) == character * 1_000_000


def test_long_text_is_cut_where_the_reference_cuts_it() -> None:
    source = random.Random(3)
    text = ""
    while len(text) < 400_000:
        text += " ".join(random_text(source) for _ in range(500))
    text = text[:399_997] + "international" + " " * 30_000 + "words" * 6_000
    assert len(reference_parts(text)) == 4
    assert TOKENIZER.encode(text) == reference_encode(text)
    assert TOKENIZER.encode(text) != REFERENCE.encode_ordinary(text), "the cuts make a difference"


@given(st.text(alphabet="ab \n\x1c\x85\u200b\u3000", max_size=60))
@settings(max_examples=300, deadline=None)
def test_guard_rails_count_runs(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretokenizer, "CUT_LENGTH", 17)
        patch.setattr(pretokenizer, "RUN_LENGTH", 3)
        edges = [0, *guard_rail_cuts(text), len(text)]
    parts = [text[left:right] for left, right in pairwise(edges)]
    assert [part for part in parts if part] == reference_parts(text, 17, 3)


def test_piece_boundaries() -> None:
    text = "“Hello,” 世界世世世界世界——I'm ChatGPT. CAN'T wait 'til 2026.世界世界"
    splitter = pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated")
    expected = (
        "“Hello|,”| |世界世世世界世界|——|I'm| Chat|GPT|.| CAN'T| wait| '|til| |202|6|.|世界世界"
    )
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == expected.split("|")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a世b", ["a", "世", "b"]),
        ("あ世ア한", ["あ", "世", "ア한"]),
        ("x  y", ["x", " ", " y"]),
        ("x \r\n\n  y", ["x", " \r\n\n", " ", " y"]),
        ("//\n/x", ["//\n", "/x"]),
        ("12345", ["123", "45"]),
        ("HTTPServer'Sx", ["HTTPServer'S", "x"]),
    ],
)
def test_pieces(text: str, expected: list[str]) -> None:
    splitter = pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated")
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == expected


@pytest.mark.parametrize("text", VOCABULARY.special)
def test_text_mode_never_makes_a_special_token(text: str) -> None:
    ids = TOKENIZER.encode(f"a{text}")
    assert max(ids) < TOKENIZER.rank_count
    assert ids == REFERENCE.encode_ordinary(f"a{text}")
    assert TOKENIZER.encode_markup(f"a{text}") == [97, TOKENIZER.special_ids[text]]


def test_markup_has_the_ids_of_tiktoken() -> None:
    source = random.Random(4)
    broken = ["<|open", "<<|open|>", "[EOS", "<|reserved_token_1|>", "<|op<|sep|>en|>"]
    for _ in range(3_000):
        parts = [random_text(source), source.choice(VOCABULARY.special), source.choice(broken)]
        text = "".join(source.choices(parts, k=source.randint(1, 6)))
        expected = REFERENCE.encode(text, allowed_special="all")
        assert TOKENIZER.encode_markup(text) == expected, repr(text)


def test_markup_takes_the_longest_of_several_at_one_place() -> None:
    special = list(VOCABULARY.special)
    special[10], special[11], special[12] = "<|open|>er", "<|open|>e", "|>e"
    count = len(VOCABULARY.ordinary)
    tokenizer = Tokenizer(Vocabulary(VOCABULARY.ordinary, special))
    assert tokenizer.encode_markup("<|open|>er") == [count + 10]
    assert tokenizer.encode_markup("<|open|>ex") == [count + 11, ord("x")]
    assert tokenizer.encode_markup("<|open|>x|>e") == [count + 3, ord("x"), count + 12]


def test_guard_rails_do_not_divide_special_tokens() -> None:
    text = "x" * 24_997 + "<|open|>" + "y" * 25_000
    before, _, after = text.partition("<|open|>")
    expected = [
        *REFERENCE.encode_ordinary(before),
        TOKENIZER.special_ids["<|open|>"],
        *REFERENCE.encode_ordinary(after[:24_995]),
        *REFERENCE.encode_ordinary(after[24_995:]),
    ]
    assert TOKENIZER.encode_markup(text) == expected


def test_nothing_encodes_to_nothing() -> None:
    assert TOKENIZER.encode("") == []
    assert TOKENIZER.encode_markup("") == []
    assert TOKENIZER.decode([]) == ""


def test_every_id_decodes() -> None:
    assert TOKENIZER.vocabulary_size == len(VOCABULARY.ordinary) + SPECIAL_SLOT_COUNT
    for token_id in range(TOKENIZER.vocabulary_size):
        expected = REFERENCE.decode_single_token_bytes(token_id)
        assert TOKENIZER.token_bytes(token_id) == expected
        assert TOKENIZER.decode_bytes([token_id, token_id]) == expected * 2
    everything = range(TOKENIZER.vocabulary_size)
    assert TOKENIZER.decode(everything) == REFERENCE.decode(list(everything))


def test_named_and_reserved_slots() -> None:
    first = TOKENIZER.rank_count
    assert TOKENIZER.special_ids["[EOS]"] == first + 1
    assert TOKENIZER.special_ids["<|open|>"] == first + 3
    assert TOKENIZER.decode([first + 8]) == f"<|reserved_token_{first + 8}|>"
    assert TOKENIZER.decode([first + 255]) == "[PAD]"
    assert len(TOKENIZER.special_ids) == SPECIAL_SLOT_COUNT


@pytest.mark.parametrize("token_id", [-1, TOKENIZER.vocabulary_size, 10**20])
def test_an_id_outside_is_an_error(token_id: int) -> None:
    with pytest.raises(InputError, match=rf"in 0\.\.1407, found {token_id}$"):
        TOKENIZER.decode([65, token_id])


def test_bytes_that_are_not_text_are_replaced() -> None:
    assert TOKENIZER.decode([0xE4, 0xB8, 0x41, 0xFF]) == "\ufffdA\ufffd"
    assert TOKENIZER.decode_bytes([0xE4, 0xB8, 0x41, 0xFF]) == b"\xe4\xb8A\xff"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InputError, match=r"U\+D83D, at character 10$"):
        TOKENIZER.encode_markup("a <|open|>\ud83d")


def test_tiny_vocabulary_covers_lower_case() -> None:
    text = "the old lighthouse, 1907:\n(who's there?)"
    ids = TINY.encode(text)
    assert TINY.vocabulary_size == 64 + SPECIAL_SLOT_COUNT
    assert ids[0] == TINY_VOCABULARY.ordinary.index(b"the")
    assert TINY.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the Old", "byte 0x4F, which has no token, in 'O' at character 4"),
        ("<|sep|>né", "byte 0xC3, which has no token, in 'é' at character 8"),
    ],
)
def test_a_byte_without_a_token_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        TINY.encode_markup(text)
    assert caught.value.hint == "this vocabulary has tokens for 59 of 256 bytes"
