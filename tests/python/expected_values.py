"""What a checkpoint with known answers should compute, and what k3rs computes from it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

import k3rs

Floats: TypeAlias = NDArray[np.floating[Any]]
Route: TypeAlias = tuple[NDArray[np.int32], Floats]
"""Chosen experts in ascending order and their weights, both [tokens, experts per token]."""


@dataclass(frozen=True)
class Answers:
    """A prompt and what follows from it. Internals are known of one prompt only."""

    ids: list[int]
    argmax: list[int]
    greedy: list[int]
    logits: Floats
    """[tokens, vocabulary], after every id of the prompt."""
    hidden: Floats | None
    """[layers, tokens, hidden], what each layer passes on."""
    router: list[Route] | None
    """One entry for each layer with experts."""
    truth: Floats | None = None
    """Logits in float64 where `logits` are those of a float32 program."""
    greedy_logits: Floats | None = None
    """[greedy ids, vocabulary]: from which each was taken."""


@dataclass(frozen=True)
class Observed:
    """What k3rs makes of a prompt."""

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32]
    router: Sequence[Route]


@dataclass(frozen=True)
class Case:
    """An open checkpoint, what is known about its prompts, and what came out."""

    name: str
    model: k3rs.Model
    answers: list[Answers]
    found: list[Observed]


def observed_case(name: str, model: k3rs.Model, answers: list[Answers]) -> Case:
    """Takes every prompt of `answers` through the model."""
    return Case(name, model, answers, [observe(model, known.ids) for known in answers])


def observe(model: k3rs.Model, ids: list[int]) -> Observed:
    """Takes a prompt through the model at once and records everything."""
    logits, seen = model.session().forward(ids, all_positions=True, capture=("hidden", "router"))
    return Observed(logits, seen["hidden"], seen["router"])


def fixture_answers(directory: Path) -> list[Answers]:
    """The prompts of a directory of `fixtures/`, expected values in float64."""
    tensors = load_file(directory / "expected.safetensors")
    answers = []
    for number, prompt in enumerate(_prompts(directory)):
        router = None
        if f"hidden.{number}" in tensors:
            names = f"router_ids.{number}", f"router_weights.{number}"
            router = list(zip(*(tensors[name] for name in names), strict=True))
        answers.append(
            Answers(
                prompt["ids"],
                prompt["argmax"],
                prompt["greedy"],
                logits=tensors[f"logits.{number}"],
                hidden=tensors.get(f"hidden.{number}"),
                router=router,
            )
        )
    return answers


def oracle_answers(directory: Path) -> list[Answers]:
    """The prompts of an oracle checkpoint: the authors' program in float32, and the truth."""
    tensors = load_file(directory / "expected.safetensors")
    truth = load_file(directory / "truth64.safetensors")
    answers = []
    for number, prompt in enumerate(_prompts(directory)):
        # The internals belong to the second prompt.
        known = number == 1
        answers.append(
            Answers(
                prompt["ids"],
                prompt["argmax"],
                prompt["greedy"],
                logits=tensors[f"logits.{number}"],
                hidden=np.stack(_by_layer(tensors, "hidden")) if known else None,
                router=_oracle_router(tensors) if known else None,
                truth=truth[f"logits.{number}"],
                greedy_logits=tensors[f"gen_logits.{number}"],
            )
        )
    return answers


def root_mean_square(values: Floats) -> float:
    """Of all values, computed in float64."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def assert_close(found: Floats, expected: Floats, tolerance: float) -> None:
    """Every value within an absolute tolerance; NaN never is."""
    assert found.shape == expected.shape
    difference = np.abs(found.astype(np.float64) - expected)
    # A comparison with NaN is false.
    assert bool((difference <= tolerance).all()), f"off by {difference.max()}"


def assert_same_routes(found: Sequence[Route], expected: Sequence[Route], tolerance: float) -> None:
    """The same experts for every token of every layer, weights within the tolerance."""
    for (experts, weights), (expected_experts, expected_weights) in zip(
        found, expected, strict=True
    ):
        assert experts.tolist() == expected_experts.tolist()
        assert_close(weights, expected_weights, tolerance)


def _prompts(directory: Path) -> list[dict[str, Any]]:
    document = json.loads((directory / "expected.json").read_text(encoding="utf-8"))
    prompts: list[dict[str, Any]] = document["prompts"]
    return prompts


def _by_layer(tensors: Mapping[str, NDArray[Any]], name: str) -> list[NDArray[Any]]:
    return [tensors[key] for key in sorted(tensors) if key.startswith(f"{name}.")]


def _oracle_router(tensors: Mapping[str, NDArray[Any]]) -> list[Route]:
    names = "route_idx", "route_weight"
    return list(zip(*(_by_layer(tensors, name) for name in names), strict=True))


def assert_hidden(case: Case, tolerance: float) -> None:
    """The one prompt of which hidden states are known has them after every layer."""
    ((found, expected),) = (
        (found.hidden, known.hidden)
        for found, known in zip(case.found, case.answers, strict=True)
        if known.hidden is not None
    )
    assert len(expected) == case.model.facts["model"]["layers"]
    assert_close(found, expected, tolerance)


def assert_router(case: Case, tolerance: float) -> None:
    """The one prompt of which the routing is known takes it."""
    ((found, expected),) = (
        (found.router, known.router)
        for found, known in zip(case.found, case.answers, strict=True)
        if known.router is not None
    )
    assert expected
    assert_same_routes(found, expected, tolerance)
