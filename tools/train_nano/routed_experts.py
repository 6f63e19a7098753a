"""Routed experts without dropped tokens: rows sorted by expert, in blocks of one expert each.

Every expert's rows are padded to whole blocks, so that all blocks are one batched product. A
permutation is a gather in both directions; its gradient is written down as the opposite gather,
because a scatter, which it would otherwise become, is slow on a CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

#: Rows of a block.
BLOCK = 64


class Placement(NamedTuple):
    """Where each pair of a token and a chosen expert is computed."""

    #: Row of every pair, [T, k].
    row_of_pair: jax.Array
    #: Pair of every row, counted through [T, k]; 0 for padding.
    pair_of_row: jax.Array
    #: Whether a row is more than padding.
    is_used: jax.Array
    #: Expert of every block of rows.
    expert_of_block: jax.Array


def place(chosen: jax.Array, experts: int) -> Placement:
    """Puts the pairs of `chosen` [T, k] in order."""
    flat = chosen.reshape(-1)
    pairs = flat.size
    blocks = -(-pairs // BLOCK) + experts
    order = jnp.argsort(flat)
    counts = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0)
    ends = jnp.cumsum(counts)
    block_counts = -(-counts // BLOCK)
    block_ends = jnp.cumsum(block_counts)
    starts = (block_ends - block_counts) * BLOCK
    place_in_order = jnp.zeros(pairs, order.dtype).at[order].set(jnp.arange(pairs))
    row_of_pair = starts[flat] + place_in_order - (ends - counts)[flat]
    expert_of_block = jnp.sum(jnp.arange(blocks)[:, None] >= block_ends, axis=1)
    expert_of_block = jnp.minimum(expert_of_block, experts - 1)
    expert_of_row = jnp.repeat(expert_of_block, BLOCK)
    rank = jnp.arange(blocks * BLOCK) - starts[expert_of_row]
    is_used = rank < counts[expert_of_row]
    index = jnp.where(is_used, (ends - counts)[expert_of_row] + rank, 0)
    pair_of_row = jnp.where(is_used, order[index], 0)
    return Placement(row_of_pair.reshape(chosen.shape), pair_of_row, is_used, expert_of_block)


@jax.custom_vjp
def spread(x: jax.Array, placement: Placement) -> jax.Array:
    """The vector of its token for every row, [T, n] to [blocks, BLOCK, n]; zero for padding."""
    per_token = placement.row_of_pair.shape[1]
    rows = x[placement.pair_of_row // per_token] * placement.is_used[:, None]
    return rows.reshape(-1, BLOCK, x.shape[-1])


@jax.custom_vjp
def collect(rows: jax.Array, placement: Placement) -> jax.Array:
    """The result of every pair, [blocks, BLOCK, n] to [T, k, n]."""
    return rows.reshape(-1, rows.shape[-1])[placement.row_of_pair]


def _spread_forward(x: jax.Array, placement: Placement) -> tuple[jax.Array, Placement]:
    return spread(x, placement), placement


def _spread_backward(placement: Placement, gradient: jax.Array) -> tuple[jax.Array, None]:
    return collect(gradient, placement).sum(axis=1), None


def _collect_forward(rows: jax.Array, placement: Placement) -> tuple[jax.Array, Placement]:
    return collect(rows, placement), placement


def _collect_backward(placement: Placement, gradient: jax.Array) -> tuple[jax.Array, None]:
    flat = gradient.reshape(-1, gradient.shape[-1])
    rows = flat[placement.pair_of_row] * placement.is_used[:, None]
    return rows.reshape(-1, BLOCK, gradient.shape[-1]), None


spread.defvjp(_spread_forward, _spread_backward)
collect.defvjp(_collect_forward, _collect_backward)


@jax.custom_vjp
def weights_of_blocks(weights: jax.Array, expert_of_block: jax.Array) -> jax.Array:
    """The matrix of its expert for every block, [E, m, n] to [blocks, m, n]."""
    return weights[expert_of_block]


def _weights_forward(
    weights: jax.Array, expert_of_block: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    experts = jnp.arange(len(weights))
    return weights[expert_of_block], (experts, expert_of_block)


def _weights_backward(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None]:
    experts, expert_of_block = saved
    belongs = (experts[:, None] == expert_of_block).astype(gradient.dtype)
    summed = belongs @ gradient.reshape(len(gradient), -1)
    return summed.reshape(len(experts), *gradient.shape[1:]), None


weights_of_blocks.defvjp(_weights_forward, _weights_backward)
