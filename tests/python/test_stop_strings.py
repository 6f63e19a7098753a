from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rs.exceptions import InputError
from k3rs.stop_strings import StopStrings
from k3rs.text_stream import TextStream
from k3rs.tokenizer import Tokenizer

# The first 256 ids of this vocabulary are the bytes themselves.
TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[2] / "fixtures" / "vocabulary")
CHARACTERS = "a世界👍👩\u200d\u0301é"


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stream = StopStrings(stops)
    released = [stream.push(piece) for piece in pieces]
    return [*released, stream.finish()], stream.matched


def run_ids(stops: list[str], ids: list[int]) -> tuple[list[str], bool]:
    """`run` of tokens, which may divide characters."""
    stream = TextStream(TOKENIZER)
    return run(stops, [*(stream.push(token_id) for token_id in ids), stream.finish()])


def first_end(stops: list[str], text: str) -> tuple[str, bool]:
    """What stays of `text`: by looking at each end in turn, the longest string first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], True
    return text, False


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert run([], ["ab", "", "c"]) == (["ab", "", "c", ""], False)


def test_text_before_a_stop_string_is_released_and_nothing_after() -> None:
    assert run(["END"], ["one ENDtwo", "three"]) == (["one ", "", ""], True)


def test_a_possible_start_is_held_until_decided() -> None:
    assert run(["END"], ["a E", "N", "x", "E"]) == (["a ", "", "ENx", "", "E"], False)
    assert run(["END"], ["a E", "N", "D"]) == (["a ", "", "", ""], True)


def test_a_start_inside_a_start_is_found() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", "", ""], True)


def test_the_string_that_is_complete_first_wins_however_the_text_is_cut() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == (["a", ""], True)
    assert "".join(run(["abcd", "bc"], list("abcd"))[0]) == "a"
    assert run(["bc", "abc"], ["xabc"]) == (["x", ""], True)


@pytest.mark.parametrize(
    ("stops", "text", "released"),
    [
        (["abc", "bcd"], "xabcd", "x"),
        (["bcd", "abx"], "abcd", "a"),
        (["ab", "abc"], "xabc", "x"),
        (["abc", "b"], "xabc", "xa"),
        # The end of one string is the start of the other.
        (["abX", "bcY"], "abcY", "a"),
        (["aa"], "baaa", "b"),
        (["abab"], "aababab", "a"),
        (["ab", "ab"], "xabab", "x"),
    ],
)
def test_strings_that_overlap(stops: list[str], text: str, released: str) -> None:
    assert run(stops, [text]) == ([released, ""], True)
    pieces, matched = run(stops, list(text))
    assert ("".join(pieces), matched) == (released, True)


def test_a_string_is_found_wherever_tokens_divide_it() -> None:
    for cut in range(len("one END two")):
        pieces = ["one END two"[:cut], "one END two"[cut:]]
        released, matched = run(["END"], pieces)
        assert ("".join(released), matched) == ("one ", True), cut


def test_text_that_two_strings_hold_is_released_at_the_end() -> None:
    assert run(["abX", "bY"], ["a", "b"]) == (["", "", "ab"], False)
    assert run(["abX", "bY"], ["a", "b", "c"]) == (["", "", "abc", ""], False)


def test_a_string_of_several_bytes_is_met_with_its_last_byte() -> None:
    ids = list("世界人".encode())
    assert run_ids(["界"], ids[:5]) == (["", "", "世", "", "", "\ufffd", ""], False)
    assert run_ids(["界"], ids) == (["", "", "世", *[""] * 8], True)


def test_bytes_within_a_character_are_no_text() -> None:
    # U+4E16 is E4 B8 96: neither U+0096 nor what its single bytes are in Latin-1 is in it.
    ids = list("世".encode())
    for stop in ("\x96", "ä", "¸", "\ufffd"):
        assert run_ids([stop], ids) == (["", "", "世", "", ""], False)
    assert run_ids(["\ufffd"], [*ids[:2], 0x41]) == (["", "", "", "", ""], True)


def test_strings_are_code_points() -> None:
    family = "👨\u200d👩\u200d👧"
    for stops, released in [(["👩"], "👨\u200d"), (["\u200d"], "👨"), (["👩👧"], family)]:
        pieces, matched = run_ids(stops, list(family.encode()))
        assert ("".join(pieces), matched) == (released, released != family)
    assert run(["e"], ["cafe\u0301"]) == (["caf", ""], True)
    assert run(["é"], ["cafe\u0301"]) == (["cafe\u0301", ""], False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="found an empty one"):
        StopStrings(["a", ""])


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_the_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    released, matched = run(stops, pieces)
    assert ("".join(released), matched) == first_end(stops, text)


@given(
    stops=st.lists(st.text(CHARACTERS, min_size=1, max_size=3), max_size=3),
    text=st.text(CHARACTERS, max_size=12),
)
@settings(deadline=None)
def test_the_result_does_not_depend_on_the_tokens(stops: list[str], text: str) -> None:
    expected = first_end(stops, text)
    for ids in (list(text.encode()), TOKENIZER.encode(text)):
        released, matched = run_ids(stops, ids)
        assert ("".join(released), matched) == expected


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=3), max_size=8),
)
def test_no_more_is_held_than_the_longest_possible_start(
    stops: list[str], pieces: list[str]
) -> None:
    stream = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += stream.push(piece)
        if stream.matched:
            break
        starts = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
        assert seen == shown + max(filter(seen.endswith, starts), key=len)
