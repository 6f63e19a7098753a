"""Tables of what wrong readings change in the outputs of the fixtures."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from checkpoint import read_config, read_weights, to_bf16
from fixture_models import FixtureModel, forms, released_form, tiny_k3
from k3_reference import Array, K3Reference, Trace
from mistakes import MISTAKES
from model_config import ModelConfig
from random_weights import WeightMaker

#: Sizes in which forms differ without being another form.
FREE_SIZES = {"hidden_size", "expert_count"}


def print_report(fixtures: Path) -> None:
    """Prints both tables as Markdown."""
    print("| mistake | logits | same argmax | router weights |\n|---|---|---|---|")
    for row in mistake_rows(fixtures / tiny_k3().directory):
        print(row)
    print("\n| form | read as in the release |\n|---|---|")
    for model in forms():
        print(f"| `{Path(model.directory).name}` | {form_change(model, fixtures)} |")


def mistake_rows(directory: Path) -> list[str]:
    """One row for each mistake, over all prompts of `tiny_k3`."""
    config = ModelConfig.from_json(read_config(directory / "model"))
    weights = read_weights(directory / "model")
    prompts = prompt_ids(directory)
    right = [K3Reference(config, weights).forward(ids) for ids in prompts]
    rows = []
    for mistake in MISTAKES:
        reference = mistake.build(config, weights)
        try:
            wrong = [reference.forward(ids) for ids in prompts]
        except KeyError:
            rows.append(f"| {mistake.name} | tensors missing | - | - |")
            continue
        change = max(logit_change(a, b) for a, b in zip(right, wrong, strict=True))
        same = sum(same_argmax(a, b) for a, b in zip(right, wrong, strict=True))
        router = max(router_change(a, b, config) for a, b in zip(right, wrong, strict=True))
        rows.append(f"| {mistake.name} | {change:.3f} | {same} | {router:.3f} |")
    return rows


def prompt_ids(directory: Path) -> list[list[int]]:
    """The recorded prompts."""
    document = json.loads((directory / "expected.json").read_text("utf-8"))
    return [prompt["ids"] for prompt in document["prompts"]]


def logit_change(right: Trace, wrong: Trace) -> float:
    """Largest change of a logit."""
    return float(np.abs(right.logits - wrong.logits).max())


def same_argmax(right: Trace, wrong: Trace) -> int:
    """Positions at which the largest logit stays the largest."""
    return int((right.logits.argmax(axis=1) == wrong.logits.argmax(axis=1)).sum())


def router_change(right: Trace, wrong: Trace, config: ModelConfig) -> float:
    """Largest change of an expert's weight, an expert that is not chosen counting as 0."""
    return max(
        float(
            np.abs(dense_weights(right, layer, config) - dense_weights(wrong, layer, config)).max()
        )
        for layer in right.routes
    )


def dense_weights(trace: Trace, layer: int, config: ModelConfig) -> Array:
    """The weights of all experts, [T, E]."""
    route = trace.routes[layer]
    dense = np.zeros((len(route.experts), config.expert_count))
    np.put_along_axis(dense, route.experts, route.weights, axis=1)
    return dense


def form_change(model: FixtureModel, fixtures: Path) -> str:
    """What a reader that knows only the released form would make of another one."""
    if model.flat:
        return "no `text_config`, other names"
    directory = fixtures / model.directory
    config, weights = model.config, read_weights(directory / "model")
    prompts = prompt_ids(directory)
    right = [K3Reference(config, weights).forward(ids) for ids in prompts]
    released = asdict(released_form().config)
    changes = {
        name: value
        for name, value in released.items()
        if name not in FREE_SIZES and value != getattr(config, name)
    }
    wrong_config = replace(config, **changes)
    if shapes(wrong_config) != {name: value.shape for name, value in weights.items()}:
        return "tensors missing, left over or of another shape"
    if not changes:
        weights = {k: to_bf16(v).to_float64() for k, v in weights.items()}
    wrong = [K3Reference(wrong_config, weights).forward(ids) for ids in prompts]
    change = max(logit_change(a, b) for a, b in zip(right, wrong, strict=True))
    router = max(router_change(a, b, config) for a, b in zip(right, wrong, strict=True))
    return f"logits {change:.3f}, router weights {router:.3f}"


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that a config asks for, MXFP4 matrices decoded."""
    maker = WeightMaker(config, 1, config.vocab_size)
    found: dict[str, tuple[int, ...]] = {}
    for part in [maker.outer(), *(maker.layer(layer) for layer in range(config.layer_count))]:
        for name, tensor in part.items():
            base, _, kind = name.rpartition(".")
            if kind == "weight_packed":
                rows, bytes_per_row = tensor.values.shape
                found[base] = (rows, 2 * bytes_per_row)
            elif kind != "weight_scale":
                found[name] = tensor.values.shape
    return found
