"""The sizes of the small model, and its `config.json`.

Every option of the forward pass is set as in the release (`tools/reference/release_config.py`);
only the sizes differ. Layers are counted from 0 here, from 1 in the config.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "reference"))

import release_config

RMS_NORM_EPS = 1e-5
#: Epsilon of the two latent norms of MLA and of KDA's unit length; neither is in the config.
LATENT_NORM_EPS = 1e-6
UNIT_LENGTH_EPS = 1e-6
GATE_LOWER_BOUND = -5.0
SITU_BETA, SITU_LINEAR_BETA = 4.0, 25.0


@dataclass(frozen=True)
class Architecture:
    """All sizes. The defaults are the model that ships."""

    rank_count: int = 2048
    hidden: int = 160
    layers: int = 9
    #: Layers with MLA; the others have KDA. As in the release, every fourth and the last.
    mla_layers: tuple[int, ...] = (3, 7, 8)
    #: Layers between two snapshots of the residual stream.
    residual_block: int = 3
    kda_heads: int = 4
    kda_head_dim: int = 32
    kernel_size: int = 4
    mla_heads: int = 4
    query_rank: int = 64
    latent_rank: int = 64
    nope_dim: int = 32
    rope_dim: int = 16
    value_dim: int = 32
    dense_size: int = 384
    experts: int = 32
    experts_per_token: int = 4
    shared_experts: int = 2
    expert_size: int = 64
    expert_input: int = 96

    @property
    def vocab(self) -> int:
        """Ids: the ranks of the vocabulary and the special slots behind them."""
        return self.rank_count + release_config.SPECIAL_TOKENS

    @property
    def kda_width(self) -> int:
        """Width of all KDA heads together."""
        return self.kda_heads * self.kda_head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether `layer` has an expert block; only the first layer is dense."""
        return layer > 0

    def config(self) -> dict[str, Any]:
        """The document of `config.json`, nested as released."""
        sizes: dict[str, Any] = {
            "attn_res_block_size": self.residual_block,
            "head_dim": self.kda_head_dim,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_size,
            "kv_lora_rank": self.latent_rank,
            "linear_attn_config": {
                "full_attn_layers": [layer + 1 for layer in self.mla_layers],
                "gate_lower_bound": GATE_LOWER_BOUND,
                "head_dim": self.kda_head_dim,
                "kda_layers": [n + 1 for n in range(self.layers) if n not in self.mla_layers],
                "num_heads": self.kda_heads,
                "short_conv_kernel_size": self.kernel_size,
                "use_full_rank_gate": True,
            },
            "moe_intermediate_size": self.expert_size,
            "num_attention_heads": self.mla_heads,
            "num_experts": self.experts,
            "num_experts_per_token": self.experts_per_token,
            "num_hidden_layers": self.layers,
            "num_shared_experts": self.shared_experts,
            "q_lora_rank": self.query_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "routed_expert_hidden_size": self.expert_input,
            "v_head_dim": self.value_dim,
            "vocab_size": self.vocab,
        }
        neutral = release_config.TEXT_BYSTANDERS
        text = {**neutral, **release_config.text_config(sizes)}
        return release_config.multimodal_config(text)
