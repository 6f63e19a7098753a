"""Trains the small Kimi K3 from one command and exports it in the released layout.

    python tools/train_nano/train.py OUT_DIR [--work WORK_DIR]

`WORK_DIR` keeps the package with the text, `state.npz` (everything needed to go on), the log
`loss.jsonl` and the held-out text. The same command goes on where it stopped; Ctrl-C or SIGTERM
saves after the current step. The result depends on the seed and the number of steps, and not on
how often training was stopped.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import evaluation
import export
import jax
import jax.numpy as jnp
import measure
import model_card
import network
import numpy as np
import optimizer
import vocabulary
from architecture import Architecture
from numpy.typing import NDArray
from stored_weights import as_stored

logger = logging.getLogger("train_nano")

STEPS = 1100
#: Sequences of a step and their length: short ones first, long ones for the last part.
SHORT, LONG, LONG_SHARE = (16, 256), (4, 1024), 0.15
LOG_EVERY, SAVE_EVERY, EXPORT_EVERY = 10, 100, 300
#: Tokens of the held-out text that are looked at while training.
GLANCE_TOKENS = 8192
#: The part of the held-out text that is measured at the end, in characters.
EXCERPT_LENGTH = 30_000
LOG_FILE, HELD_OUT_FILE, EXCERPT_FILE = "loss.jsonl", "held_out.txt", "held_out_excerpt.txt"

Tree = dict[str, jax.Array]
Step = Callable[..., tuple[Tree, optimizer.State, jax.Array, jax.Array, jax.Array]]


@dataclass(frozen=True)
class Text:
    """Both parts of the corpus as ids of the vocabulary."""

    tokens: list[bytes]
    training: NDArray[np.int64]
    held_out: NDArray[np.int64]


def prepare(work: Path, shape: Architecture) -> Text:
    """Fetches the text, learns the vocabulary, writes the held-out part to `work`."""
    text = corpus.load(work)
    (work / HELD_OUT_FILE).write_text(text.held_out)
    (work / EXCERPT_FILE).write_text(corpus.excerpt(text.held_out, EXCERPT_LENGTH))
    tokens = vocabulary.learn(text.training, shape.rank_count)
    encoder = vocabulary.encoder(tokens)
    training, held_out = (
        np.asarray(encoder.encode(part).ids) for part in (text.training, text.held_out)
    )
    return Text(tokens, training, held_out)


def batch(ids: NDArray[np.int64], seed: int, first: int, count: int, length: int) -> jax.Array:
    """Windows `first` to `first + count` of `length + 1` ids, in an order that visits the whole
    text once an epoch; each epoch divides it at other places."""
    per_epoch = (len(ids) - 1 - length) // length
    rows = []
    for window in range(first, first + count):
        dice = np.random.default_rng([seed, length, window // per_epoch])
        shift = int(dice.integers(length))
        start = shift + length * int(dice.permutation(per_epoch)[window % per_epoch])
        rows.append(ids[start : start + length + 1])
    return jnp.asarray(np.stack(rows))


def train_step(
    shape: Architecture,
    schedule: optimizer.Schedule,
    weights: Tree,
    state: optimizer.State,
    ids: jax.Array,
) -> tuple[Tree, optimizer.State, jax.Array, jax.Array, jax.Array]:
    """One step on `ids` [B, T + 1]; also the loss, the length of the gradient and the load of
    the busiest expert relative to the mean."""

    def loss(weights: Tree) -> tuple[jax.Array, jax.Array]:
        stored = as_stored(weights)
        output = network.forward(shape, stored, ids[:, :-1])
        logits = network.logits(stored, output.final)
        chosen = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean(), output.loads

    (value, loads), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    weights, state, length = optimizer.update(schedule, weights, gradients, loads, state)
    return weights, state, value, length, (loads.max(axis=1) / loads.mean(axis=1)).mean()


def save(path: Path, weights: Tree, state: optimizer.State) -> None:
    """Writes everything that the next step depends on, whole or not at all."""
    arrays = {"step": np.asarray(state.step)}
    for kind, tree in (("weight", weights), ("first", state.first), ("second", state.second)):
        arrays |= {f"{kind}:{name}": np.asarray(value) for name, value in tree.items()}
    fresh = path.with_suffix(".new.npz")
    np.savez(fresh, **arrays)  # type: ignore[arg-type]
    fresh.replace(path)


def restore(path: Path) -> tuple[Tree, optimizer.State]:
    """Reads what `save` wrote."""
    trees: dict[str, Tree] = {"weight": {}, "first": {}, "second": {}}
    with np.load(path) as arrays:
        for key in arrays.files:
            kind, _, name = key.partition(":")
            if name:
                trees[kind][name] = jnp.asarray(arrays[key])
        step = jnp.asarray(arrays["step"])
    return trees["weight"], optimizer.State(step, trees["first"], trees["second"])


class Run:
    """One training run: where it stands and where it writes."""

    def __init__(self, output: Path, work: Path, seed: int, steps: int) -> None:
        self.output, self.work, self.seed, self.steps = output, work, seed, steps
        self.shape = Architecture()
        self.schedule = optimizer.Schedule(steps)
        self.text = prepare(work, self.shape)
        self.state_path = work / "state.npz"
        if self.state_path.exists():
            self.weights, self.state = restore(self.state_path)
        else:
            self.weights = network.first_weights(self.shape, seed)
            self.state = optimizer.start(self.weights)
        self.stopped = False
        self.compiled: dict[tuple[int, int], Step] = {}

    def stop(self, *_: object) -> None:
        """Asks the loop to save and end."""
        self.stopped = True

    def run(self) -> None:
        """Trains to the last step, then exports."""
        step = int(self.state.step)
        parameters = sum(value.size for value in self.weights.values())
        logger.info("%d parameters, %d training tokens", parameters, len(self.text.training))
        values: list[float] = []
        began = time.monotonic()
        while step < self.steps and not self.stopped:
            value, length, load = self.advance(step)
            values.append(float(value))
            step += 1
            if step % LOG_EVERY == 0 or step == self.steps:
                seconds = (time.monotonic() - began) / len(values)
                line = {
                    "step": step,
                    "loss": round(float(np.mean(values)), 4),
                    "gradient": round(float(length), 3),
                    "busiest_expert": round(float(load), 2),
                    "seconds_per_step": round(seconds, 2),
                }
                if step % SAVE_EVERY == 0 or step == self.steps:
                    line["held_out_loss"] = round(self.glance(), 4)
                    save(self.state_path, self.weights, self.state)
                self.log(line)
                if step % EXPORT_EVERY == 0 and step < self.steps:
                    self.export(step, line["loss"], {})
                values, began = [], time.monotonic()
        if step < self.steps:
            save(self.state_path, self.weights, self.state)
            logger.info("stopped after step %d; the same command goes on", step)
            return
        loss = self.last_loss()
        self.export(step, loss, {})
        self.export(step, loss, self.measure())

    def advance(self, step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Takes one step."""
        first_long = round((1.0 - LONG_SHARE) * self.steps)
        rows, length = SHORT if step < first_long else LONG
        first = (step if step < first_long else step - first_long) * rows
        ids = batch(self.text.training, self.seed, first, rows, length)
        if (rows, length) not in self.compiled:
            logger.info("compiling for %d sequences of %d tokens", rows, length)
            function = jax.jit(train_step, static_argnums=(0, 1), donate_argnums=(2, 3))
            lowered = function.lower(self.shape, self.schedule, self.weights, self.state, ids)
            self.compiled[rows, length] = lowered.compile()
        result = self.compiled[rows, length](self.weights, self.state, ids)
        self.weights, self.state, *rest = result
        return rest[0], rest[1], rest[2]

    def glance(self) -> float:
        """The loss of the beginning of the held-out text."""
        ids = self.text.held_out[: GLANCE_TOKENS + 1]
        return float(evaluation.losses(self.shape, as_stored(self.weights), ids).mean())

    def measure(self) -> dict[str, dict[str, dict[str, float]]]:
        """Losses of the exported checkpoint and of the n-gram models, by text and model."""
        logger.info("measuring the exported checkpoint")
        text = (self.work / EXCERPT_FILE).read_text()
        own = {"this model": measure.evaluate(self.output, text, None)}
        losses = own | measure.baselines(self.output, text, self.work)
        figures = {"The beginning of the held-out text": losses}
        (self.work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        return figures

    def last_loss(self) -> float:
        """The training loss in the last line of the log."""
        lines = (self.work / LOG_FILE).read_text().splitlines()
        return float(json.loads(lines[-1])["loss"])

    def export(self, step: int, loss: float, figures: dict[str, Any]) -> None:
        """Writes the checkpoint with its card."""
        rows, length = SHORT
        facts = {
            "parameters": sum(value.size for value in self.weights.values()) / 1e6,
            "training_bytes": sum(len(self.text.tokens[token]) for token in self.text.training),
            "held_out_bytes": sum(len(self.text.tokens[token]) for token in self.text.held_out),
            "steps": step,
            "step_tokens": rows * length,
            "epochs": step * rows * length / len(self.text.training),
            "short": length,
            "long": LONG[1],
            "long_share": LONG_SHARE,
            "seed": self.seed,
            "training_loss": loss,
        }
        size = export.write(self.output, self.shape, self.weights, self.text.tokens) / 1e6
        card = model_card.write(self.shape, {**facts, "size": size}, figures)
        (self.output / "MODEL_CARD.md").write_text(card, encoding="utf-8")
        logger.info("exported to %s, %.2f MB", self.output, size)

    def log(self, line: dict[str, Any]) -> None:
        """Adds a line to the log and shows it."""
        with (self.work / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        logger.info("  ".join(f"{key} {value}" for key, value in line.items()))


def keep_memory() -> None:
    """Makes the C library keep freed memory: a step takes and frees the same gigabyte, and giving
    it back to the kernel each time costs a fifth of the step in page faults."""
    trim_threshold, mmap_max = -1, -4
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(mmap_max, 0)
        library.mallopt(trim_threshold, -1)


def main() -> None:
    """Trains, or goes on training."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path, metavar="OUT_DIR")
    parser.add_argument("--work", type=Path, metavar="WORK_DIR", help="default: OUT_DIR.work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logger.setLevel(logging.INFO)
    keep_memory()
    work = arguments.work or arguments.output.with_name(f"{arguments.output.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.output, work, arguments.seed, arguments.steps)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, run.stop)
    run.run()


if __name__ == "__main__":
    main()
