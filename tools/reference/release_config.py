"""Config documents with the keys of the released `config.json` and other sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

#: Special tokens at the end of the vocabulary; the ordinary ranks come before them.
SPECIAL_TOKENS = 256
#: Offsets of the named special tokens from the first special id.
BOS, EOS, END_OF_MESSAGE, MEDIA_PLACEHOLDER = 0, 1, 2, 21

#: How the routed experts are quantised, in the words of the release.
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}

#: Fields of `text_config` that say nothing about the forward pass, with their released values.
TEXT_BYSTANDERS: dict[str, Any] = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
        "AutoModel": "modeling_kimi_linear.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
    },
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_range": 0.02,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "max_position_embeddings": 1048576,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_nextn_predict_layers": 0,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "transformers_version": "4.56.2",
    "use_bfloat16": False,
}

#: The released vision settings; the text model does not read them.
VISION: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 1024,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": 14,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "qkv_hidden_size": 1536,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 27,
}

#: Options of the forward pass as the release sets them; sizes are not among them.
TEXT_OPTIONS: dict[str, Any] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "first_k_dense_replace": 1,
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "use_grouped_topk": True,
}


def first_special_id(vocab_size: int) -> int:
    """The first id after the ordinary ranks; a vocabulary too small for them is half special."""
    return vocab_size - (SPECIAL_TOKENS if vocab_size > SPECIAL_TOKENS else vocab_size // 2)


def text_config(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What the language model reads: `sizes` over the released options. Contains
    `linear_attn_config`, which `sizes` must give whole."""
    base = first_special_id(sizes["vocab_size"])
    return {
        "dtype": "bfloat16",
        "model_type": "kimi_linear",
        "bos_token_id": base + BOS,
        "eos_token_id": base + END_OF_MESSAGE,
        "pad_token_id": sizes["vocab_size"] - 1,
        **TEXT_OPTIONS,
        **copy.deepcopy(dict(sizes)),
        "num_key_value_heads": sizes["num_attention_heads"],
        "quantization_config": copy.deepcopy(QUANTIZATION),
    }


def multimodal_config(text: Mapping[str, Any]) -> dict[str, Any]:
    """The outer document of the release around a text config; keys in the released order."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        "bos_token_id": text["bos_token_id"],
        "dtype": "bfloat16",
        "eos_token_id": text["eos_token_id"],
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": first_special_id(text["vocab_size"]) + MEDIA_PLACEHOLDER,
        "model_type": "kimi_k3",
        "pad_token_id": text["pad_token_id"],
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {**VISION, "text_hidden_size": text["hidden_size"]},
    }
