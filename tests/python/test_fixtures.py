"""Exactness on the project's own checkpoints, against a float64 reference.

`tiny_k3` has the form of the release, each of `forms` one option that a config can ask for.
`fixtures/README.md` says by how much each plausible mistake would move their values.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from expected_values import (
    Case,
    assert_close,
    assert_hidden,
    assert_router,
    fixture_answers,
    observed_case,
)

import k3rs

FIXTURES = Path(__file__).parents[2] / "fixtures"
NAMES = ["tiny_k3", *sorted(f"forms/{path.name}" for path in (FIXTURES / "forms").iterdir())]

# The results are the same bits on every machine, so the bounds are about twice the rounding
# that was measured in the worst of the fixtures: 1.5e-4 for logits of up to 10, 4.8e-5 for
# hidden values of up to 14, 1.0e-6 for weights of up to 1.5.
LOGITS_TOLERANCE = 3e-4
HIDDEN_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 2e-6


@pytest.fixture(
    scope="module",
    params=[(name, backend) for name in NAMES for backend in k3rs.available_backends()],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, backend = request.param
    directory = FIXTURES / name
    with k3rs.Model.open(directory / "model", memory="1GB", backend=backend) as model:
        yield observed_case(name, model, fixture_answers(directory))


def test_logits_at_every_position(case: Case) -> None:
    for found, known in zip(case.found, case.answers, strict=True):
        assert_close(found.logits, known.logits, LOGITS_TOLERANCE)
        assert found.logits.argmax(axis=1).tolist() == known.argmax


def test_hidden_states_after_every_layer(case: Case) -> None:
    assert_hidden(case, HIDDEN_TOLERANCE)


def test_the_choice_of_experts(case: Case) -> None:
    assert_router(case, WEIGHT_TOLERANCE)


def test_greedy_tokens(case: Case) -> None:
    for known in case.answers:
        tokens = case.model.generate(known.ids, max_tokens=len(known.greedy), stop_ids=())
        assert [token.id for token in tokens] == known.greedy
