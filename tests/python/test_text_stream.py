"""Streamed text equals the text decoded at once, and lags by no more than it must."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3rs.exceptions import InputError
from k3rs.text_stream import TextStream
from k3rs.tokenizer import Tokenizer

# The first 256 ids of this vocabulary are the bytes themselves.
TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[2] / "fixtures" / "vocabulary")

BYTES = st.integers(0, 255)
HARD_BYTES = st.sampled_from([0xC2, 0xE0, 0xE4, 0xED, 0xF0, 0xF4, 0x80, 0x8F, 0x90, 0xA0, 0xBF])
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


@pytest.mark.parametrize(
    "text", ["世界", "é", "한글", "👨\u200d👩\u200d👧\u200d👦", "👍🏽", "e\u0301"]
)
def test_a_character_appears_with_its_last_byte(text: str) -> None:
    expected = [
        piece for character in text for piece in [""] * (len(character.encode()) - 1) + [character]
    ]
    assert streamed(list(text.encode())) == [*expected, ""]


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
