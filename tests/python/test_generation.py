from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from k3rs import Sampler, Token, Tokenizer
from k3rs.exceptions import NumericalFault
from k3rs.generation import Forward, GenerationOptions, decode

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(FIXTURES / "vocabulary")


def script(
    next_ids: Sequence[int], size: int = 2000, fed: list[list[int]] | None = None
) -> Forward:
    """A model that says `next_ids` one after the other and notes what it was fed."""
    remaining = iter(next_ids)

    def forward(ids: Sequence[int]) -> NDArray[np.float32]:
        if fed is not None:
            fed.append(list(ids))
        logits = np.zeros(size, dtype=np.float32)
        logits[next(remaining)] = 9.0
        return logits

    return forward


def options(
    max_tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset(),
    stop: tuple[str, ...] = (),
    on_logits: Callable[[NDArray[np.float32]], None] | None = None,
) -> GenerationOptions:
    return GenerationOptions(max_tokens, Sampler(), stop_ids, stop, on_logits)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` as tokens of one byte each, which no encoder would produce."""
    single = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.rank_count)}
    return [single[bytes([byte])] for byte in text.encode()]


def texts(tokens: list[Token]) -> list[str]:
    return [token.text for token in tokens]


def test_each_token_is_fed_back_and_the_last_is_not() -> None:
    fed: list[list[int]] = []
    tokens = list(decode(script([5, 6, 7], fed=fed), [1, 2, 3], None, options(3)))
    assert [token.id for token in tokens] == [5, 6, 7]
    assert [token.stop_reason for token in tokens] == [None, None, "length"]
    assert fed == [[1, 2, 3], [5], [6]]
    assert texts(tokens) == ["", "", ""]
    assert all(token.seconds >= 0 for token in tokens)


def test_a_token_is_computed_when_it_is_asked_for() -> None:
    fed: list[list[int]] = []
    tokens = decode(script([5, 6, 7], fed=fed), [1], None, options(3))
    assert fed == []
    next(tokens)
    assert fed == [[1]]


def test_an_end_token_is_the_last_and_has_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_ids["[EOS]"]
    said = [*byte_ids(tokenizer, "ab"), end, 5]
    tokens = list(decode(script(said), [1], tokenizer, options(9, stop_ids=frozenset({end}))))
    assert [token.id for token in tokens] == said[:3]
    assert texts(tokens) == ["a", "b", ""]
    assert tokens[-1].stop_reason == "stop"


def test_an_end_token_in_the_last_step_is_a_stop(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_ids["[EOS]"]
    (token,) = decode(script([end]), [1], tokenizer, options(1, stop_ids=frozenset({end})))
    assert token.stop_reason == "stop"


def test_without_stop_ids_an_end_token_is_a_token(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_ids["[EOS]"]
    tokens = list(decode(script([end, end]), [1], tokenizer, options(2)))
    assert texts(tokens) == ["[EOS]", "[EOS]"]
    assert tokens[-1].stop_reason == "length"


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "é世")
    tokens = list(decode(script(said), [1], tokenizer, options(5)))
    assert texts(tokens) == ["", "é", "", "", "世"]


def test_a_truncated_character_ends_as_one_replacement_mark(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "a世")
    tokens = list(decode(script(said), [1], tokenizer, options(3)))
    assert texts(tokens) == ["a", "", "\ufffd"]
    end = tokenizer.special_ids["[EOS]"]
    stopping = options(9, stop_ids=frozenset({end}))
    tokens = list(decode(script([*said[:3], end]), [1], tokenizer, stopping))
    assert texts(tokens) == ["a", "", "", "\ufffd"]


def test_a_stop_string_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "one END two")
    tokens = list(decode(script(said), [1], tokenizer, options(99, stop=("END", "two"))))
    assert "".join(texts(tokens)) == "one "
    assert [token.id for token in tokens] == said[:7]
    assert tokens[-1].stop_reason == "stop_string"


def test_what_a_stop_string_held_back_comes_with_the_last_token(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "an EN")
    tokens = list(decode(script(said), [1], tokenizer, options(5, stop=("END",))))
    assert texts(tokens) == ["a", "n", " ", "", "EN"]


def test_logits_are_handed_over_once_per_token() -> None:
    seen: list[int] = []

    def on_logits(logits: NDArray[np.float32]) -> None:
        seen.append(int(np.argmax(logits)))

    list(decode(script([5, 6]), [1], None, options(2, on_logits=on_logits)))
    assert seen == [5, 6]


def test_a_fault_names_the_position_and_yields_no_token() -> None:
    seen: list[NDArray[np.float32]] = []

    def forward(ids: Sequence[int]) -> NDArray[np.float32]:
        logits = np.ones(8, dtype=np.float32)
        logits[3] = np.nan if len(ids) == 1 else 2
        return logits

    tokens = decode(forward, [1, 2, 4], None, options(9, on_logits=seen.append), first_position=10)
    assert next(tokens).id == 3
    # The prompt stood at 10, 11 and 12, so the token after it at 13.
    with pytest.raises(NumericalFault, match="at position 13, found nan for id 3"):
        next(tokens)
    assert len(seen) == 1
