import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3rs.exceptions import InputError
from k3rs.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    stream = StopStrings(stops)
    released = [stream.push(piece) for piece in pieces]
    return [*released, stream.finish()], stream.matched


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
    ends = sorted(
        (end, end - len(stop))
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    )
    assert "".join(released) == (text[: ends[0][1]] if ends else text)
    assert matched == bool(ends)
