"""Which models the fixtures hold: one tiny K3 and one model for each optional form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from checkpoint import TEXT_PREFIX, Tensor, to_bf16
from model_config import ModelConfig
from random_weights import Dice, TrunkWriter, WeightMaker, f32
from release_config import (
    BOS,
    TEXT_BYSTANDERS,
    first_special_id,
    multimodal_config,
    text_config,
)

#: Sizes of `tiny_k3`: odd head counts, a hidden size that no kernel's tile divides, expert rows of
#: 96 columns (three scale groups), and two consecutive MLA layers at the end.
TINY_SIZES: dict[str, Any] = {
    "attn_res_block_size": 3,
    "head_dim": 32,
    "hidden_size": 80,
    "intermediate_size": 224,
    "kv_lora_rank": 40,
    "linear_attn_config": {
        "full_attn_layers": [3, 6, 7],
        "gate_lower_bound": -5.0,
        "head_dim": 32,
        "kda_layers": [1, 2, 4, 5],
        "num_heads": 3,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "moe_intermediate_size": 64,
    "num_attention_heads": 3,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_hidden_layers": 7,
    "num_shared_experts": 2,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_expert_hidden_size": 96,
    # Not 1.0 as released, so that the router data show whether the factor is applied.
    "routed_scaling_factor": 1.5,
    "v_head_dim": 24,
    "vocab_size": 320,
}

#: Sizes shared by the forms; the options are the released ones.
FORM_SIZES: dict[str, Any] = {
    "attn_res_block_size": 2,
    "hidden_size": 40,
    "intermediate_size": 32,
    "kv_lora_rank": 16,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "gate_lower_bound": -5.0,
        "head_dim": 8,
        "kda_layers": [1, 2],
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_hidden_layers": 3,
    "num_shared_experts": 1,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "routed_expert_hidden_size": 32,
    "v_head_dim": 8,
    "vocab_size": 64,
}


@dataclass(frozen=True)
class FixtureModel:
    """A model of the fixtures: its config document, how it is stored and what is recorded."""

    directory: str
    text: Mapping[str, Any]
    #: Lengths of the prompts; `traced_prompt` is the one whose internals are recorded.
    prompt_lengths: tuple[int, ...] = (8,)
    traced_prompt: int = 0
    greedy_count: int = 8
    #: Layers of each shard, the tensors outside the layers having one of their own; without it
    #: everything is in one file, and there is no index.
    shard_layers: tuple[range, ...] = ()
    with_vision: bool = False
    flat: bool = False
    trunk: TrunkWriter = to_bf16

    @property
    def document(self) -> dict[str, Any]:
        """The content of `config.json`."""
        if self.flat:
            return {"architectures": ["KimiLinearForCausalLM"], **self.text}
        return multimodal_config(self.text)

    @property
    def config(self) -> ModelConfig:
        """The config as the forward pass sees it."""
        return ModelConfig.from_json(self.document)

    @property
    def ordinary_ids(self) -> int:
        """The number of ids below the special ones."""
        return first_special_id(self.config.vocab_size)

    def weight_maker(self, seed: int) -> WeightMaker:
        """Draws the weights of this model."""
        return WeightMaker(self.config, seed, self.ordinary_ids, self.trunk)

    def shards(self, seed: int) -> list[dict[str, Tensor]]:
        """The tensors of each file under their names on disk."""
        maker = self.weight_maker(seed)
        prefix = "" if self.flat else TEXT_PREFIX
        parts = [
            {prefix + name: value for layer in layers for name, value in maker.layer(layer).items()}
            for layers in self.shard_layers or (range(self.config.layer_count),)
        ]
        outer = {prefix + name: value for name, value in maker.outer().items()}
        if not self.shard_layers:
            return [{**outer, **parts[0]}]
        return [*parts, outer, *([vision_placeholders(maker.dice)] if self.with_vision else [])]

    def prompts(self, seed: int) -> list[list[int]]:
        """Prompts of ordinary ids with a special one at every fifth place; one starts with bos."""
        dice, base = Dice(seed + 1_000_000), self.ordinary_ids
        special_count = self.config.vocab_size - base
        prompts = []
        for number, length in enumerate(self.prompt_lengths):
            ordinary = dice.bytes(length, high=base - 1).tolist()
            special = dice.bytes(length, high=special_count - 1).tolist()
            ids = [base + special[i] if i % 5 == 4 else ordinary[i] for i in range(length)]
            if number == 1:
                ids[0] = base + BOS
            prompts.append(ids)
        return prompts


def vision_placeholders(dice: Dice) -> dict[str, Tensor]:
    """Tensors of the released image part in shapes that fit nothing: a text model skips them."""
    shapes = {
        "mm_projector.post_norm.weight": (8,),
        "mm_projector.proj.0.weight": (4, 4),
        "vision_tower.encoder.final_layernorm.weight": (8,),
        "vision_tower.patch_embed.proj.weight": (2, 3, 2, 2),
    }
    return {name: to_bf16(dice.normal(1.0, *shape)) for name, shape in shapes.items()}


def tiny_k3() -> FixtureModel:
    """A model with everything that the release has, in sizes that run in milliseconds."""
    return FixtureModel(
        directory="tiny_k3",
        text={**TEXT_BYSTANDERS, **text_config(TINY_SIZES)},
        prompt_lengths=(1, 9, 40),
        traced_prompt=1,
        greedy_count=24,
        shard_layers=(range(1), range(1, 3), range(3, 5), range(5, 7)),
        with_vision=True,
    )


def released_form() -> FixtureModel:
    """The model that every form is a variation of. It is no fixture itself."""
    return FixtureModel("", text_config(FORM_SIZES))


def form(name: str, linear: Mapping[str, Any] | None = None, **fields: Any) -> FixtureModel:
    """A form: fields of `text_config`, and of `linear_attn_config` where given."""
    attention = {**FORM_SIZES["linear_attn_config"], **(linear or {})}
    sizes = {**FORM_SIZES, "linear_attn_config": attention, **fields}
    return FixtureModel(f"forms/{name}", text_config(sizes))


def without_lower_bound() -> FixtureModel:
    """The field `gate_lower_bound` is not there at all."""
    model = form("gate_lower_bound_absent")
    del model.text["linear_attn_config"]["gate_lower_bound"]
    return model


def forms() -> list[FixtureModel]:
    """One model for each option that the config of a K3 checkpoint can ask for."""
    return [
        form("gate_lower_bound_null", {"gate_lower_bound": None}),
        without_lower_bound(),
        form("low_rank_gate", {"use_full_rank_gate": False}),
        form("kernel_size_3", {"short_conv_kernel_size": 3}),
        form("query_rank_null", q_lora_rank=None),
        form("no_mla_output_gate", mla_use_output_gate=False),
        form("expert_groups", num_experts=8, num_expert_group=4, topk_group=2),
        form("softmax_router", moe_router_activation_func="softmax"),
        form("not_renormalized", moe_renormalize=False, routed_scaling_factor=2.5),
        form("no_expert_sum_norm", latent_moe_use_norm=False),
        form("no_latent", hidden_size=64, routed_expert_hidden_size=None),
        form("no_shared_expert", num_shared_experts=None),
        form("every_second_expert_layer", moe_layer_freq=2),
        form("betas_null", activation_situ_beta=None, activation_situ_linear_beta=None),
        form("silu", hidden_act="silu"),
        form("plain_residual", attn_res_block_size=None),
        form("tied_embeddings", tie_word_embeddings=True),
        replace(form("flat"), flat=True),
        replace(form("f32_trunk"), trunk=f32),
    ]
