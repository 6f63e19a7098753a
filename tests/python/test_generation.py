from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from k3rs import Sampler, Token, Tokenizer
from k3rs.exceptions import NumericalFault
from k3rs.generation import GenerationOptions, decode

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(FIXTURES / "vocabulary")


class Script:
    """A text whose model says `next_ids` one after the other, with one large logit each."""

    def __init__(self, next_ids: Iterable[int], *, before: Sequence[int] = ()) -> None:
        self.ids = list(before)
        self.computed: list[list[int]] = []
        """The whole text at each call for logits."""
        self._remaining = iter(next_ids)

    def append(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)

    def logits(self) -> NDArray[np.float32]:
        self.computed.append(list(self.ids))
        logits = np.zeros(2000, dtype=np.float32)
        logits[next(self._remaining)] = 9.0
        return logits


def options(
    max_tokens: int,
    *,
    stop_ids: frozenset[int] = frozenset(),
    stop: tuple[str, ...] = (),
    on_logits: Callable[[NDArray[np.float32]], None] | None = None,
) -> GenerationOptions:
    return GenerationOptions(max_tokens, Sampler(), stop_ids, stop, on_logits=on_logits)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` as tokens of one byte each, which no encoder would produce."""
    single = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.rank_count)}
    return [single[bytes([byte])] for byte in text.encode()]


def texts(tokens: list[Token]) -> list[str]:
    return [token.text for token in tokens]


def test_each_token_becomes_part_of_the_text() -> None:
    text = Script([5, 6, 7])
    tokens = list(decode(text, [1, 2, 3], None, options(3)))
    assert [token.id for token in tokens] == [5, 6, 7]
    assert [token.stop_reason for token in tokens] == [None, None, "length"]
    assert text.computed == [[1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 5, 6]]
    assert text.ids == [1, 2, 3, 5, 6, 7]
    assert texts(tokens) == ["", "", ""]
    assert all(token.seconds >= 0 for token in tokens)


def test_a_text_goes_on_from_wherever_it_was_left() -> None:
    text = Script([5, 6, 7])
    next(decode(text, [1], None, options(9)))
    (token,) = decode(text, [], None, options(1))
    assert token.id == 6
    assert text.ids == [1, 5, 6]


def test_a_token_is_computed_when_it_is_asked_for() -> None:
    text = Script([5, 6, 7])
    tokens = decode(text, [1], None, options(3))
    assert text.ids == []
    next(tokens)
    assert text.computed == [[1]]


def test_an_end_token_is_the_last_and_has_no_text(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_ids["[EOS]"]
    said = [*byte_ids(tokenizer, "ab"), end, 5]
    tokens = list(decode(Script(said), [1], tokenizer, options(9, stop_ids=frozenset({end}))))
    assert [token.id for token in tokens] == said[:3]
    assert texts(tokens) == ["a", "b", ""]
    assert tokens[-1].stop_reason == "stop"


def test_an_end_token_in_the_last_step_is_a_stop(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_ids["[EOS]"]
    (token,) = decode(Script([end]), [1], tokenizer, options(1, stop_ids=frozenset({end})))
    assert token.stop_reason == "stop"


def test_without_stop_ids_an_end_token_is_a_token(tokenizer: Tokenizer) -> None:
    end = tokenizer.special_ids["[EOS]"]
    tokens = list(decode(Script([end, end]), [1], tokenizer, options(2)))
    assert texts(tokens) == ["[EOS]", "[EOS]"]
    assert tokens[-1].stop_reason == "length"


def test_a_character_appears_with_its_last_byte(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "é世")
    tokens = list(decode(Script(said), [1], tokenizer, options(5)))
    assert texts(tokens) == ["", "é", "", "", "世"]


def test_a_truncated_character_ends_as_one_replacement_mark(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "a世")
    tokens = list(decode(Script(said), [1], tokenizer, options(3)))
    assert texts(tokens) == ["a", "", "\ufffd"]
    end = tokenizer.special_ids["[EOS]"]
    stopping = options(9, stop_ids=frozenset({end}))
    tokens = list(decode(Script([*said[:3], end]), [1], tokenizer, stopping))
    assert texts(tokens) == ["a", "", "", "\ufffd"]


def test_a_stop_string_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "one END two")
    tokens = list(decode(Script(said), [1], tokenizer, options(99, stop=("END", "two"))))
    assert "".join(texts(tokens)) == "one "
    assert [token.id for token in tokens] == said[:7]
    assert tokens[-1].stop_reason == "stop_string"


def test_what_a_stop_string_held_back_comes_with_the_last_token(tokenizer: Tokenizer) -> None:
    said = byte_ids(tokenizer, "an EN")
    tokens = list(decode(Script(said), [1], tokenizer, options(5, stop=("END",))))
    assert texts(tokens) == ["a", "n", " ", "", "EN"]


def test_logits_are_handed_over_once_per_token() -> None:
    seen: list[int] = []

    def on_logits(logits: NDArray[np.float32]) -> None:
        seen.append(int(np.argmax(logits)))

    list(decode(Script([5, 6]), [1], None, options(2, on_logits=on_logits)))
    assert seen == [5, 6]


def test_a_fault_names_the_position_and_yields_no_token() -> None:
    seen: list[NDArray[np.float32]] = []

    class Failing(Script):
        def logits(self) -> NDArray[np.float32]:
            logits = super().logits()
            if len(self.ids) == 14:
                logits[3] = np.nan
            return logits

    text = Failing([3, 3], before=[0] * 10)
    tokens = decode(text, [1, 2, 4], None, options(9, on_logits=seen.append))
    assert next(tokens).id == 3
    # The prompt stood at 10, 11 and 12, so the token after it at 13.
    with pytest.raises(NumericalFault, match="at position 13, found nan for id 3"):
        next(tokens)
    assert len(seen) == 1
    assert text.ids == [0] * 10 + [1, 2, 4, 3]


def test_penalties_see_the_whole_text_and_what_was_generated() -> None:
    class Flat(Script):
        """Says the lowest ids that are not penalised away."""

        def logits(self) -> NDArray[np.float32]:
            return np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.9], dtype=np.float32)

    def continued(sampler: Sampler) -> list[int]:
        chosen = GenerationOptions(4, sampler)
        return [token.id for token in decode(Flat([], before=[0]), [2], None, chosen)]

    assert continued(Sampler()) == [0, 0, 0, 0]
    # The text is 0, 2: of the others the lowest comes first, then the next.
    assert continued(Sampler(repetition_penalty=2.0)) == [1, 3, 4, 5]
    assert continued(Sampler(presence_penalty=0.05)) == [0, 1, 2, 3]


def test_log_probabilities_are_given_on_request() -> None:
    (token,) = decode(Script([5]), [1], None, options(1))
    assert token.logprobs is None
    chosen = GenerationOptions(1, Sampler(), logprobs=2)
    (token,) = decode(Script([5]), [1], None, chosen)
    assert token.logprobs is not None
    # One logit of 9 and 1999 of 0.
    total = np.log(np.exp(9.0) + 1999)
    assert token.logprobs.chosen == pytest.approx(9 - total, rel=1e-12)
    (first, second) = token.logprobs.top
    assert first == (5, token.logprobs.chosen)
    assert second[0] == 0
    assert second[1] == pytest.approx(-total, rel=1e-12)
