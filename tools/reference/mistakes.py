"""Wrong readings of the model, each in exactly one place.

`make_fixtures.py --mistakes` runs them on the fixtures and shows how far they move the outputs: a
fixture that an error does not move could not catch it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from k3_reference import (
    Array,
    K3Reference,
    Route,
    causal_convolution,
    rms_norm,
    sigmoid,
    softmax,
)
from model_config import ModelConfig

Weights = dict[str, Array]


@dataclass(frozen=True)
class Mistake:
    """One wrong reading: another forward pass, another config or other weights."""

    name: str
    reference: type[K3Reference] = K3Reference
    config: Callable[[ModelConfig], ModelConfig] = lambda config: config
    weights: Callable[[Weights], Weights] = lambda weights: weights

    def build(self, config: ModelConfig, weights: Weights) -> K3Reference:
        """The reference with this mistake in it."""
        return self.reference(self.config(config), self.weights(dict(weights)))


def instead(name: str, **methods: Callable[..., Any]) -> Mistake:
    """A mistake in single steps of the forward pass."""
    return Mistake(name, reference=type("WrongReference", (K3Reference,), methods))


def configured(name: str, **fields: Any) -> Mistake:
    """A mistake that is the same as another config."""
    return Mistake(name, config=lambda config: replace(config, **fields))


def weighted(name: str, ending: str, change: Callable[[Array], Array]) -> Mistake:
    """A mistake that is the same as other weights: all whose names have the ending."""

    def changed(weights: Weights) -> Weights:
        return {
            key: change(value) if key.endswith(ending) else value for key, value in weights.items()
        }

    return Mistake(name, weights=changed)


def experts(name: str, change: Callable[[Array], Array]) -> Mistake:
    """A mistake in decoding the matrices of the routed experts."""

    def changed(weights: Weights) -> Weights:
        return {k: change(v) if ".experts." in k else v for k, v in weights.items()}

    return Mistake(name, weights=changed)


def decay_by_channel(self: K3Reference, name: str, z: Array) -> Array:
    rate = np.exp(self.weights[f"{name}A_log"])
    biased = z + self.weights[f"{name}dt_bias"].reshape(z.shape[1:])
    assert self.config.gate_lower_bound is not None
    return self.config.gate_lower_bound * sigmoid(rate * biased)


def gate_before_norm(self: K3Reference, output: Array, gain: Array, gate: Array) -> Array:
    return rms_norm(output * sigmoid(gate), gain, self.config.rms_norm_eps)


def silu_gate(self: K3Reference, output: Array, gain: Array, gate: Array) -> Array:
    return rms_norm(output, gain, self.config.rms_norm_eps) * gate * sigmoid(gate)


def query_not_scaled(self: K3Reference, query: Array, key: Array) -> tuple[Array, Array]:
    return self.unit_length(query), self.unit_length(key)


def read_before_write(
    self: K3Reference, state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> tuple[Array, Array]:
    written, _ = K3Reference.delta_step(self, state, q, k, v, decay, beta)
    return written, np.asarray(np.einsum("hk,hkv->hv", q, decay[:, :, None] * state))


def delta_of_undecayed_state(
    _: K3Reference, state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> tuple[Array, Array]:
    error = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    state = decay[:, :, None] * state + k[:, :, None] * error[:, None, :]
    return state, np.asarray(np.einsum("hk,hkv->hv", q, state))


def config_eps_in_latent_norm(self: K3Reference, latent: Array, name: str) -> Array:
    return self.norm(latent, name)


def latent_norm_over_all(self: K3Reference, name: str, x: Array) -> tuple[Array, Array]:
    compressed = self.project(x, f"{name}kv_a_proj_with_mqa")
    rank, dims = self.config.latent_rank, self.config.rope_dim
    gain = np.concatenate([self.weights[f"{name}kv_a_layernorm.weight"], np.ones(dims)])
    return rms_norm(compressed, gain, 1e-6)[:, :rank], compressed[:, rank:]


def rotated(x: Array, positions: Array) -> Array:
    """`x` [T, ..., d] rotated in pairs of neighbours, base 10000."""
    size = x.shape[-1]
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    angles = angles.reshape(len(x), *(1,) * (x.ndim - 2), size // 2)
    even, odd = x[..., 0::2], x[..., 1::2]
    sine, cosine = np.sin(angles), np.cos(angles)
    pairs = np.stack([even * cosine - odd * sine, even * sine + odd * cosine], axis=-1)
    return np.asarray(pairs.reshape(x.shape))


def scores_with_rotary(self: K3Reference, query: Array, key: Array, shared: Array) -> Array:
    positions, nope = np.arange(len(query), dtype=np.float64), self.config.nope_dim
    turned = np.concatenate([query[..., :nope], rotated(query[..., nope:], positions)], axis=-1)
    return K3Reference.scores(self, turned, key, rotated(shared, positions))


def scores_without_shared_key(self: K3Reference, query: Array, key: Array, shared: Array) -> Array:
    return K3Reference.scores(self, query, key, np.zeros_like(shared))


def scores_scaled_by_nope(self: K3Reference, query: Array, key: Array, shared: Array) -> Array:
    nope, rope = self.config.nope_dim, self.config.rope_dim
    scale = float(((nope + rope) / nope) ** 0.5)
    return K3Reference.scores(self, query, key, shared) * scale


def no_final_mix(self: K3Reference, blocks: list[Array], current: Array, name: str) -> Array:
    final = name == "model.output_attn_res"
    return current if final else K3Reference.mix(self, blocks, current, name)


def block_one_layer_early(self: K3Reference, layer: int) -> bool:
    return K3Reference.starts_block(self, layer + 1)


def block_not_cleared(self: K3Reference, blocks: list[Array], current: Array) -> Array:
    K3Reference.start_block(self, blocks, current)
    return current


def mix_of_normalised(self: K3Reference, blocks: list[Array], current: Array, name: str) -> Array:
    if not blocks:
        return current
    keys = self.mix_keys(np.stack([*blocks, current], axis=1))
    query = self.weights[f"{name}_norm.weight"] * self.weights[f"{name}_proj.weight"][0]
    return np.asarray(np.einsum("ts,tsh->th", softmax(keys @ query), keys))


def biased_weights(self: K3Reference, name: str, x: Array) -> Route:
    route = K3Reference.route(self, name, x)
    biased = sigmoid(self.project(x, f"{name}gate"))
    biased = biased + self.weights[f"{name}gate.e_score_correction_bias"]
    return replace(route, weights=self.expert_weights(biased, route.experts))


def gate_not_capped(self: K3Reference, gate: Array, up: Array) -> Array:
    return gate * sigmoid(gate) * self.cap_up(up)


def sigmoid_of_capped_gate(self: K3Reference, gate: Array, up: Array) -> Array:
    beta = self.config.situ_beta
    capped = beta * np.tanh(gate / beta)
    return capped * sigmoid(capped) * self.cap_up(up)


def nibbles_swapped(matrix: Array) -> Array:
    return matrix.reshape(len(matrix), -1, 2)[:, :, ::-1].reshape(matrix.shape)


def w1_and_w3_swapped(weights: Weights) -> Weights:
    other = {"w1": "w3", "w3": "w1"}
    return {k[:-2] + other[k[-2:]] if k[-2:] in other else k: value for k, value in weights.items()}


#: Every mistake worth guarding against, in the order of the forward pass.
MISTAKES = [
    instead("A_log indexed by channel instead of head", log_decay=decay_by_channel),
    instead(
        "no SiLU after the convolution", short_convolution=lambda _, x, w: causal_convolution(x, w)
    ),
    weighted("convolution taps reversed", "_conv1d.weight", lambda w: w[..., ::-1]),
    instead("KDA gate before the norm", gated_norm=gate_before_norm),
    instead("KDA output gate SiLU instead of sigmoid", gated_norm=silu_gate),
    instead("q, k not normalised", unit_length=lambda _, x: x),
    instead("q not scaled by d^-0.5", query_and_key=query_not_scaled),
    instead("output read before the write", delta_step=read_before_write),
    configured("softplus decay although a lower bound is set", gate_lower_bound=None),
    instead("delta computed from the undecayed state", delta_step=delta_of_undecayed_state),
    weighted("dt_bias left out", ".dt_bias", np.zeros_like),
    Mistake(
        "layer lists read as counted from 0",
        config=lambda c: replace(c, kda_layers=frozenset(layer + 1 for layer in c.kda_layers)),
    ),
    instead("rms_norm_eps in the two MLA latent norms", latent_norm=config_eps_in_latent_norm),
    configured("no MLA output gate", mla_output_gate=False),
    instead(
        "latent norm statistics include the shared key part",
        latent_and_shared_key=latent_norm_over_all,
    ),
    instead("rotary embedding applied", scores=scores_with_rotary),
    instead("shared key part left out of the scores", scores=scores_without_shared_key),
    instead("score scale dn^-0.5", scores=scores_scaled_by_nope),
    instead("no final mix", mix=no_final_mix),
    instead("block boundary one layer early", starts_block=block_one_layer_early),
    instead("cur not cleared at a boundary", start_block=block_not_cleared),
    instead("mix keys not normalised", mix_keys=lambda _, values: values),
    instead("mix values normalised", mix=mix_of_normalised),
    instead("biased scores used as weights", route=biased_weights),
    weighted("bias ignored in the selection", ".e_score_correction_bias", np.zeros_like),
    configured("weights not renormalised", renormalize=False),
    configured("routed_scaling_factor ignored", routed_scale=1.0),
    configured("no norm on the expert sum", expert_sum_norm=False),
    configured("no shared expert", shared_expert_count=0),
    experts("nibble order swapped", nibbles_swapped),
    experts("scale exponent off by one", lambda w: 2.0 * w),
    Mistake("w1 and w3 swapped", weights=w1_and_w3_swapped),
    instead("gate not capped", situ=gate_not_capped),
    configured("up not capped", situ_linear_beta=None),
    instead("sigmoid of the capped gate", situ=sigmoid_of_capped_gate),
]
