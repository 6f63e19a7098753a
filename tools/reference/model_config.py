"""The fields of `config.json` that the forward pass depends on.

The file is either nested as released (`text_config` inside a multimodal config) or flat (a
language model alone); `linear_attn_config` is a nested object in both. Fields without a
documented default are required: a missing one raises `KeyError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of one text model. Layers are counted from 0 here, unlike on disk."""

    hidden_size: int
    layer_count: int
    vocab_size: int
    tied_embeddings: bool
    rms_norm_eps: float
    # Attention residuals; None is the ordinary residual stream.
    residual_block: int | None
    # Kimi Delta Attention
    kda_layers: frozenset[int]
    kda_heads: int
    kda_head_dim: int
    kernel_size: int
    gate_lower_bound: float | None
    full_rank_gate: bool
    # Multi-head latent attention
    mla_heads: int
    query_rank: int | None
    latent_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    mla_output_gate: bool
    # Feed-forward blocks
    activation: str
    situ_beta: float
    situ_linear_beta: float | None
    dense_size: int
    first_expert_layer: int
    expert_layer_step: int
    expert_count: int
    experts_per_token: int
    shared_expert_count: int
    expert_size: int
    expert_input_size: int | None
    expert_sum_norm: bool
    renormalize: bool
    routed_scale: float
    router_activation: str
    group_count: int
    groups_kept: int

    @property
    def kda_width(self) -> int:
        """Width of all KDA heads together."""
        return self.kda_heads * self.kda_head_dim

    @property
    def latent_size(self) -> int:
        """Width of what a routed expert reads and writes."""
        return self.expert_input_size or self.hidden_size

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of `layer` is an expert block."""
        return layer >= self.first_expert_layer and layer % self.expert_layer_step == 0

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> ModelConfig:
        """Reads a parsed `config.json`, nested or flat."""
        text = document.get("text_config", document)
        linear = text["linear_attn_config"]
        if text["mla_use_nope"] is not True:
            raise ValueError("mla_use_nope must be true: no rotary embedding is defined")
        return ModelConfig(
            hidden_size=text["hidden_size"],
            layer_count=text["num_hidden_layers"],
            vocab_size=text["vocab_size"],
            tied_embeddings=text["tie_word_embeddings"],
            rms_norm_eps=text["rms_norm_eps"],
            residual_block=text["attn_res_block_size"],
            kda_layers=frozenset(number - 1 for number in linear["kda_layers"]),
            kda_heads=linear["num_heads"],
            kda_head_dim=linear["head_dim"],
            kernel_size=linear["short_conv_kernel_size"],
            gate_lower_bound=linear.get("gate_lower_bound"),
            full_rank_gate=linear.get("use_full_rank_gate", False),
            mla_heads=text["num_attention_heads"],
            query_rank=text["q_lora_rank"],
            latent_rank=text["kv_lora_rank"],
            nope_dim=text["qk_nope_head_dim"],
            rope_dim=text["qk_rope_head_dim"],
            value_dim=text["v_head_dim"],
            mla_output_gate=text["mla_use_output_gate"],
            activation=text["hidden_act"],
            situ_beta=text["activation_situ_beta"] or 1.0,
            situ_linear_beta=text["activation_situ_linear_beta"],
            dense_size=text["intermediate_size"],
            first_expert_layer=text["first_k_dense_replace"],
            expert_layer_step=text["moe_layer_freq"],
            expert_count=text["num_experts"],
            experts_per_token=text["num_experts_per_token"],
            shared_expert_count=text["num_shared_experts"] or 0,
            expert_size=text["moe_intermediate_size"],
            expert_input_size=text["routed_expert_hidden_size"],
            expert_sum_norm=text["latent_moe_use_norm"],
            renormalize=text["moe_renormalize"],
            routed_scale=text["routed_scaling_factor"],
            router_activation=text["moe_router_activation_func"],
            group_count=text["num_expert_group"],
            groups_kept=text["topk_group"],
        )
