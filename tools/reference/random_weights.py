"""Random weights in the stored form, scaled so that every part of the model matters.

All draws are integer arithmetic on the raw output of PCG64, which numpy guarantees to be stable,
so a seed gives the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from checkpoint import SCALE_GROUP, Tensor, to_bf16
from model_config import ModelConfig
from numpy.typing import NDArray

Array = NDArray[np.float64]
#: Stores the values of a trunk tensor: BF16 as released, or F32.
TrunkWriter = Callable[[Array], Tensor]

#: Width of the latents of MLA, small enough that the epsilon of their norms shows.
LATENT_RMS = 2e-3
#: Typical product of gate and up in a gated MLP with the widths below.
ACTIVATION_RMS = 25.0
GATE_STD, UP_STD = 4.0, 15.0
#: Standard deviation of the logits of ordinary ids, and of the special ones relative to it:
#: generated text then consists of ordinary ids for the most part.
LOGIT_STD, SPECIAL_LOGITS = 4.0, 0.5


class Dice:
    """A stream of random arrays."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def bytes(self, *shape: int, low: int = 0, high: int = 255) -> NDArray[np.uint8]:
        """Integers in `low..=high`; slightly uneven where the range does not divide 2^16."""
        count = int(np.prod(shape))
        draws = self._words(count) % np.uint16(high - low + 1) + np.uint16(low)
        return draws.astype(np.uint8).reshape(shape)

    def uniform(self, low: float, high: float, *shape: int) -> Array:
        """Uniform values, 2^16 steps."""
        words = self._words(int(np.prod(shape))).reshape(shape)
        return np.asarray(low + (high - low) * (words.astype(np.float64) + 0.5) / 65536.0)

    def normal(self, deviation: float, *shape: int) -> Array:
        """Nearly normal values: sums of twelve uniform ones, which have variance 1."""
        words = self._words(12 * int(np.prod(shape))).reshape(*shape, 12)
        sums = words.sum(axis=-1, dtype=np.int64)
        return np.asarray(deviation * (sums.astype(np.float64) - 6.0 * 65535.0) / 65536.0)

    def _words(self, count: int) -> NDArray[np.uint16]:
        raw = np.atleast_1d(self._bits.random_raw(-(-count // 4)))
        return raw.astype("<u8").view("<u2")[:count]


def f32(values: Array) -> Tensor:
    """Stores the values in F32."""
    return Tensor("F32", values.astype("<f4"))


class WeightMaker:
    """Draws the tensors of one model; names as `k3_reference.py` has them, in stored form."""

    def __init__(
        self, config: ModelConfig, seed: int, ordinary_ids: int, trunk: TrunkWriter = to_bf16
    ) -> None:
        self.config = config
        self.dice = Dice(seed)
        self.ordinary_ids = ordinary_ids
        self.trunk = trunk

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        """A matrix whose product with a vector of rms 1 has rms `gain`."""
        return self.trunk(self.dice.normal(gain * columns**-0.5, rows, columns))

    def gain(self, size: int) -> Array:
        """The gain of a norm."""
        return 1.0 + self.dice.normal(0.2, size)

    def outer(self) -> dict[str, Tensor]:
        """Embedding, final mix and norm, `lm_head`."""
        config = self.config
        rows = np.full((config.vocab_size, 1), LOGIT_STD)
        rows[self.ordinary_ids :] *= SPECIAL_LOGITS
        shape = (config.vocab_size, config.hidden_size)
        head = self.dice.normal(config.hidden_size**-0.5, *shape) * rows
        tensors = {"model.norm.weight": self.trunk(self.gain(config.hidden_size))}
        if config.tied_embeddings:
            tensors["model.embed_tokens.weight"] = self.trunk(head)
        else:
            tensors["model.embed_tokens.weight"] = self.trunk(self.dice.normal(1.0, *shape))
            tensors["lm_head.weight"] = self.trunk(head)
        tensors.update(self.mix("model.output_attn_res"))
        return tensors

    def mix(self, name: str) -> dict[str, Tensor]:
        """The two vectors of one mix over blocks; nothing for an ordinary residual stream."""
        if self.config.residual_block is None:
            return {}
        size = self.config.hidden_size
        return {
            f"{name}_norm.weight": self.trunk(self.gain(size)),
            f"{name}_proj.weight": self.matrix(1, size, 1.5),
        }

    def layer(self, layer: int) -> dict[str, Tensor]:
        """All tensors of one layer."""
        name = f"model.layers.{layer}."
        tensors = {
            f"{name}{norm}.weight": self.trunk(self.gain(self.config.hidden_size))
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        tensors.update(self.mix(f"{name}self_attention_res"))
        tensors.update(self.mix(f"{name}mlp_res"))
        attention = self.kda() if layer in self.config.kda_layers else self.mla()
        tensors.update({f"{name}self_attn.{part}": value for part, value in attention})
        if self.config.has_experts(layer):
            block = self.expert_block()
            tensors.update({f"{name}block_sparse_moe.{part}": value for part, value in block})
        else:
            dense = self.mlp(self.config.dense_size)
            tensors.update({f"{name}mlp.{part}": value for part, value in dense})
        return tensors

    def kda(self) -> Iterator[tuple[str, Tensor]]:
        """Kimi Delta Attention; the padding of `A_log` is garbage that nothing may read."""
        config, dice = self.config, self.dice
        hidden, width, head = config.hidden_size, config.kda_width, config.kda_head_dim
        for part in "qkv":
            yield f"{part}_proj.weight", self.matrix(width, hidden)
            yield f"{part}_conv1d.weight", f32(dice.normal(0.7, width, 1, config.kernel_size))
        yield "f_a_proj.weight", self.matrix(head, hidden)
        yield "f_b_proj.weight", self.matrix(width, head, 1.5)
        yield "b_proj.weight", self.matrix(config.kda_heads, hidden, 1.5)
        rates = dice.uniform(-0.7, 1.0, head)
        rates[config.kda_heads :] = dice.uniform(-9.0, 9.0, head - config.kda_heads)
        yield "A_log", f32(rates)
        yield "dt_bias", f32(dice.uniform(-4.0, 1.0, width))
        if config.full_rank_gate:
            yield "g_proj.weight", self.matrix(width, hidden, 2.0)
        else:
            yield "g_a_proj.weight", self.matrix(head, hidden)
            yield "g_b_proj.weight", self.matrix(width, head, 2.0)
        yield "o_norm.weight", f32(self.gain(head))
        yield "o_proj.weight", self.matrix(hidden, width, 2.0)

    def mla(self) -> Iterator[tuple[str, Tensor]]:
        """Latent attention with small latents and a shared key part of ordinary size."""
        config = self.config
        hidden, rank = config.hidden_size, config.latent_rank
        query_width = config.mla_heads * (config.nope_dim + config.rope_dim)
        value_width = config.mla_heads * config.value_dim
        if config.query_rank is None:
            yield "q_proj.weight", self.matrix(query_width, hidden, 1.5)
        else:
            yield "q_a_proj.weight", self.matrix(config.query_rank, hidden, LATENT_RMS)
            yield "q_a_layernorm.weight", self.trunk(self.gain(config.query_rank))
            yield "q_b_proj.weight", self.matrix(query_width, config.query_rank, 1.5)
        compressed = self.dice.normal(1.5 * hidden**-0.5, rank + config.rope_dim, hidden)
        compressed[:rank] *= LATENT_RMS
        yield "kv_a_proj_with_mqa.weight", self.trunk(compressed)
        yield "kv_a_layernorm.weight", self.trunk(self.gain(rank))
        expanded_width = config.mla_heads * (config.nope_dim + config.value_dim)
        yield "kv_b_proj.weight", self.matrix(expanded_width, rank, 1.5)
        if config.mla_output_gate:
            yield "g_proj.weight", self.matrix(value_width, hidden, 2.0)
        yield "o_proj.weight", self.matrix(hidden, value_width, 2.0)

    def mlp(self, width: int) -> Iterator[tuple[str, Tensor]]:
        """A gated MLP that reaches both caps of SiTU."""
        hidden = self.config.hidden_size
        yield "gate_proj.weight", self.matrix(width, hidden, GATE_STD)
        yield "up_proj.weight", self.matrix(width, hidden, UP_STD)
        yield "down_proj.weight", self.matrix(hidden, width, 1.5 / ACTIVATION_RMS)

    def expert_block(self) -> Iterator[tuple[str, Tensor]]:
        """Router, latent projections, shared experts, routed experts."""
        config, dice = self.config, self.dice
        hidden, latent, width = config.hidden_size, config.latent_size, config.expert_size
        yield "gate.weight", self.matrix(config.expert_count, hidden, 1.5)
        # A softmax spreads the weight over all experts, so its scores lie closer together.
        softly = config.router_activation == "softmax"
        bias = dice.normal(0.1 if softly else 0.25, config.expert_count)
        yield "gate.e_score_correction_bias", f32(bias)
        if config.expert_input_size is not None:
            yield "routed_expert_down_proj.weight", self.matrix(latent, hidden)
            if config.expert_sum_norm:
                yield "routed_expert_norm.weight", self.trunk(self.gain(latent))
            yield "routed_expert_up_proj.weight", self.matrix(hidden, latent, 1.5)
        if config.shared_expert_count:
            for name, tensor in self.mlp(width * config.shared_expert_count):
                yield f"shared_experts.{name}", tensor
        for expert in range(config.expert_count):
            for part, rows, columns, gain in (
                ("w1", width, latent, GATE_STD),
                ("w2", latent, width, 2.0 / ACTIVATION_RMS),
                ("w3", width, latent, UP_STD),
            ):
                packed, scales = self.quantized(rows, columns, gain)
                yield f"experts.{expert}.{part}.weight_packed", packed
                yield f"experts.{expert}.{part}.weight_scale", scales

    def quantized(self, rows: int, columns: int, gain: float) -> tuple[Tensor, Tensor]:
        """An MXFP4 matrix: random nibbles, which have rms 2.93, and scale bytes around the value
        that gives the matrix the wanted gain."""
        exponent = 127 + round(float(np.log2(gain * columns**-0.5 / 2.93)))
        packed = self.dice.bytes(rows, columns // 2)
        scales = self.dice.bytes(rows, columns // SCALE_GROUP, low=exponent - 1, high=exponent + 1)
        return Tensor("U8", packed), Tensor("U8", scales)
