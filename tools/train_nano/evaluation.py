"""Teacher-forced loss of an exported checkpoint, from the stored bytes.

The whole text is one sequence from an empty state, without BOS: every token but the first is
predicted from all tokens before it, and the loss is the mean negative log-likelihood of these.
Bits per byte divide by the bytes of the predicted tokens. An engine that feeds the ids of the text
and reads the logits after each must find the same figures, however it divides the ids into calls.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import network
import numpy as np
from architecture import Architecture
from delta_rule import CHUNK
from numpy.typing import NDArray
from stored_weights import Weights

# Behind `architecture`, which makes the tools of the reference importable.
from checkpoint import read_config, read_weights  # isort: skip

#: Vectors whose logits are computed together.
HEAD_ROWS = 4096


@dataclass(frozen=True)
class Loss:
    """The loss of a text."""

    #: Predicted tokens and the bytes they stand for.
    tokens: int
    bytes: int
    #: Mean negative log-likelihood, nats per token.
    nats: float

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, which do not depend on the vocabulary."""
        return self.nats * self.tokens / self.bytes / math.log(2.0)

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.nats)

    def figures(self) -> dict[str, float]:
        """All figures by name."""
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "nats_per_token": round(self.nats, 5),
            "perplexity": round(self.perplexity, 3),
            "bits_per_byte": round(self.bits_per_byte, 5),
        }


def read_checkpoint(directory: Path) -> tuple[Architecture, dict[str, jax.Array]]:
    """The model of `directory`; experts of a layer are stacked again."""
    shape = Architecture()
    if read_config(directory) != shape.config():
        raise ValueError(f"{directory}: expected the config of `Architecture()`, found another")
    stored = read_weights(directory)
    weights = {}
    for layer in range(shape.layers):
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        for part in ("w1", "w2", "w3") if shape.has_experts(layer) else ():
            stack = [stored.pop(f"{stem}.{expert}.{part}") for expert in range(shape.experts)]
            weights[f"{stem}.{part}"] = jnp.asarray(np.stack(stack), jnp.float32)
    rest = {name: jnp.asarray(value, jnp.float32) for name, value in stored.items()}
    return shape, weights | rest


def losses(shape: Architecture, weights: Weights, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Negative log-likelihood of every token of `ids` but the first, from stored weights."""
    missing = -(len(ids) - 1) % CHUNK
    inputs = jnp.asarray(np.pad(ids[:-1], (0, missing)))
    final = _run(shape, weights, inputs[None])[0]
    parts = [
        _head_losses(
            weights["lm_head.weight"],
            final[start : min(start + HEAD_ROWS, len(ids) - 1)],
            jnp.asarray(ids[start + 1 : start + 1 + HEAD_ROWS]),
        )
        for start in range(0, len(ids) - 1, HEAD_ROWS)
    ]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def summarize(losses: NDArray[np.float64], ids: NDArray[np.int64], tokens: list[bytes]) -> Loss:
    """The mean of `losses`, which belong to `ids[1:]`."""
    lengths = [len(tokens[token]) for token in ids[1 : len(losses) + 1]]
    return Loss(len(losses), sum(lengths), float(losses.mean()))


@partial(jax.jit, static_argnums=0)
def _run(shape: Architecture, weights: Weights, ids: jax.Array) -> jax.Array:
    return network.forward(shape, weights, ids).final


@jax.jit
def _head_losses(head: jax.Array, final: jax.Array, targets: jax.Array) -> jax.Array:
    logits = final @ head.T
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen
