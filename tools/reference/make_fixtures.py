"""Regenerates everything below `fixtures/` that the reference makes.

    python tools/reference/make_fixtures.py              write the fixtures
    python tools/reference/make_fixtures.py --check      compare the stored ones with new ones
    python tools/reference/make_fixtures.py --mistakes   how far each wrong reading moves outputs

Weights are the same bytes on every machine; expected values are float64 and may differ in their
last bits with the linear algebra library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import (
    Tensor,
    read_config,
    read_safetensors,
    read_weights,
    write_checkpoint,
    write_json,
    write_safetensors,
)
from fixture_models import FixtureModel, forms, tiny_k3
from k3_reference import Array, K3Reference, Trace
from mistake_report import print_report
from model_config import ModelConfig
from mxfp4_cases import mxfp4_document
from release_config import END_OF_MESSAGE, EOS

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
#: A float32 engine lands within about 1e-3 of float64, so it cannot change an argmax whose margin
#: is above the first, nor a choice of experts whose gap is above the second.
MARGIN_MIN, ROUTER_GAP_MIN = 0.02, 1e-4
#: Agreement that `--check` asks of expected values.
CHECK_TOLERANCE = 1e-9


@dataclass
class PromptRun:
    """A prompt with everything recorded of it."""

    ids: list[int]
    trace: Trace
    greedy: list[int]
    min_margin_generated: float

    @property
    def min_margin(self) -> float:
        """Smallest margin over the positions of the prompt."""
        return float(margins(self.trace.logits).min())


class Unsuitable(Exception):
    """The seed gives a model whose decisions are too close, or that stops by itself."""


def margins(logits: Array) -> Array:
    """Distance between the two largest logits of every row."""
    ranked = np.sort(logits, axis=1)
    return np.asarray(ranked[:, -1] - ranked[:, -2])


def require_clear(trace: Trace) -> None:
    """Raises where rounding could change an argmax or a choice of experts."""
    if margins(trace.logits).min() < MARGIN_MIN or trace.router_gap < ROUTER_GAP_MIN:
        raise Unsuitable


def run_prompt(model: FixtureModel, reference: K3Reference, ids: list[int]) -> PromptRun:
    """Runs a prompt and generates greedily, recomputing everything for every token."""
    trace = reference.forward(ids)
    require_clear(trace)
    stop_ids = {model.ordinary_ids + EOS, model.ordinary_ids + END_OF_MESSAGE}
    greedy: list[int] = []
    logits, generated_margins = trace.logits, []
    for _ in range(model.greedy_count):
        generated_margins.append(float(margins(logits[-1:])[0]))
        greedy.append(int(logits[-1].argmax()))
        if greedy[-1] in stop_ids:
            raise Unsuitable
        later = reference.forward(ids + greedy)
        require_clear(later)
        logits = later.logits
    return PromptRun(ids, trace, greedy, min(generated_margins))


def make_model(model: FixtureModel, root: Path) -> None:
    """Writes checkpoint and expected values of the first seed whose decisions are clear."""
    directory = root / model.directory
    for seed in itertools.count(1):
        shards = model.shards(seed)
        write_checkpoint(directory / "model", model.document, shards)
        reference = load(directory / "model")
        try:
            runs = [run_prompt(model, reference, ids) for ids in model.prompts(seed)]
        except Unsuitable:
            continue
        total = sum(tensor.byte_count for shard in shards for tensor in shard.values())
        write_expected(directory, model, runs, {"seed": seed, "total_bytes": total})
        return


def load(directory: Path) -> K3Reference:
    """The reference over a checkpoint on disk: what it computes belongs to the stored bytes."""
    return K3Reference(ModelConfig.from_json(read_config(directory)), read_weights(directory))


def write_expected(
    directory: Path, model: FixtureModel, runs: list[PromptRun], facts: dict[str, Any]
) -> None:
    """Writes `expected.safetensors` and `expected.json`; the README names their fields."""
    tensors = {f"logits.{i}": Tensor("F64", run.trace.logits) for i, run in enumerate(runs)}
    number, trace = model.traced_prompt, runs[model.traced_prompt].trace
    routes = list(trace.routes.values())
    tensors[f"hidden.{number}"] = Tensor("F64", trace.hidden)
    experts = np.stack([route.experts for route in routes])
    tensors[f"router_ids.{number}"] = Tensor("I32", experts.astype("<i4"))
    weights = np.stack([route.weights for route in routes])
    tensors[f"router_weights.{number}"] = Tensor("F64", weights)
    write_safetensors(directory / "expected.safetensors", tensors)
    document = {
        **facts,
        "routed_layers": list(trace.routes),
        "min_margin": min(min(run.min_margin, run.min_margin_generated) for run in runs),
        "min_router_gap": min(run.trace.router_gap for run in runs),
        "logits_std": float(np.concatenate([run.trace.logits for run in runs]).std()),
        "prompts": [
            {
                "ids": run.ids,
                "argmax": run.trace.logits.argmax(axis=1).tolist(),
                "greedy": run.greedy,
                "min_margin": run.min_margin,
                "min_margin_generated": run.min_margin_generated,
            }
            for run in runs
        ],
    }
    write_json(directory / "expected.json", document)


def make_all(root: Path) -> None:
    """Writes every fixture below `root`."""
    (root / "ops").mkdir(parents=True, exist_ok=True)
    write_json(root / "ops" / "mxfp4.json", mxfp4_document())
    for model in [tiny_k3(), *forms()]:
        make_model(model, root)
        print(f"{model.directory}: done", file=sys.stderr)


def check_all() -> bool:
    """Regenerates into a temporary directory and reports stored files that differ."""
    same = True
    with tempfile.TemporaryDirectory() as temporary:
        make_all(Path(temporary))
        for path in sorted(Path(temporary).rglob("*.*")):
            name = path.relative_to(temporary)
            if not (FIXTURES / name).is_file() or not same_content(path, FIXTURES / name):
                print(f"{name}: missing or different from what its seed gives")
                same = False
    return same


def same_content(made: Path, stored: Path) -> bool:
    """Whether two files agree: byte for byte, expected values within the tolerance."""
    if made.name == "expected.json":
        return bool(rounded_json(made) == rounded_json(stored))
    if made.name != "expected.safetensors":
        return made.read_bytes() == stored.read_bytes()
    ours, theirs = dict(read_safetensors(made)), dict(read_safetensors(stored))
    return ours.keys() == theirs.keys() and all(
        ours[k].values.shape == theirs[k].values.shape
        and np.allclose(ours[k].values, theirs[k].values, rtol=0, atol=CHECK_TOLERANCE)
        for k in ours
    )


def rounded_json(path: Path) -> Any:
    """A JSON document with its fractions rounded, so that last bits do not count."""
    return json.loads(path.read_text("utf-8"), parse_float=lambda text: round(float(text), 8))


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Regenerates the fixtures of the reference.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="compare instead of writing")
    action.add_argument("--mistakes", action="store_true", help="print what mistakes would change")
    arguments = parser.parse_args()
    if arguments.mistakes:
        print_report(FIXTURES)
        return 0
    if arguments.check:
        return int(not check_all())
    make_all(FIXTURES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
