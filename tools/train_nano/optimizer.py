"""Muon for the matrices, Adam for all else, a sign step for the router's biases.

Muon (K. Jordan, 2024; scaled as in Moonlight, arXiv 2502.16982) replaces the momentum of a matrix
by the nearest matrix with equal singular values. Adam takes what is no map between two hidden
spaces: embedding, `lm_head`, router, vectors. A routing bias has no gradient; it moves against the
load of its expert (auxiliary-loss-free balancing, arXiv 2408.15664).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

Tree = dict[str, jax.Array]

BIAS_ENDING = "e_score_correction_bias"
#: Matrices that Adam trains nevertheless.
ADAM_ENDINGS = (
    "embed_tokens.weight",
    "lm_head.weight",
    ".gate.weight",
    "b_proj.weight",
    "res_proj.weight",
    "conv1d.weight",
)
#: Coefficients of the quintic iteration that pushes singular values towards 1, and its steps.
QUINTIC, QUINTIC_STEPS = (3.4445, -4.7750, 2.0315), 5
#: Entries of a Muon step have this root mean square at a rate of 1, like those of Adam.
MUON_RMS = 0.2


@dataclass(frozen=True)
class Schedule:
    """Rates over the run: linear warm-up, a slow cosine, and a linear cool-down at the end.

    The cosine does not know where the run ends, so the same run can be made longer without
    starting anew: only its cool-down moves.
    """

    steps: int
    warmup: int = 50
    horizon: int = 1600
    cooldown: int = 350
    muon_rate: float = 6e-3
    adam_rate: float = 3e-3
    bias_rate: float = 2e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    remainder: float = 0.02

    def factor(self, step: jax.Array) -> jax.Array:
        """What the rates are multiplied by at `step`, counted from 0."""
        rising = (step + 1) / self.warmup
        progress = jnp.clip((step - self.warmup) / (self.horizon - self.warmup), 0.0, 1.0)
        cosine = 0.5 * (1.0 + jnp.cos(math.pi * progress))
        slow = self.remainder + (1.0 - self.remainder) * cosine
        left = jnp.clip((self.steps - step) / self.cooldown, self.remainder, 1.0)
        return jnp.minimum(rising, slow * left)


class State(NamedTuple):
    """What the optimizer remembers; second moments only where Adam needs them."""

    step: jax.Array
    first: Tree
    second: Tree


def uses_muon(name: str, weight: jax.Array) -> bool:
    """Whether `name` is a matrix between hidden spaces."""
    return weight.ndim >= 2 and not name.endswith(ADAM_ENDINGS)


def start(weights: Tree) -> State:
    """Empty moments."""
    trained = {name: value for name, value in weights.items() if not name.endswith(BIAS_ENDING)}
    second = {name: value for name, value in trained.items() if not uses_muon(name, value)}
    zeros = jnp.zeros_like
    return State(
        jnp.zeros((), jnp.int32), jax.tree.map(zeros, trained), jax.tree.map(zeros, second)
    )


def update(
    schedule: Schedule, weights: Tree, gradients: Tree, loads: jax.Array, state: State
) -> tuple[Tree, State, jax.Array]:
    """One step from `gradients` and `loads` [expert layers, E]; also the gradients' length."""
    length = jnp.sqrt(
        sum((jnp.sum(gradients[name] ** 2) for name in state.first), start=jnp.zeros(()))
    )
    scale = jnp.minimum(1.0, schedule.clip / (length + 1e-12))
    factor = schedule.factor(state.step)
    count = (state.step + 1).astype(jnp.float32)
    new, first, second = dict(weights), dict(state.first), dict(state.second)
    for name in state.first:
        weight, gradient = weights[name], gradients[name] * scale
        if name in state.second:
            first[name] = 0.9 * state.first[name] + 0.1 * gradient
            second[name] = 0.98 * state.second[name] + 0.02 * gradient**2
            mean = first[name] / (1.0 - 0.9**count)
            change = mean / (jnp.sqrt(second[name] / (1.0 - 0.98**count)) + 1e-9)
            rate = schedule.adam_rate * factor
        else:
            first[name] = 0.95 * state.first[name] + gradient
            change = orthogonalized(gradient + 0.95 * first[name])
            change = change * MUON_RMS * max(weight.shape[-2:]) ** 0.5
            rate = schedule.muon_rate * factor
        # Vectors are gains, biases and mixes; pulling them to zero would change what they mean.
        decay = schedule.weight_decay if min(weight.shape) > 1 else 0.0
        new[name] = weight * (1.0 - rate * decay) - rate * change
    biases = [name for name in weights if name.endswith(BIAS_ENDING)]
    for name, load in zip(biases, loads, strict=True):
        new[name] = weights[name] + schedule.bias_rate * factor * jnp.sign(load.mean() - load)
    return new, State(state.step + 1, first, second), length


def orthogonalized(matrix: jax.Array) -> jax.Array:
    """`matrix` [..., m, n] with singular values near 1."""
    x = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.swapaxes(-1, -2)
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + 1e-12)
    a, b, c = QUINTIC
    for _ in range(QUINTIC_STEPS):
        square = x @ x.swapaxes(-1, -2)
        x = a * x + (b * square + c * (square @ square)) @ x
    return x if matrix.shape[-2] <= matrix.shape[-1] else x.swapaxes(-1, -2)
