"""Log-probabilities against sums that lose nothing (`math.fsum`)."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from k3rs import Sampler
from k3rs.exceptions import InputError, NumericalFault
from k3rs.log_probabilities import LogProbabilities, log_probabilities, log_softmax

VOCABULARY_SIZE = 163_840
LOGITS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40)


def logits_of(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def expected_of(logits: NDArray[np.float32]) -> list[float]:
    values: list[float] = logits.tolist()
    largest = max(values)
    total = math.log(math.fsum(math.exp(value - largest) for value in values))
    return [value - largest - total for value in values]


def exactly(value: Any) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


def test_values_by_hand() -> None:
    logits = logits_of(0, math.log(3), 0, math.log(3))
    found = log_probabilities(logits, 2, 3)
    assert found.chosen == pytest.approx(math.log(1 / 8), abs=1e-7)
    assert [token_id for token_id, _ in found.top] == [1, 3, 0]
    assert [value for _, value in found.top] == pytest.approx(
        [math.log(3 / 8), math.log(3 / 8), math.log(1 / 8)], abs=1e-7
    )


def test_equal_logits_share_and_rank_by_id() -> None:
    found = log_probabilities(np.full(VOCABULARY_SIZE, 3.5, dtype=np.float32), 9, 4)
    share = exactly(-math.log(VOCABULARY_SIZE))
    assert found == LogProbabilities(share, ((0, share), (1, share), (2, share), (3, share)))


@given(LOGITS, st.data())
def test_any_logits(logits: list[float], data: st.DataObject) -> None:
    vector = np.array(logits, dtype=np.float32)
    chosen_id = data.draw(st.integers(0, len(logits) - 1))
    count = data.draw(st.integers(0, len(logits) + 2))
    expected = expected_of(vector)
    found = log_probabilities(vector, chosen_id, count)
    assert found.chosen == exactly(expected[chosen_id])
    ranking = sorted(range(len(logits)), key=lambda token_id: (-vector[token_id], token_id))
    assert [token_id for token_id, _ in found.top] == ranking[:count]
    assert [value for _, value in found.top] == exactly([expected[i] for i in ranking[:count]])


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_released_vocabulary(scale: float) -> None:
    source = np.random.Generator(np.random.PCG64(5))
    # Coarse steps, so that many logits are equal, also at the last place of the top.
    logits = (np.round(source.uniform(-1, 1, VOCABULARY_SIZE), 3) * scale).astype(np.float32)
    expected = expected_of(logits)
    np.testing.assert_allclose(log_softmax(logits), expected, rtol=1e-12, atol=1e-12)
    assert math.fsum(np.exp(log_softmax(logits))) == exactly(1.0)
    ranking = sorted(range(VOCABULARY_SIZE), key=lambda token_id: (-logits[token_id], token_id))
    found = log_probabilities(logits, 77, 20)
    assert found.chosen == exactly(expected[77])
    assert [token_id for token_id, _ in found.top] == ranking[:20]


def test_logits_far_apart() -> None:
    found = log_probabilities(logits_of(1e4, -1e4, 1e4), 1, 2)
    assert found.chosen == exactly(-2e4 - math.log(2))
    assert found.top == ((0, exactly(-math.log(2))), (2, exactly(-math.log(2))))
    # All far below zero, where exponentials that are not shifted vanish.
    assert log_probabilities(logits_of(-1e4, -1e4), 0, 0).chosen == exactly(-math.log(2))
    largest = float(np.finfo(np.float32).max)
    assert log_probabilities(logits_of(largest, -largest), 1, 0).chosen == exactly(-2 * largest)
    assert log_probabilities(logits_of(largest, -largest), 0, 0).chosen == 0.0


def test_count_0_gives_no_top_and_a_large_one_gives_all() -> None:
    logits = logits_of(1, 2)
    assert log_probabilities(logits, 0, 0).top == ()
    for count in (2, 3, 10**30):
        assert [token_id for token_id, _ in log_probabilities(logits, 0, count).top] == [1, 0]


def test_the_first_is_the_greedy_one_also_where_the_values_round_to_one() -> None:
    logits = logits_of(1e-30, 2e-30, 0.5e-30)
    found = log_probabilities(logits, 0, 3)
    assert [token_id for token_id, _ in found.top] == [1, 0, 2]
    assert len({value for _, value in found.top}) == 1
    assert found.top[0][0] == Sampler().pick(logits)


def test_plain_numbers_come_out_and_the_logits_stay_as_they_are() -> None:
    logits = logits_of(1, 3, 2)
    found = log_probabilities(logits, 1, 2)
    ((first_id, first_value), _) = found.top
    assert [type(value) for value in (found.chosen, first_id, first_value)] == [float, int, float]
    assert logits.tolist() == [1, 3, 2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_a_fault_with_its_place(value: float) -> None:
    with pytest.raises(NumericalFault, match=r"at position 8, found .* for id 1 \(1 of 3"):
        log_probabilities(logits_of(1, value, 2), 0, 3, position=8)


def test_arguments_out_of_range_are_refused() -> None:
    logits = logits_of(1, 2, 3)
    for chosen_id in (-1, 3):
        with pytest.raises(InputError, match=rf"chosen id in 0\.\.2, found {chosen_id}$"):
            log_probabilities(logits, chosen_id, 1)
    with pytest.raises(InputError, match=r"at least 0, found -1$"):
        log_probabilities(logits, 0, -1)
    with pytest.raises(InputError, match=r"a vector, found shape \(1, 3\)"):
        log_probabilities(logits.reshape(1, 3), 0, 1)
