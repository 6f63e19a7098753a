import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from harness import Prompt
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from k3rs import Model, Sampler, Token
from k3rs.exceptions import InputError, NumericalFault
from k3rs.sampling import Occurrences

# Probabilities 0.5, 0.25, 0.125, 0.125 in the order of ids 2, 0, 1, 3.
HALVES = np.log(np.array([0.25, 0.125, 0.5, 0.125])).astype(np.float32)


def logits_of(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def softmax(*logits: float) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / math.fsum(weights) for weight in weights]


def occurring(prompt: Sequence[int] = (), generated: Sequence[int] = ()) -> Occurrences:
    occurrences = Occurrences(prompt)
    for token_id in generated:
        occurrences.add(token_id)
    return occurrences


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
    for temperature in (0.99e-5, 1e-30, 1e-320, 5e-324):
        sampler = Sampler(temperature, seed=1)
        assert [sampler.pick(HALVES) for _ in range(20)] == [2] * 20
        # The lowest of equal ids, and never the one that is a rounding away.
        assert [sampler.pick(logits_of(1, 4, 4)) for _ in range(20)] == [1] * 20
        assert sampler.probabilities(logits_of(3.9999998, 4, 4)) == close_to(0, 1, 0)


def test_above_it_equal_maxima_share() -> None:
    assert Sampler(1e-5).probabilities(logits_of(4, 1, 4)) == close_to(0.5, 0, 0.5)


def test_a_huge_temperature_is_uniform() -> None:
    assert Sampler(1e308).probabilities(logits_of(-3e38, 0, 3e38)) == close_to(1 / 3, 1 / 3, 1 / 3)


def test_top_k_keeps_the_lowest_ids_of_equal_ones() -> None:
    assert Sampler(1.0, top_k=1).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, top_k=3).probabilities(HALVES) == close_to(2 / 7, 1 / 7, 4 / 7, 0)


@pytest.mark.parametrize("top_k", [0, 4, 5, 10**30])
def test_a_top_k_of_0_or_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    sampler = Sampler(1.0, top_k=top_k)
    assert sampler.probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert Sampler(1.0, top_p=0.0).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, top_p=0.49).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, top_p=0.6).probabilities(HALVES) == close_to(1 / 3, 0, 2 / 3, 0)
    assert Sampler(1.0, top_p=0.8).probabilities(HALVES) == close_to(2 / 7, 1 / 7, 4 / 7, 0)
    assert Sampler(1.0, top_p=1.0).probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)


def test_a_top_p_of_0_takes_the_lowest_of_equal_maxima() -> None:
    for temperature in (0.1, 1.0, 1e308):
        sampler = Sampler(temperature, top_p=0.0, seed=2)
        assert {sampler.pick(logits_of(1, 3, 2, 3)) for _ in range(50)} == {1}


def test_equal_logits_share_and_are_cut_from_the_highest_id_down() -> None:
    equal = np.full(4, -7, dtype=np.float32)
    assert Sampler(1.0).probabilities(equal) == close_to(0.25, 0.25, 0.25, 0.25)
    assert Sampler(1.0, min_p=1.0).probabilities(equal) == close_to(0.25, 0.25, 0.25, 0.25)
    assert Sampler(1.0, top_k=3).probabilities(equal) == close_to(1 / 3, 1 / 3, 1 / 3, 0)
    assert Sampler(1.0, top_p=0.5).probabilities(equal) == close_to(0.5, 0.5, 0, 0)


def test_min_p_is_relative_to_the_most_likely() -> None:
    assert Sampler(1.0, min_p=1.0).probabilities(HALVES) == close_to(0, 0, 1, 0)
    assert Sampler(1.0, min_p=0.4).probabilities(HALVES) == close_to(1 / 3, 0, 2 / 3, 0)
    assert Sampler(1.0, min_p=0.2).probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        # After top_k the probabilities are 2/3 and 1/3, so that one token reaches 0.6. The
        # other order keeps two.
        (Sampler(1.0, top_k=2, top_p=0.6), (0, 0, 1, 0)),
        # Half the temperature squares all: 0.73 reaches 0.6 alone, where 0.5 does not.
        (Sampler(0.5, top_p=0.6), (0, 0, 1, 0)),
        # Twice the temperature: the second token has 0.71 of the first, no longer 0.5.
        (Sampler(2.0, min_p=0.6), (1 / (1 + 2**0.5), 0, 2**0.5 / (1 + 2**0.5), 0)),
        # Of the two that min_p leaves, renormalised, one would reach 0.6.
        (Sampler(1.0, top_p=0.6, min_p=0.4), (1 / 3, 0, 2 / 3, 0)),
    ],
    ids=["top_k then top_p", "temperature then top_p", "temperature then min_p", "min_p last"],
)
def test_filters_apply_in_the_documented_order(
    sampler: Sampler, expected: tuple[float, ...]
) -> None:
    assert sampler.probabilities(HALVES) == close_to(*expected)


def test_the_same_seed_gives_the_same_tokens() -> None:
    def draw(seed: int) -> list[int]:
        sampler = Sampler(1.0, seed=seed)
        return [sampler.pick(HALVES) for _ in range(64)]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(2**64 + 7) != draw(7)


def test_without_a_seed_samplers_differ() -> None:
    draws = [[sampler.pick(HALVES) for _ in range(200)] for sampler in (Sampler(1.0), Sampler(1.0))]
    assert draws[0] != draws[1]


def test_samplers_share_no_state() -> None:
    alone = Sampler(1.0, seed=7)
    expected = [alone.pick(HALVES) for _ in range(64)]
    one, other, greedy = Sampler(1.0, seed=7), Sampler(1.0, seed=8), Sampler()
    drawn = []
    for _ in range(64):
        drawn.append(one.pick(HALVES))
        other.pick(HALVES)
        greedy.pick(HALVES)
        one.probabilities(HALVES)
        np.random.default_rng(0).random()
    assert drawn == expected


def test_calls_that_alternate_sample_as_they_do_alone(model: Model, prompts: list[Prompt]) -> None:
    def call(seed: int) -> Iterator[Token]:
        sampler = Sampler(1.0, seed=seed)
        return model.generate(prompts[0].ids, max_tokens=8, sampler=sampler, stop_ids=())

    alone = [[token.id for token in call(seed)] for seed in (1, 2)]
    assert alone[0] != alone[1]
    together = [(first.id, second.id) for first, second in zip(call(1), call(2), strict=True)]
    assert [list(ids) for ids in zip(*together, strict=True)] == alone


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([3, 9, 1, 5, 7, 2, 20, 4, 8, 6])).astype(np.float32)
    sampler = Sampler(0.8, top_k=9, top_p=0.97, min_p=0.02, seed=3)
    probabilities = sampler.probabilities(logits)
    possible = probabilities > 0
    assert possible.sum() == 8
    draws = 20_000
    counts = np.bincount([sampler.pick(logits) for _ in range(draws)], minlength=10)
    assert counts[~possible].sum() == 0
    expected = draws * probabilities[possible]
    chi_square = float(np.sum((counts[possible] - expected) ** 2 / expected))
    # Seven degrees of freedom: beyond 40 once in a million seeds, and near 0 no chance.
    assert 0.1 < chi_square < 40


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


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(1.0), Sampler(1.0, top_p=0.0)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_when_no_logit_is_finite_no_token_is_made(sampler: Sampler, value: float) -> None:
    logits = np.full(4, value, dtype=np.float32)
    with pytest.raises(NumericalFault, match=r"at position 0, .* for id 0 \(4 of 4 are not"):
        sampler.pick(logits, position=0)
    with pytest.raises(NumericalFault, match="4 of 4"):
        sampler.probabilities(logits)


@pytest.mark.parametrize("shape", [(0,), (2, 4), ()])
def test_logits_that_are_not_those_of_one_position_are_refused(shape: tuple[int, ...]) -> None:
    logits = np.zeros(shape, dtype=np.float32)
    with pytest.raises(InputError, match=r"a vector at position 3, found shape \("):
        Sampler().pick(logits, position=3)
    with pytest.raises(InputError, match="a vector, found shape"):
        Sampler(1.0).probabilities(logits)


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 10**400},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": 1.0},
        {"top_k": math.nan},
        {"top_k": True},
        {"top_p": 1.0001},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 1.0001},
        {"min_p": -0.1},
        {"min_p": math.nan},
        {"seed": -1},
        {"seed": 0.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1},
        {"repetition_penalty": math.nan},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.0001},
        {"presence_penalty": -2.0001},
        {"presence_penalty": math.nan},
        {"frequency_penalty": 2.0001},
        {"frequency_penalty": -2.0001},
        {"frequency_penalty": None},
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


def test_the_representation_shows_every_setting() -> None:
    sampler = Sampler(
        0.5, 3, 0.9, 0.1, 7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.4
    )
    assert repr(sampler) == (
        "Sampler(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, "
        "repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.4)"
    )


def test_repetition_divides_what_is_positive_and_multiplies_what_is_negative() -> None:
    sampler = Sampler(1.0, repetition_penalty=2.0)
    logits = logits_of(2, -1, 0, 3, -4)
    # Once however often an id occurs, and in the prompt as well as behind it.
    occurrences = occurring(prompt=[0, 0, 2], generated=[1, 1, 1])
    expected = softmax(1, -2, 0, 3, -4)
    assert sampler.probabilities(logits, occurrences=occurrences) == close_to(*expected)
    favoured = Sampler(1.0, repetition_penalty=0.5)
    expected = softmax(4, -0.5, 0, 3, -4)
    assert favoured.probabilities(logits, occurrences=occurrences) == close_to(*expected)


def test_presence_and_frequency_count_generated_ids_alone() -> None:
    zeros = np.zeros(4, dtype=np.float32)
    occurrences = occurring(prompt=[0, 0, 3], generated=[1, 1, 2])
    for sampler, expected in [
        (Sampler(1.0, presence_penalty=0.5), (0, -0.5, -0.5, 0)),
        (Sampler(1.0, presence_penalty=-2), (0, 2, 2, 0)),
        (Sampler(1.0, frequency_penalty=0.25), (0, -0.5, -0.25, 0)),
        (Sampler(1.0, frequency_penalty=-0.25), (0, 0.5, 0.25, 0)),
        (Sampler(1.0, presence_penalty=0.5, frequency_penalty=0.25), (0, -1, -0.75, 0)),
    ]:
        found = sampler.probabilities(zeros, occurrences=occurrences)
        assert found == close_to(*softmax(*expected)), sampler


def test_an_id_of_the_prompt_that_is_generated_counts_from_then_on() -> None:
    occurrences = occurring(prompt=[0, 0], generated=[0])
    sampler = Sampler(1.0, frequency_penalty=1.0)
    found = sampler.probabilities(logits_of(1, 0), occurrences=occurrences)
    assert found == close_to(0.5, 0.5)


def test_penalties_apply_in_the_documented_order() -> None:
    occurrences = occurring(generated=[0])
    logits = logits_of(4, 1, 0)
    # 4 / 2 - 1 and not (4 - 1) / 2, where all is divided by the temperature afterwards.
    sampler = Sampler(2.0, repetition_penalty=2.0, presence_penalty=1.0)
    found = sampler.probabilities(logits, occurrences=occurrences)
    assert found == close_to(*softmax(0.5, 0.5, 0))
    # What falls behind through a penalty is what the filters then drop.
    filtered = Sampler(1.0, top_k=1, repetition_penalty=8.0)
    assert filtered.probabilities(logits, occurrences=occurrences) == close_to(0, 1, 0)


def test_greedy_takes_the_largest_logit_after_the_penalties() -> None:
    sampler = Sampler(repetition_penalty=1.2)
    assert sampler.pick(logits_of(3, 2.9), occurrences=occurring(prompt=[0])) == 1
    assert sampler.pick(logits_of(-1, -1.1), occurrences=occurring(prompt=[0])) == 1
    assert sampler.pick(logits_of(3, 2.4), occurrences=occurring(prompt=[0])) == 0
    # Equal after the penalty: the lowest id, penalised or not.
    halved = Sampler(repetition_penalty=2.0)
    assert halved.pick(logits_of(2, 4, 2), occurrences=occurring(generated=[1])) == 0
    counting = Sampler(frequency_penalty=0.5)
    assert counting.pick(logits_of(0, 1.25), occurrences=occurring(generated=[1, 1])) == 1
    assert counting.pick(logits_of(0, 1.25), occurrences=occurring(generated=[1, 1, 1])) == 0


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40), st.data())
def test_without_penalties_occurrences_change_nothing(
    logits: list[float], data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(logits) - 1)))
    vector = np.array(logits, dtype=np.float32)
    occurrences = occurring(prompt=ids, generated=ids)
    assert Sampler().pick(vector, occurrences=occurrences) == logits.index(max(logits))
    sampler = Sampler(0.7, top_p=0.9)
    found = sampler.probabilities(vector, occurrences=occurrences)
    assert found.tolist() == sampler.probabilities(vector).tolist()


def test_without_occurrences_penalties_change_nothing() -> None:
    sampler = Sampler(1.0, repetition_penalty=9.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert sampler.probabilities(HALVES) == close_to(0.25, 0.125, 0.5, 0.125)
    found = sampler.probabilities(HALVES, occurrences=Occurrences())
    assert found == close_to(0.25, 0.125, 0.5, 0.125)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_given_logits_stay_as_they_are(temperature: float) -> None:
    logits = HALVES.copy()
    sampler = Sampler(temperature, repetition_penalty=2.0, frequency_penalty=1.0, seed=1)
    sampler.pick(logits, occurrences=occurring(prompt=[0, 2], generated=[1]))
    assert logits.tolist() == HALVES.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("penalty", "logit"), [(1e-320, 1.0), (1e-300, 3e38), (1e308, -3e38)])
def test_a_penalty_that_makes_a_logit_infinite_is_refused(
    temperature: float, penalty: float, logit: float
) -> None:
    sampler = Sampler(temperature, repetition_penalty=penalty)
    with pytest.raises(InputError, match=r"repetition_penalty that .* of id 2 infinite$"):
        sampler.pick(logits_of(0, 5, logit), occurrences=occurring(prompt=[0, 2]))
    # With the other sign the same penalty makes it nothing, and an id that does not occur
    # is not touched.
    found = sampler.probabilities(logits_of(0, 5, -logit), occurrences=occurring(prompt=[0, 2]))
    assert found == close_to(*((0, 1, 0) if temperature == 0 else softmax(0, 5, 0)))


@pytest.mark.parametrize("token_id", [-1, 1.5, True, 2**63, "0", None])
def test_what_is_no_token_id_does_not_count(token_id: Any) -> None:
    with pytest.raises(InputError, match=r"expected a token id, .* found"):
        Occurrences([0, token_id])
    occurrences = Occurrences([0])
    with pytest.raises(InputError, match=r"expected a token id, .* found"):
        occurrences.add(token_id)
    assert occurrences.text_ids().tolist() == [0]
    assert occurrences.generated_counts()[0].tolist() == []


def test_occurrences_of_another_vocabulary_are_refused() -> None:
    for sampler in (Sampler(repetition_penalty=1.1), Sampler(1.0, presence_penalty=1.0)):
        with pytest.raises(InputError, match=r"occurrences of ids in 0\.\.3, found 4$"):
            sampler.pick(HALVES, occurrences=occurring(prompt=[4]))
        with pytest.raises(InputError, match=r"occurrences of ids in 0\.\.3, found 9$"):
            sampler.probabilities(HALVES, occurrences=occurring(generated=[1, 9]))


def test_occurrences_grow_with_distinct_ids_not_with_the_text() -> None:
    occurrences = occurring(prompt=[5, 6] * 5_000, generated=[6, 7] * 5_000)
    assert sorted(occurrences.text_ids().tolist()) == [5, 6, 7]
    ids, counts = occurrences.generated_counts()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {6: 5_000, 7: 5_000}
