import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from k3rs import Sampler
from k3rs.exceptions import InputError, NumericalFault

# Probabilities 0.5, 0.25, 0.125, 0.125 in the order of ids 2, 0, 1, 3.
HALVES = np.log(np.array([0.25, 0.125, 0.5, 0.125])).astype(np.float32)


def logits_of(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def close_to(*values: float) -> Any:
    return pytest.approx(np.array(values), abs=1e-7)


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    assert Sampler().pick(logits_of(1, 3, 2, 3)) == 1
    assert Sampler().pick(np.zeros(7, dtype=np.float32)) == 0
    assert Sampler().pick(logits_of(-5, -3, -3)) == 1


def test_greedy_ignores_filters_and_seed() -> None:
    for seed in range(5):
        assert Sampler(0.0, top_k=3, top_p=0.9, min_p=0.1, seed=seed).pick(HALVES) == 2


def test_without_filters_the_distribution_is_the_softmax() -> None:
    assert Sampler(1.0).probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)
    # Twice the temperature takes the square root of every ratio.
    weights = np.sqrt([0.25, 0.125, 0.5, 0.125])
    assert Sampler(2.0).probabilities(HALVES) == close_to(*(weights / weights.sum()))


def test_a_tiny_temperature_is_greedy_without_warnings() -> None:
    for temperature in (1e-30, 5e-324):
        sampler = Sampler(temperature, seed=1)
        assert [sampler.pick(HALVES) for _ in range(20)] == [2] * 20
        # Equal maxima share: the temperature is not zero.
        assert sampler.probabilities(logits_of(4, 1, 4)) == close_to(0.5, 0, 0.5)


def test_a_huge_temperature_is_uniform() -> None:
    assert Sampler(1e308).probabilities(logits_of(-3e38, 0, 3e38)) == close_to(1 / 3, 1 / 3, 1 / 3)


def test_top_k_keeps_the_lowest_ids_of_equal_ones() -> None:
    assert Sampler(1.0, top_k=1).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, top_k=3).probabilities(HALVES) == close_to(2 / 7, 1 / 7, 4 / 7, 0)
    assert Sampler(1.0, top_k=99).probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert Sampler(1.0, top_p=0.0).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, top_p=0.49).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, top_p=0.6).probabilities(HALVES) == close_to(1 / 3, 0, 2 / 3, 0)
    assert Sampler(1.0, top_p=0.8).probabilities(HALVES) == close_to(2 / 7, 1 / 7, 4 / 7, 0)
    assert Sampler(1.0, top_p=1.0).probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert Sampler(1.0, min_p=1.0).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, min_p=0.4).probabilities(HALVES) == close_to(1 / 3, 0, 2 / 3, 0)
    assert Sampler(1.0, min_p=0.2).probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)


def test_filters_apply_in_the_documented_order() -> None:
    # After top_k=2 the probabilities are 2/3 and 1/3, so 0.6 is reached by one token;
    # top_p first would have kept two.
    assert Sampler(1.0, top_k=2, top_p=0.6).probabilities(HALVES) == close_to(0, 0, 1, 0)


def test_the_same_seed_gives_the_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(1.0, seed=seed)
        return [sampler.pick(HALVES) for _ in range(64)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_draws_follow_the_distribution() -> None:
    sampler = Sampler(1.0, seed=3)
    counts = np.bincount([sampler.pick(HALVES) for _ in range(20_000)], minlength=4)
    assert counts / 20_000 == pytest.approx([0.25, 0.125, 0.5, 0.125], abs=0.015)


def test_draws_are_the_inverse_of_the_cumulative_distribution() -> None:
    # One uniform number per token, spread over the tokens from the most likely down.
    uniform = np.random.Generator(np.random.PCG64(11)).random(200)
    ranked_ids = np.array([2, 0, 1, 3])
    expected = ranked_ids[np.searchsorted([0.5, 0.75, 0.875], uniform, side="right")]
    sampler = Sampler(1.0, seed=11)
    assert [sampler.pick(HALVES) for _ in range(200)] == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_a_fault_with_its_place(
    temperature: float, value: float
) -> None:
    with pytest.raises(NumericalFault, match=r"at position 41, found .* for id 2 \(1 of 4"):
        Sampler(temperature).pick(logits_of(1, 2, value, 3), position=41)


def test_all_minus_infinity_is_a_fault() -> None:
    with pytest.raises(NumericalFault, match="4 of 4"):
        Sampler().pick(np.full(4, -np.inf, dtype=np.float32))
    with pytest.raises(NumericalFault):
        Sampler(1.0).probabilities(np.full(4, -np.inf, dtype=np.float32))


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": True},
        {"top_p": 1.0001},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 2},
        {"seed": -1},
        {"seed": 0.5},
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(InputError, match=f"expected {name} to be"):
        Sampler(**arguments)


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
)
def test_filters_keep_a_prefix_of_the_ranking(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    vector = np.array(logits, dtype=np.float32)
    sampler = Sampler(temperature, top_k, top_p, min_p, seed=0)
    probabilities = sampler.probabilities(vector)
    assert probabilities.sum() == pytest.approx(1.0)
    ranking = sorted(range(len(logits)), key=lambda token: (-vector[token], token))
    kept = [token for token in ranking if probabilities[token] > 0]
    assert kept == ranking[: len(kept)]
    assert 1 <= len(kept) <= (top_k or len(logits))
    assert probabilities[sampler.pick(vector)] > 0
