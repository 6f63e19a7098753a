"""Weights as they will be stored: the forward pass multiplies by these and no others.

The routed experts are rounded to MXFP4, a few small tensors stay float32, all else becomes BF16.
Rounding has no useful gradient, so the gradient of the rounded weight is taken as that of the
weight itself (straight-through).
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Weights = Mapping[str, jax.Array]

#: Columns that share one scale.
GROUP = 32
#: Endings of the names that the release stores in F32.
F32_ENDINGS = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


def is_expert(name: str) -> bool:
    """Whether `name` stacks a matrix of all routed experts of a layer."""
    return ".experts.w" in name


def as_stored(weights: Weights) -> dict[str, jax.Array]:
    """All weights, rounded to what their stored form can hold."""
    return {name: _straight_through(value, rounded(name, value)) for name, value in weights.items()}


def rounded(name: str, value: jax.Array) -> jax.Array:
    """The value of the tensor `name` after it was stored and read back."""
    if is_expert(name):
        elements, exponents = quantize(value)
        scales = jnp.exp2(exponents.astype(jnp.float32))
        return (elements * scales[..., None]).reshape(value.shape)
    if name.endswith(F32_ENDINGS):
        return value
    # A cast alone may be removed by the compiler, which is free to keep more precision.
    return jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7)


def _straight_through(value: jax.Array, target: jax.Array) -> jax.Array:
    return value + jax.lax.stop_gradient(target - value)


def quantize(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """E2M1 elements [..., groups, 32] and exponents of two [..., groups] of `matrix`.

    The exponent is the smallest for which the largest magnitude of a group is at most 7 units.
    Up to there clipping to 6 costs at most 1 unit, which is what rounding between 4 and 6 costs.
    """
    groups = matrix.reshape(*matrix.shape[:-1], -1, GROUP)
    largest = jnp.abs(groups).max(axis=-1)
    _, exponents = jnp.frexp(largest / 7.0)
    exponents = jnp.clip(exponents, -100, 100)
    magnitude = jnp.abs(groups) * jnp.exp2(-exponents.astype(jnp.float32))[..., None]
    step = jnp.where(magnitude < 2.0, 0.5, jnp.where(magnitude < 4.0, 1.0, 2.0))
    elements = jnp.minimum(jnp.round(magnitude / step) * step, 6.0)
    return jnp.copysign(elements, groups), exponents


def pack(matrix: jax.Array) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The stored bytes of `matrix` [rows, columns]: nibbles and scales."""
    elements, exponents = (np.asarray(part) for part in quantize(matrix))
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = np.searchsorted(magnitudes, np.abs(elements)).astype(np.uint8)
    codes |= np.signbit(elements).astype(np.uint8) << 3
    codes = codes.reshape(len(codes), -1)
    return codes[:, ::2] | (codes[:, 1::2] << 4), (exponents + 127).astype(np.uint8)
