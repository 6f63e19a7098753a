//! The released model in numbers: its config and its image tensors.
//!
//! The config says everything that a reader of the model looks at. Keys that
//! generic tooling adds and that change nothing are left out.

use serde_json::{Value, json};

/// Layers of the release.
const LAYERS: usize = 93;
/// Of the layers, counted from one, every fourth attends to all positions; so
/// does the last.
const FULL_ATTENTION_EVERY: usize = 4;
/// Blocks of the image encoder.
const IMAGE_BLOCKS: usize = 27;

/// The `config.json` of the release.
pub(super) fn config() -> Value {
    json!({
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": 163_584,
        "dtype": "bfloat16",
        "eos_token_id": 163_586,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 163_605,
        "model_type": "kimi_k3",
        "pad_token_id": 163_839,
        "text_config": text_config(),
        "tie_word_embeddings": false,
        "vision_config": vision_config(),
    })
}

fn text_config() -> Value {
    json!({
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": 12,
        "bos_token_id": 163_584,
        "dtype": "bfloat16",
        "eos_token_id": 163_586,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "intermediate_size": 33_792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": true,
        "linear_attn_config": linear_attention(),
        "max_position_embeddings": 1_048_576,
        "mla_use_nope": true,
        "mla_use_output_gate": true,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 96,
        "num_expert_group": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 96,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "pad_token_id": 163_839,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": quantization(),
        "rms_norm_eps": 1e-5,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": true,
        "v_head_dim": 128,
        "vocab_size": 163_840,
    })
}

fn linear_attention() -> Value {
    let (full, kda): (Vec<usize>, Vec<usize>) = (1..=LAYERS)
        .partition(|layer| layer.is_multiple_of(FULL_ATTENTION_EVERY) || *layer == LAYERS);
    json!({
        "full_attn_layers": full,
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": kda,
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": true,
    })
}

fn quantization() -> Value {
    json!({
        "config_groups": {"group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": null,
            "output_activations": null,
            "targets": ["Linear"],
            "weights": {
                "actorder": null,
                "block_structure": null,
                "dynamic": false,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": true,
                "type": "float",
                "zp_dtype": null,
            },
        }},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": null,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    })
}

/// `vision_config` of the release; the shapes of its image tensors follow from it.
pub(super) fn vision_config() -> Value {
    json!({
        "_attn_implementation": "flash_attention_2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": false,
        "init_pos_emb_height": 64,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 64,
        "linear_bias": false,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 1024,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": false,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "qkv_hidden_size": 1536,
        "text_hidden_size": 7168,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": IMAGE_BLOCKS,
    })
}

/// Names and shapes of the image projector's tensors, all BF16: a shard of their own.
pub(super) fn image_projector() -> Vec<(String, Vec<usize>)> {
    [("post_norm", &[7168][..]), ("proj.0", &[4096, 4096]), ("proj.2", &[7168, 4096])]
        .map(|(name, shape)| (format!("mm_projector.{name}.weight"), shape.to_vec()))
        .to_vec()
}

/// Names and shapes of the image encoder's tensors, all BF16: the last shard.
pub(super) fn image_encoder() -> Vec<(String, Vec<usize>)> {
    let outer = [
        ("patch_embed.proj", &[1024, 3, 14, 14][..]),
        ("patch_embed.pos_emb", &[64, 64, 1024]),
        ("encoder.final_layernorm", &[1024]),
    ];
    let block = [
        ("wqkv", &[4608, 1024][..]),
        ("wo", &[1024, 1536]),
        ("mlp.fc0", &[4096, 1024]),
        ("mlp.fc1", &[1024, 4096]),
        ("norm0", &[1024]),
        ("norm1", &[1024]),
    ];
    let outer = outer.map(|(name, shape)| (name.to_owned(), shape));
    let blocks = (0..IMAGE_BLOCKS).flat_map(|number| {
        block.map(|(name, shape)| (format!("encoder.blocks.{number}.{name}"), shape))
    });
    outer
        .into_iter()
        .chain(blocks)
        .map(|(name, shape)| (format!("vision_tower.{name}.weight"), shape.to_vec()))
        .collect()
}
