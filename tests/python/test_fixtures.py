"""Exactness on the project's own checkpoints, against a float64 reference.

`tiny_k3` has the form of the release, each of `forms` one option that a config can ask for.
`fixtures/README.md` says by how much each plausible mistake would move their values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from expected_values import Answers, assert_close, assert_same_routes, fixture_answers, observe
from numpy.typing import NDArray

import k3rs

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ["tiny_k3", *sorted(f"forms/{path.name}" for path in (FIXTURES / "forms").iterdir())]

# The results are the same bits on every machine, so the bounds are about twice the rounding
# that was measured in the worst of the fixtures: 1.5e-4 for logits of up to 10, 4.8e-5 for
# hidden values of up to 14, 1.0e-6 for weights of up to 1.5.
LOGITS_TOLERANCE = 3e-4
HIDDEN_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 2e-6


@dataclass(frozen=True)
class Case:
    """An open fixture and what is known about it."""

    model: k3rs.Model
    answers: list[Answers]


@pytest.fixture(
    scope="module",
    params=[(name, backend) for name in NAMES for backend in k3rs.available_backends()],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, backend = request.param
    directory = FIXTURES / name
    with k3rs.Model.open(directory / "model", memory="1GB", backend=backend) as model:
        yield Case(model, fixture_answers(directory))


def test_the_values_of_a_prompt(case: Case) -> None:
    for answers in case.answers:
        found = observe(case.model, answers.ids)
        if answers.router is not None:
            assert_same_routes(found.router, answers.router, WEIGHT_TOLERANCE)
        if answers.hidden is not None:
            assert_close(found.hidden, answers.hidden, HIDDEN_TOLERANCE)
        assert_close(found.logits, answers.logits, LOGITS_TOLERANCE)
        assert found.logits.argmax(axis=1).tolist() == answers.argmax


def test_internals_of_one_prompt_are_known(case: Case) -> None:
    layers = case.model.facts["model"]["layers"]
    (answers,) = (answers for answers in case.answers if answers.hidden is not None)
    assert answers.hidden is not None
    assert len(answers.hidden) == layers
    assert answers.router
    assert len(answers.router) < layers


def test_greedy_tokens(case: Case) -> None:
    for answers in case.answers:
        tokens = case.model.generate(answers.ids, max_tokens=len(answers.greedy), stop_ids=())
        assert [token.id for token in tokens] == answers.greedy


def test_the_last_token_alone_has_the_logits_of_the_whole(case: Case) -> None:
    for answers in case.answers:
        session = case.model.session()
        rows: list[NDArray[np.float32]] = [session.forward([token]) for token in answers.ids]
        assert_close(np.stack(rows), answers.logits, LOGITS_TOLERANCE)
