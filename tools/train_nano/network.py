"""The forward pass of Kimi K3 over whole sequences, and its first weights.

Weights are a flat mapping by released name, without `language_model.`; the matrices of a layer's
routed experts are stacked: `model.layers.1.block_sparse_moe.experts.w1` is [E, M, Z]. `B` is the
number of sequences, `T` their length, a linear layer is `x @ weight.T`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from architecture import (
    GATE_LOWER_BOUND,
    LATENT_NORM_EPS,
    RMS_NORM_EPS,
    SITU_BETA,
    SITU_LINEAR_BETA,
    UNIT_LENGTH_EPS,
    Architecture,
)
from delta_rule import delta_rule
from routed_experts import collect, place, spread, weights_of_blocks
from stored_weights import Weights

#: Queries of an MLA layer that are scored together, and up to how many such blocks the loop over
#: them is written out, which spares the products with later keys.
QUERY_BLOCK, UNROLLED_BLOCKS = 128, 8


class Output(NamedTuple):
    """What the forward pass gives."""

    #: The normalised vector before `lm_head`, [B, T, hidden].
    final: jax.Array
    #: Tokens that each expert received by layer, [expert layers, E].
    loads: jax.Array


def forward(shape: Architecture, weights: Weights, ids: jax.Array) -> Output:
    """Runs `ids` [B, T], every sequence from an empty state; `T` is a multiple of 16."""
    blocks: list[jax.Array] = []
    loads: list[jax.Array] = []
    current: jax.Array | None = weights["model.embed_tokens.weight"][ids]
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        x = mix(weights, f"{name}self_attention_res", blocks, current)
        if layer % shape.residual_block == 0:
            assert current is not None
            blocks.append(current)
            current = None
        attention = mla if layer in shape.mla_layers else kda
        normed = norm(weights, f"{name}input_layernorm", x)
        added = attention(shape, weights, f"{name}self_attn.", normed)
        current = added if current is None else current + added
        y = mix(weights, f"{name}mlp_res", blocks, current)
        y = norm(weights, f"{name}post_attention_layernorm", y)
        if shape.has_experts(layer):
            output, load = expert_block(shape, weights, f"{name}block_sparse_moe.", y)
            loads.append(load)
        else:
            output = mlp(weights, f"{name}mlp.", y)
        current = current + output
    x = mix(weights, "model.output_attn_res", blocks, current)
    return Output(norm(weights, "model.norm", x), jnp.stack(loads))


def logits(weights: Weights, final: jax.Array) -> jax.Array:
    """Logits [..., V] of the vectors [..., hidden]."""
    return final @ weights["lm_head.weight"].T


def project(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """`x` [..., in] times the transposed matrix `name` [out, in]."""
    return x @ weights[f"{name}.weight"].T


def project_all(weights: Weights, names: list[str], x: jax.Array) -> list[jax.Array]:
    """`project` for several names, as one product: small ones are slow."""
    matrices = [weights[f"{name}.weight"] for name in names]
    ends = list(accumulate(len(matrix) for matrix in matrices))
    return jnp.split(x @ jnp.concatenate(matrices).T, ends[:-1], axis=-1)


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """`gain * x / sqrt(mean(x^2) + eps)` over the last axis."""
    return gain * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def norm(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """RMS norm with the gain `name`."""
    return rms_norm(x, weights[f"{name}.weight"], RMS_NORM_EPS)


def mix(
    weights: Weights, name: str, blocks: list[jax.Array], current: jax.Array | None
) -> jax.Array:
    """Attention of each token over its finished blocks and its partial sum [B, T, hidden].

    Keys are normalised, values are raw.
    """
    assert current is not None
    if not blocks:
        return current
    query = weights[f"{name}_norm.weight"] * weights[f"{name}_proj.weight"][0]
    sources = [*blocks, current]
    scores = [
        (source @ query) * jax.lax.rsqrt(jnp.mean(source * source, axis=-1) + RMS_NORM_EPS)
        for source in sources
    ]
    shares = jax.nn.softmax(jnp.stack(scores), axis=0)
    return sum(
        (share[..., None] * source for share, source in zip(shares, sources, strict=True)),
        start=jnp.zeros_like(current),
    )


def kda(shape: Architecture, weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """Kimi Delta Attention, [B, T, hidden] to [B, T, hidden]."""
    heads = (*x.shape[:2], shape.kda_heads, shape.kda_head_dim)
    names = [f"{name}{part}_proj" for part in ("q", "k", "v", "f_a", "b", "g")]
    *mixed, low_rank, strength, gate = project_all(weights, names, x)
    query, key, value = (
        short_convolution(part, weights[f"{name}{letter}_conv1d.weight"]).reshape(heads)
        for letter, part in zip("qkv", mixed, strict=True)
    )
    query, key = unit_length(query) * shape.kda_head_dim**-0.5, unit_length(key)
    rate = jnp.exp(weights[f"{name}A_log"][: shape.kda_heads])[:, None]
    biased = project(weights, f"{name}f_b_proj", low_rank) + weights[f"{name}dt_bias"]
    log_decay = GATE_LOWER_BOUND * jax.nn.sigmoid(rate * biased.reshape(heads))
    output = delta_rule(query, key, value, log_decay, jax.nn.sigmoid(strength))
    output = rms_norm(output, weights[f"{name}o_norm.weight"], RMS_NORM_EPS)
    output = output.reshape(gate.shape) * jax.nn.sigmoid(gate)
    return project(weights, f"{name}o_proj", output)


def short_convolution(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Causal depthwise convolution of `x` [B, T, P] with `kernel` [P, 1, W], and SiLU."""
    taps = kernel.shape[-1]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    parts = (kernel[:, 0, tap] * padded[:, tap : tap + x.shape[1]] for tap in range(taps))
    return jax.nn.silu(sum(parts, start=jnp.zeros_like(x)))


def unit_length(x: jax.Array) -> jax.Array:
    """Divides by the length over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_LENGTH_EPS)


def mla(shape: Architecture, weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """Gated latent attention without rotation, [B, T, hidden] to [B, T, hidden]."""
    batch, length = x.shape[:2]
    names = [f"{name}{part}" for part in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")]
    latent, compressed, gate = project_all(weights, names, x)
    latent = rms_norm(latent, weights[f"{name}q_a_layernorm.weight"], LATENT_NORM_EPS)
    query = project(weights, f"{name}q_b_proj", latent)
    query = query.reshape(batch, length, shape.mla_heads, -1)
    latent, shared = jnp.split(compressed, [shape.latent_rank], axis=-1)
    latent = rms_norm(latent, weights[f"{name}kv_a_layernorm.weight"], LATENT_NORM_EPS)
    expanded = project(weights, f"{name}kv_b_proj", latent)
    expanded = expanded.reshape(batch, length, shape.mla_heads, -1)
    key, value = jnp.split(expanded, [shape.nope_dim], axis=-1)
    shared = jnp.broadcast_to(shared[:, :, None], (*key.shape[:3], shape.rope_dim))
    key = jnp.concatenate([key, shared], axis=-1)
    output = causal_attention(query, key, value).reshape(batch, length, -1)
    return project(weights, f"{name}o_proj", output * jax.nn.sigmoid(gate))


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention over [B, T, heads, d]: a block of queries meets no later block of keys."""
    batch, length, heads, width = query.shape

    def by_head(x: jax.Array) -> jax.Array:
        return x.transpose(0, 2, 1, 3).reshape(batch * heads, length, -1)

    query, key, value = by_head(query * width**-0.5), by_head(key).swapaxes(1, 2), by_head(value)

    def attend(
        query: jax.Array, first: jax.Array | int, key: jax.Array, value: jax.Array
    ) -> jax.Array:
        """Queries from position `first` on."""
        position = first + jnp.arange(query.shape[1])[:, None]
        later = jnp.where(jnp.arange(key.shape[2])[None, :] > position, -1e30, 0.0)
        scores = query @ key + later
        shares = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        return (shares @ value) / shares.sum(axis=-1, keepdims=True)

    starts = range(0, length, QUERY_BLOCK)
    if len(starts) <= UNROLLED_BLOCKS:
        ends = [min(start + QUERY_BLOCK, length) for start in starts]
        parts = [
            attend(query[:, start:end], start, key[:, :, :end], value[:, :end])
            for start, end in zip(starts, ends, strict=True)
        ]
        output = jnp.concatenate(parts, axis=1)
    else:
        padded = jnp.pad(query, ((0, 0), (0, -length % QUERY_BLOCK), (0, 0)))
        padded = padded.reshape(batch * heads, -1, QUERY_BLOCK, width).swapaxes(0, 1)
        blocks = (padded, jnp.asarray(starts))
        output = jax.lax.map(lambda block: attend(block[0], block[1], key, value), blocks)
        output = output.swapaxes(0, 1).reshape(batch * heads, -1, value.shape[-1])[:, :length]
    return output.reshape(batch, heads, length, -1).transpose(0, 2, 1, 3)


def situ(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Both branches capped by a scaled tanh; the sigmoid takes the gate before its cap."""
    capped = SITU_BETA * jnp.tanh(gate / SITU_BETA) * jax.nn.sigmoid(gate)
    return capped * SITU_LINEAR_BETA * jnp.tanh(up / SITU_LINEAR_BETA)


def mlp(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """Gated MLP of a dense layer or of the shared experts."""
    gate, up = project_all(weights, [f"{name}gate_proj", f"{name}up_proj"], x)
    return project(weights, f"{name}down_proj", situ(gate, up))


def expert_block(
    shape: Architecture, weights: Weights, name: str, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Routed and shared experts on `x` [B, T, hidden]; also the tokens that each expert got."""
    flat = x.reshape(-1, shape.hidden)
    scores = jax.nn.sigmoid(project(weights, f"{name}gate", flat))
    selection = scores + weights[f"{name}gate.e_score_correction_bias"]
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(selection), shape.experts_per_token)
    # A product with ones and zeros instead of a gather, whose gradient would be a scatter.
    is_chosen = jax.nn.one_hot(chosen, shape.experts, dtype=x.dtype)
    shares = jnp.einsum("tke,te->tk", is_chosen, scores)
    shares = shares / (shares.sum(axis=-1, keepdims=True) + 1e-20)

    placement = place(chosen, shape.experts)
    matrices = [
        weights_of_blocks(weights[f"{name}experts.{part}"], placement.expert_of_block)
        for part in ("w1", "w2", "w3")
    ]
    rows = spread(project(weights, f"{name}routed_expert_down_proj", flat), placement)
    gate, up = (jnp.einsum("rbz,rmz->rbm", rows, matrices[part]) for part in (0, 2))
    rows = jnp.einsum("rbm,rzm->rbz", situ(gate, up), matrices[1])
    total = jnp.einsum("tk,tkz->tz", shares, collect(rows, placement))
    total = norm(weights, f"{name}routed_expert_norm", total)
    total = project(weights, f"{name}routed_expert_up_proj", total)
    total = total + mlp(weights, f"{name}shared_experts.", flat)
    return total.reshape(x.shape), is_chosen.sum(axis=(0, 1))


# First weights


def first_weights(shape: Architecture, seed: int) -> dict[str, jax.Array]:
    """Random weights: products keep the size of their input, mixes start as plain averages."""
    dice = np.random.default_rng(seed)
    return {name: jnp.asarray(make(dice), jnp.float32) for name, make in _first_weights(shape)}


Maker = Callable[[np.random.Generator], np.ndarray]


def _matrix(rows: int, columns: int, gain: float = 1.0, stack: tuple[int, ...] = ()) -> Maker:
    return lambda dice: dice.normal(0.0, gain * columns**-0.5, (*stack, rows, columns))


def _full(value: float, *size: int) -> Maker:
    return lambda _: np.full(size, value)


def _uniform(low: float, high: float, *size: int) -> Maker:
    return lambda dice: dice.uniform(low, high, size)


def _first_weights(shape: Architecture) -> Iterator[tuple[str, Maker]]:
    hidden = shape.hidden
    yield "model.embed_tokens.weight", lambda dice: dice.normal(0.0, 0.5, (shape.vocab, hidden))
    yield "lm_head.weight", _matrix(shape.vocab, hidden, 0.1)
    yield "model.norm.weight", _full(1.0, hidden)
    yield from _first_mix("model.output_attn_res", hidden)
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{part}.weight", _full(1.0, hidden)
        yield from _first_mix(f"{name}self_attention_res", hidden)
        yield from _first_mix(f"{name}mlp_res", hidden)
        attention = _first_mla if layer in shape.mla_layers else _first_kda
        for part, make in attention(shape):
            yield f"{name}self_attn.{part}", make
        if shape.has_experts(layer):
            for part, make in _first_expert_block(shape):
                yield f"{name}block_sparse_moe.{part}", make
        else:
            for part, make in _first_mlp(hidden, shape.dense_size):
                yield f"{name}mlp.{part}", make


def _first_mix(name: str, hidden: int) -> Iterator[tuple[str, Maker]]:
    yield f"{name}_norm.weight", _full(1.0, hidden)
    yield f"{name}_proj.weight", _full(0.0, 1, hidden)


def _first_kda(shape: Architecture) -> Iterator[tuple[str, Maker]]:
    hidden, width, head = shape.hidden, shape.kda_width, shape.kda_head_dim
    for part in "qkv":
        yield f"{part}_proj.weight", _matrix(width, hidden)
        yield f"{part}_conv1d.weight", _uniform(-0.5, 0.5, width, 1, shape.kernel_size)
    yield "f_a_proj.weight", _matrix(head, hidden)
    yield "f_b_proj.weight", _matrix(width, head)
    yield "b_proj.weight", _matrix(shape.kda_heads, hidden)
    yield "A_log", _full(0.0, head)
    # Memories of a few tokens to a few thousand, spread over the channels.
    yield "dt_bias", _uniform(-8.0, -1.0, width)
    yield "g_proj.weight", _matrix(width, hidden)
    yield "o_norm.weight", _full(1.0, head)
    yield "o_proj.weight", _matrix(hidden, width, 0.5)


def _first_mla(shape: Architecture) -> Iterator[tuple[str, Maker]]:
    hidden, heads = shape.hidden, shape.mla_heads
    yield "q_a_proj.weight", _matrix(shape.query_rank, hidden)
    yield "q_a_layernorm.weight", _full(1.0, shape.query_rank)
    yield "q_b_proj.weight", _matrix(heads * (shape.nope_dim + shape.rope_dim), shape.query_rank)
    yield "kv_a_proj_with_mqa.weight", _matrix(shape.latent_rank + shape.rope_dim, hidden)
    yield "kv_a_layernorm.weight", _full(1.0, shape.latent_rank)
    yield "kv_b_proj.weight", _matrix(heads * (shape.nope_dim + shape.value_dim), shape.latent_rank)
    yield "g_proj.weight", _matrix(heads * shape.value_dim, hidden)
    yield "o_proj.weight", _matrix(hidden, heads * shape.value_dim, 0.5)


def _first_mlp(hidden: int, width: int) -> Iterator[tuple[str, Maker]]:
    yield "gate_proj.weight", _matrix(width, hidden)
    yield "up_proj.weight", _matrix(width, hidden)
    yield "down_proj.weight", _matrix(hidden, width)


def _first_expert_block(shape: Architecture) -> Iterator[tuple[str, Maker]]:
    hidden, latent, width = shape.hidden, shape.expert_input, shape.expert_size
    yield "gate.weight", _matrix(shape.experts, hidden)
    yield "gate.e_score_correction_bias", _full(0.0, shape.experts)
    yield "routed_expert_down_proj.weight", _matrix(latent, hidden)
    yield "routed_expert_norm.weight", _full(1.0, latent)
    yield "routed_expert_up_proj.weight", _matrix(hidden, latent, 0.5)
    for part, make in _first_mlp(hidden, width * shape.shared_experts):
        yield f"shared_experts.{part}", make
    stack = (shape.experts,)
    yield "experts.w1", _matrix(width, latent, stack=stack)
    yield "experts.w2", _matrix(latent, width, stack=stack)
    yield "experts.w3", _matrix(width, latent, stack=stack)
