"""Streamed text equals the text decoded at once, and lags by no more than it must."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rs.exceptions import InputError
from k3rs.text_stream import TextStream
from k3rs.tokenizer import Tokenizer
from k3rs.vocabulary import Vocabulary

# The first 256 ids of this vocabulary are the bytes themselves.
TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[2] / "fixtures" / "vocabulary")

BYTES = st.integers(0, 255)
HARD_BYTES = st.sampled_from([0xC2, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0x80, 0x8F, 0x90, 0xA0, 0xBF])
FAMILY = "👨\u200d👩\u200d👧\u200d👦"
FLAGS = "🇫🇷🇯🇵🏴\U000e0067\U000e0062\U000e007f"
SKIN_TONES = "👍🏽👩🏿\u200d💻"
MARKS = "e\u0301Z\u0351\u036bक्षか\u3099"
TEXTS = ["世界", "𠮷野", "é", "한글", FAMILY, FLAGS, SKIN_TONES, MARKS, "1\ufe0f\u20e3"]
ANY_ID = st.integers(0, TOKENIZER.vocabulary_size - 1)


def streamed(ids: list[int]) -> list[str]:
    stream = TextStream(TOKENIZER)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@given(st.lists(st.one_of(ANY_ID, BYTES, HARD_BYTES, HARD_BYTES), max_size=30))
@settings(max_examples=2_000, deadline=None)
def test_random_ids(ids: list[int]) -> None:
    assert "".join(streamed(ids)) == TOKENIZER.decode(ids)


@given(st.text(max_size=20))
@settings(max_examples=300, deadline=None)
def test_text_byte_by_byte(text: str) -> None:
    assert "".join(streamed(list(text.encode()))) == text
    assert "".join(streamed(TOKENIZER.encode(text))) == text


@given(st.lists(HARD_BYTES, max_size=12))
@settings(max_examples=1_000, deadline=None)
def test_no_more_than_an_incomplete_character_is_held(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += stream.push(token_id)
        whole = TOKENIZER.decode(ids[:count])
        assert whole.startswith(shown)
        assert len(whole) - len(shown) <= 1
        if len(whole) > len(shown):
            assert whole.endswith("\ufffd")


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_appears_with_its_last_byte(text: str) -> None:
    expected = [
        piece for character in text for piece in [""] * (len(character.encode()) - 1) + [character]
    ]
    assert streamed(list(text.encode())) == [*expected, ""]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_ends_within_a_character_ends_with_one_mark(text: str) -> None:
    for character in text:
        data = list(character.encode())
        for length in range(1, len(data)):
            pieces = streamed([*text.encode(), *data[:length]])
            assert pieces[-length - 1 :] == [""] * length + ["\ufffd"]
            assert "".join(pieces) == text + "\ufffd"


@pytest.fixture(scope="module")
def window_tokenizer() -> Tokenizer:
    """Has a token for each one to six bytes in a row of `TEXTS`: many divide characters."""
    data = "".join(TEXTS).encode()
    windows = (data[i : i + size] for size in range(1, 7) for i in range(len(data) + 1 - size))
    tokens = dict.fromkeys([*(bytes([byte]) for byte in range(256)), *windows])
    return Tokenizer(Vocabulary(list(tokens), [f"<|{slot}|>" for slot in range(256)]))


def test_tokens_that_divide_characters_leave_no_mark(window_tokenizer: Tokenizer) -> None:
    id_of = {window_tokenizer.token_bytes(i): i for i in range(window_tokenizer.rank_count)}
    source = random.Random(1)
    data = "".join(TEXTS).encode()
    for _ in range(300):
        stream = TextStream(window_tokenizer)
        shown = ""
        end = 0
        while end < len(data):
            start, end = end, end + source.randint(1, 6)
            piece = stream.push(id_of[data[start:end]])
            assert "\ufffd" not in piece
            shown += piece
            assert shown == data[:end].decode(errors="ignore")
        assert stream.finish() == ""


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0xFF, 0x41], ["\ufffd", "A", ""]),
        ([0x80, 0x41], ["\ufffd", "A", ""]),
        ([0xC0, 0xAF], ["\ufffd", "\ufffd", ""]),
        ([0xE4, 0x41], ["", "\ufffdA", ""]),
        ([0xE4, 0xB8, 0xE4], ["", "", "\ufffd", "\ufffd"]),
        ([0xED, 0xA0, 0x80], ["", "\ufffd\ufffd", "\ufffd", ""]),
        ([0xF4, 0x90], ["", "\ufffd\ufffd", ""]),
        ([0xE0, 0x9F], ["", "\ufffd\ufffd", ""]),
        ([0xF0, 0x9F, 0x98], ["", "", "", "\ufffd"]),
        # Overlong forms of `/`, `A` and NUL, of two, three and four bytes.
        ([0xC1, 0x81], ["\ufffd", "\ufffd", ""]),
        ([0xE0, 0x80, 0xAF], ["", "\ufffd\ufffd", "\ufffd", ""]),
        ([0xF0, 0x80, 0x80, 0x80], ["", "\ufffd\ufffd", "\ufffd", "\ufffd", ""]),
        ([0xF0, 0x8F], ["", "\ufffd\ufffd", ""]),
        # A surrogate pair, each half as three bytes.
        ([0xED, 0xA0, 0xBD, 0xED], ["", "\ufffd\ufffd", "\ufffd", "", "\ufffd"]),
        ([0xED, 0xB8, 0x80], ["", "\ufffd\ufffd", "\ufffd", ""]),
        ([0xED, 0x9F, 0xBF], ["", "", "\ud7ff", ""]),
        # Starts of sequences that Unicode does not have.
        ([0xF5, 0x80], ["\ufffd", "\ufffd", ""]),
        ([0xF8, 0x88], ["\ufffd", "\ufffd", ""]),
        ([0xFE, 0x41], ["\ufffd", "A", ""]),
        # Truncated sequences: one mark for each, wherever the next character begins.
        ([0xC3, 0xC3, 0xA9], ["", "\ufffd", "é", ""]),
        ([0xF0, 0x9F, 0x98, 0x41], ["", "", "", "\ufffdA", ""]),
        ([0xF0, 0x9F, 0xF0, 0x9F], ["", "", "\ufffd", "", "\ufffd"]),
        ([0xEF, 0xBB, 0xBF, 0x41], ["", "", "\ufeff", "A", ""]),
    ],
)
def test_bytes_that_cannot_continue_are_replaced_at_once(
    ids: list[int], expected: list[str]
) -> None:
    assert streamed(ids) == expected


def test_a_special_token_ends_an_incomplete_character() -> None:
    sep = TOKENIZER.special_ids["<|sep|>"]
    assert streamed([0xE4, sep, 0x41]) == ["", "\ufffd<|sep|>", "A", ""]


def test_a_finished_stream_is_as_new() -> None:
    stream = TextStream(TOKENIZER)
    stream.push(0xE4)
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert stream.push(0x41) == "A"


def test_an_unknown_id_leaves_the_stream_as_it_was() -> None:
    stream = TextStream(TOKENIZER)
    assert stream.push(0xC3) == ""
    with pytest.raises(InputError):
        stream.push(TOKENIZER.vocabulary_size)
    assert stream.push(0xA9) == "é"
