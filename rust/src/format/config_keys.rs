//! Keys of `config.json` that are known and change nothing in the forward
//! pass. Keys in neither this list nor the reader are reported, because a key
//! that nobody knows may ask for something that is not done.

use serde_json::{Map, Value};

/// Keys that generic tooling writes on every level, and the image part's own.
const WITHOUT_EFFECT: &[&str] = &[
    "_name_or_path",
    "add_cross_attention",
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "head_dim",
    "id2label",
    "ignore_index",
    "image_placeholder",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "max_position_embeddings",
    "media_placeholder_token_id",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "rope_scaling",
    "rope_theta",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "topk_method",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "use_grouped_topk",
    "vision_config",
];

/// Keys that are read on the level of the whole file.
pub(super) const TOP_LEVEL: &[&str] = &[
    "bos_token_id",
    "eos_token_id",
    "model_type",
    "pad_token_id",
    "quantization_config",
    "text_config",
    "tie_word_embeddings",
];

/// Keys that are read on the level of the text model.
pub(super) const TEXT: &[&str] = &[
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
    "bos_token_id",
    "eos_token_id",
    "first_k_dense_replace",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "latent_moe_use_norm",
    "linear_attn_config",
    "mla_use_nope",
    "mla_use_output_gate",
    "model_type",
    "moe_intermediate_size",
    "moe_layer_freq",
    "moe_renormalize",
    "moe_router_activation_func",
    "num_attention_heads",
    "num_expert_group",
    "num_experts",
    "num_experts_per_token",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_nextn_predict_layers",
    "num_shared_experts",
    "pad_token_id",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "quantization_config",
    "rms_norm_eps",
    "routed_expert_hidden_size",
    "routed_scaling_factor",
    "tie_word_embeddings",
    "topk_group",
    "v_head_dim",
    "vocab_size",
];

/// Keys that are read in `linear_attn_config`.
pub(super) const LINEAR_ATTENTION: &[&str] = &[
    "full_attn_layers",
    "gate_lower_bound",
    "head_dim",
    "kda_layers",
    "num_heads",
    "short_conv_kernel_size",
    "use_full_rank_gate",
];

/// Paths of the keys of `object` that are neither in `read` nor, if `generic`,
/// in the list of keys without effect.
pub(super) fn unknown(
    object: &Map<String, Value>,
    path: &str,
    read: &[&str],
    generic: bool,
) -> Vec<String> {
    let known = |key: &str| read.contains(&key) || (generic && WITHOUT_EFFECT.contains(&key));
    object.keys().filter(|key| !known(key)).map(|key| format!("{path}{key}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_or_without_effect_but_not_both() {
        for key in WITHOUT_EFFECT {
            assert!(!TEXT.contains(key) && !TOP_LEVEL.contains(key), "{key}");
        }
    }
}
