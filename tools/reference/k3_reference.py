"""Kimi K3's text model as a plain float64 forward pass: the yardstick, not an engine.

Everything is recomputed from the first token, the recurrence runs token by token, an expert is
multiplied one token at a time. Each step that an implementation can get wrong is a method of its
own, so that `mistakes.py` can replace exactly one of them.

Sources: Kimi Linear (arXiv 2510.26692) for Kimi Delta Attention, DeepSeek-V2 (arXiv 2405.04434)
for latent attention, DeepSeek-V3 (arXiv 2412.19437) for the biased router, the published model
code for the rest. `T` is the number of tokens; a linear layer is `x @ weight.T`, without a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from model_config import ModelConfig
from numpy.typing import NDArray

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Epsilon of the two latent norms of MLA. The published code builds them without the config's
#: `rms_norm_eps`, so the default of the norm class holds.
LATENT_NORM_EPS = 1e-6
#: Epsilon under the root when KDA's queries and keys are brought to unit length.
UNIT_LENGTH_EPS = 1e-6
#: Keeps the renormalisation of the router weights away from a division by zero.
RENORMALIZE_EPS = 1e-20


def sigmoid(x: Array) -> Array:
    """The logistic function, without overflow for large negative input."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))


def softmax(x: Array) -> Array:
    """Softmax over the last axis; minus infinity becomes a weight of zero."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def rms_norm(x: Array, gain: Array | float, eps: float) -> Array:
    """`gain * x / sqrt(mean(x^2) + eps)` over the last axis."""
    return np.asarray(gain * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps))


def causal_convolution(x: Array, kernel: Array) -> Array:
    """Depthwise convolution of `x` [T, P] with `kernel` [P, 1, W]; the last tap meets the
    current token, and the input before the first token is zero."""
    taps = kernel.shape[-1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return np.asarray(
        sum(kernel[:, 0, tap] * padded[tap : tap + len(x)] for tap in range(taps)), np.float64
    )


@dataclass
class Route:
    """What the router of one layer decided, for every token."""

    #: Chosen experts in ascending order, [T, k].
    experts: Integers
    #: Their weights, in the same order, [T, k].
    weights: Array
    #: Distance between the last chosen and the first rejected selection value, [T].
    gaps: Array


@dataclass
class Trace:
    """Everything that one forward pass produced."""

    #: Logits after every token, [T, V].
    logits: Array
    #: The partial sum that every layer passes on, [layers, T, hidden].
    hidden: Array
    #: The router's decisions by layer, expert layers only.
    routes: dict[int, Route] = field(default_factory=dict)

    @property
    def router_gap(self) -> float:
        """The smallest gap of all layers and tokens: below it, rounding could change a choice."""
        return min((float(route.gaps.min()) for route in self.routes.values()), default=np.inf)


class K3Reference:
    """The forward pass over weights given as float64 arrays by name.

    Names are the released ones without `language_model.`; a routed expert's matrix is decoded
    and named without `.weight_packed`, for example `model.layers.1.block_sparse_moe.experts.0.w1`.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Array]) -> None:
        self.config = config
        self.weights = weights

    def project(self, x: Array, name: str) -> Array:
        """`x` [T, in] times the transposed matrix `name` [out, in]."""
        return np.asarray(x @ self.weights[f"{name}.weight"].T)

    def norm(self, x: Array, name: str) -> Array:
        """RMS norm with the gain `name` and the config's epsilon."""
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    # Residual stream

    def forward(self, ids: Sequence[int]) -> Trace:
        """Runs the tokens `ids` from an empty state."""
        routes: dict[int, Route] = {}
        hidden: list[Array] = []
        blocks: list[Array] = []
        current = self.weights["model.embed_tokens.weight"][np.asarray(ids)]
        for layer in range(self.config.layer_count):
            name = f"model.layers.{layer}."
            x = self.mix(blocks, current, f"{name}self_attention_res")
            if self.starts_block(layer):
                current = self.start_block(blocks, current)
            current = current + self.attention(layer, self.norm(x, f"{name}input_layernorm"))
            y = self.mix(blocks, current, f"{name}mlp_res")
            y = self.norm(y, f"{name}post_attention_layernorm")
            if self.config.has_experts(layer):
                output, routes[layer] = self.expert_block(f"{name}block_sparse_moe.", y)
            else:
                output = self.mlp(f"{name}mlp.", y)
            current = current + output
            hidden.append(current)
        x = self.norm(self.mix(blocks, current, "model.output_attn_res"), "model.norm")
        head = "model.embed_tokens" if self.config.tied_embeddings else "lm_head"
        return Trace(self.project(x, head), np.stack(hidden), routes)

    def starts_block(self, layer: int) -> bool:
        """Whether the partial sum is put away as a finished block before `layer` adds to it."""
        block = self.config.residual_block
        return block is not None and layer % block == 0

    def start_block(self, blocks: list[Array], current: Array) -> Array:
        """Appends the finished block and returns the new partial sum."""
        blocks.append(current)
        return np.zeros_like(current)

    def mix(self, blocks: list[Array], current: Array, name: str) -> Array:
        """Attention of each token over its finished blocks and its partial sum, all [T, hidden].

        Keys are normalised and carry the gain, values are the raw vectors. Without a finished
        block there is one source only, which is also the ordinary residual stream.
        """
        if not blocks:
            return current
        values = np.stack([*blocks, current], axis=1)
        query = self.weights[f"{name}_norm.weight"] * self.weights[f"{name}_proj.weight"][0]
        probabilities = softmax(self.mix_keys(values) @ query)
        return np.asarray(np.einsum("ts,tsh->th", probabilities, values))

    def mix_keys(self, values: Array) -> Array:
        """The keys of the sources [T, sources, hidden]."""
        return rms_norm(values, 1.0, self.config.rms_norm_eps)

    def attention(self, layer: int, x: Array) -> Array:
        """The attention module of `layer`, [T, hidden] to [T, hidden]."""
        name = f"model.layers.{layer}.self_attn."
        return self.kda(name, x) if layer in self.config.kda_layers else self.mla(name, x)

    # Kimi Delta Attention

    def kda(self, name: str, x: Array) -> Array:
        """Gated delta rule with a decay per key channel, [T, hidden] to [T, hidden]."""
        shape = (len(x), self.config.kda_heads, self.config.kda_head_dim)
        query, key, value = (
            self.short_convolution(
                self.project(x, f"{name}{part}_proj"), self.weights[f"{name}{part}_conv1d.weight"]
            ).reshape(shape)
            for part in "qkv"
        )
        query, key = self.query_and_key(query, key)
        log_decay = self.log_decay(
            name, self.project(self.project(x, f"{name}f_a_proj"), f"{name}f_b_proj").reshape(shape)
        )
        beta = sigmoid(self.project(x, f"{name}b_proj"))
        state = np.zeros((*shape[1:], shape[2]))
        output = np.empty(shape)
        for t in range(len(x)):
            state, output[t] = self.delta_step(
                state, query[t], key[t], value[t], np.exp(log_decay[t]), beta[t]
            )
        if self.config.full_rank_gate:
            gate = self.project(x, f"{name}g_proj")
        else:
            gate = self.project(self.project(x, f"{name}g_a_proj"), f"{name}g_b_proj")
        output = self.gated_norm(output, self.weights[f"{name}o_norm.weight"], gate.reshape(shape))
        return self.project(output.reshape(len(x), -1), f"{name}o_proj")

    def short_convolution(self, x: Array, kernel: Array) -> Array:
        """The causal convolution with SiLU after it, [T, P] to [T, P]."""
        mixed = causal_convolution(x, kernel)
        return mixed * sigmoid(mixed)

    def query_and_key(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Both [T, heads, d] at unit length; the query also carries the score scale."""
        return self.unit_length(query) * self.config.kda_head_dim**-0.5, self.unit_length(key)

    def unit_length(self, x: Array) -> Array:
        """Divides by the length over the last axis: a sum of squares, not a mean."""
        return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + UNIT_LENGTH_EPS))

    def log_decay(self, name: str, z: Array) -> Array:
        """Logarithm of the decay for `z` [T, heads, d]. `A_log` has one value per head; on disk
        it is padded, and only its first `heads` values mean anything."""
        rate = np.exp(self.weights[f"{name}A_log"][: self.config.kda_heads])[:, None]
        biased = z + self.weights[f"{name}dt_bias"].reshape(z.shape[1:])
        if self.config.gate_lower_bound is None:
            return -rate * np.logaddexp(0.0, biased)
        return self.config.gate_lower_bound * sigmoid(rate * biased)

    def delta_step(
        self, state: Array, query: Array, key: Array, value: Array, decay: Array, beta: Array
    ) -> tuple[Array, Array]:
        """One token: `state` [heads, key, value], vectors [heads, d], `beta` [heads]. Decay, read
        what the decayed state holds for the key, write the difference, then answer the query."""
        state = decay[:, :, None] * state
        error = beta[:, None] * (value - np.einsum("hk,hkv->hv", key, state))
        state = state + key[:, :, None] * error[:, None, :]
        return state, np.asarray(np.einsum("hk,hkv->hv", query, state))

    def gated_norm(self, output: Array, gain: Array, gate: Array) -> Array:
        """Norm per head over `output` [T, heads, d], then the sigmoid gate per channel."""
        return rms_norm(output, gain, self.config.rms_norm_eps) * sigmoid(gate)

    # Multi-head latent attention

    def mla(self, name: str, x: Array) -> Array:
        """Causal attention over compressed keys and values, [T, hidden] to [T, hidden]."""
        config = self.config
        if config.query_rank is None:
            query = self.project(x, f"{name}q_proj")
        else:
            latent = self.latent_norm(self.project(x, f"{name}q_a_proj"), f"{name}q_a_layernorm")
            query = self.project(latent, f"{name}q_b_proj")
        latent, shared = self.latent_and_shared_key(name, x)
        expanded = self.project(latent, f"{name}kv_b_proj").reshape(len(x), config.mla_heads, -1)
        key, value = expanded[..., : config.nope_dim], expanded[..., config.nope_dim :]
        scores = self.scores(query.reshape(len(x), config.mla_heads, -1), key, shared)
        later = np.triu(np.ones((len(x), len(x)), dtype=bool), 1)
        probabilities = softmax(np.where(later, -np.inf, scores))
        output = np.einsum("hts,shv->thv", probabilities, value).reshape(len(x), -1)
        if config.mla_output_gate:
            output = output * sigmoid(self.project(x, f"{name}g_proj"))
        return self.project(output, f"{name}o_proj")

    def latent_norm(self, latent: Array, name: str) -> Array:
        """Norm of a latent, with an epsilon of its own."""
        return rms_norm(latent, self.weights[f"{name}.weight"], LATENT_NORM_EPS)

    def latent_and_shared_key(self, name: str, x: Array) -> tuple[Array, Array]:
        """The normalised latent [T, rank] and the raw key part of all heads [T, rope]."""
        compressed = self.project(x, f"{name}kv_a_proj_with_mqa")
        latent = compressed[:, : self.config.latent_rank]
        shared = compressed[:, self.config.latent_rank :]
        return self.latent_norm(latent, f"{name}kv_a_layernorm"), shared

    def scores(self, query: Array, key: Array, shared: Array) -> Array:
        """Scaled scores [heads, T, T] of `query` [T, heads, nope + rope] with `key`
        [T, heads, nope] and `shared` [T, rope]. No rotary embedding is applied."""
        nope = self.config.nope_dim
        own = np.einsum("thd,shd->hts", query[..., :nope], key)
        common = np.einsum("thd,sd->hts", query[..., nope:], shared)
        return np.asarray((own + common) * (nope + self.config.rope_dim) ** -0.5)

    # Feed-forward blocks

    def mlp(self, name: str, x: Array) -> Array:
        """Gated MLP of a dense layer or of the shared experts, [T, hidden] to [T, hidden]."""
        gate, up = self.project(x, f"{name}gate_proj"), self.project(x, f"{name}up_proj")
        return self.project(self.activate(gate, up), f"{name}down_proj")

    def activate(self, gate: Array, up: Array) -> Array:
        """SiTU, or SiLU times `up` where the config asks for it."""
        if self.config.activation == "silu":
            return gate * sigmoid(gate) * up
        return self.situ(gate, up)

    def situ(self, gate: Array, up: Array) -> Array:
        """Both branches capped by a scaled tanh; the sigmoid takes the gate before its cap."""
        beta = self.config.situ_beta
        return beta * np.tanh(gate / beta) * sigmoid(gate) * self.cap_up(up)

    def cap_up(self, up: Array) -> Array:
        """The up branch of SiTU."""
        limit = self.config.situ_linear_beta
        return up if limit is None else np.asarray(limit * np.tanh(up / limit))

    def expert_block(self, name: str, x: Array) -> tuple[Array, Route]:
        """Routed experts on a latent of `x` [T, hidden], and the shared experts on `x` itself."""
        route = self.route(name, x)
        has_latent = self.config.expert_input_size is not None
        latent = self.project(x, f"{name}routed_expert_down_proj") if has_latent else x
        total = np.zeros_like(latent)
        for t, (experts, weights) in enumerate(zip(route.experts, route.weights, strict=True)):
            for expert, weight in zip(experts, weights, strict=True):
                total[t] += weight * self.expert(f"{name}experts.{expert}.", latent[t])
        if has_latent:
            if self.config.expert_sum_norm:
                total = self.norm(total, f"{name}routed_expert_norm")
            total = self.project(total, f"{name}routed_expert_up_proj")
        if self.config.shared_expert_count:
            total = total + self.mlp(f"{name}shared_experts.", x)
        return total, route

    def expert(self, name: str, x: Array) -> Array:
        """One routed expert on one token, [latent] to [latent]."""
        gate, up = self.weights[f"{name}w1"] @ x, self.weights[f"{name}w3"] @ x
        return np.asarray(self.weights[f"{name}w2"] @ self.activate(gate, up))

    def route(self, name: str, x: Array) -> Route:
        """Chooses the experts of every token of `x` [T, hidden]; of equal values the lower index
        wins."""
        count = self.config.experts_per_token
        logits = self.project(x, f"{name}gate")
        softly = self.config.router_activation == "softmax"
        scores = softmax(logits) if softly else sigmoid(logits)
        selection, group_gaps = self.limit_groups(
            scores + self.weights[f"{name}gate.e_score_correction_bias"]
        )
        order = np.argsort(-selection, axis=1, kind="stable")
        experts = np.sort(order[:, :count], axis=1)
        ranked = np.take_along_axis(selection, order, axis=1)
        gaps = np.minimum(ranked[:, count - 1] - ranked[:, count], group_gaps)
        return Route(experts, self.expert_weights(scores, experts), gaps)

    def limit_groups(self, selection: Array) -> tuple[Array, Array]:
        """Puts the experts [T, E] outside the best groups out of reach. A group is a run of
        consecutive experts and is worth the sum of its two best. Also the gaps between groups."""
        groups, kept = self.config.group_count, self.config.groups_kept
        if groups <= kept:
            return selection, np.full(len(selection), np.inf)
        grouped = selection.reshape(len(selection), groups, -1)
        worth = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        order = np.argsort(-worth, axis=1, kind="stable")
        ranked = np.take_along_axis(worth, order, axis=1)
        limited = np.full_like(grouped, -np.inf)
        best = order[:, :kept, None]
        np.put_along_axis(limited, best, np.take_along_axis(grouped, best, axis=1), axis=1)
        return limited.reshape(selection.shape), ranked[:, kept - 1] - ranked[:, kept]

    def expert_weights(self, scores: Array, experts: Integers) -> Array:
        """Weights [T, k] of the chosen experts: their scores without the selection bias."""
        weights = np.take_along_axis(scores, experts, axis=1)
        if self.config.renormalize and self.config.experts_per_token > 1:
            weights = weights / (weights.sum(axis=1, keepdims=True) + RENORMALIZE_EPS)
        return weights * self.config.routed_scale
