//! `config.json`: all forms that are supported are read, everything else is
//! refused with its key.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;

use _k3rs::Error;
use _k3rs::format::config::{
    Activation, AttentionKind, ConfigFile, FeedForwardKind, KdaConfig, MlaConfig, ModelConfig,
    MoeConfig, RouterActivation,
};
use common::{mxfp4_section, parse_config, shared, tiny_config};
use serde_json::{Value, json};

fn read(value: &Value) -> Result<ConfigFile, Vec<String>> {
    read_text(&value.to_string())
}

fn read_text(text: &str) -> Result<ConfigFile, Vec<String>> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    fs::write(&path, text).unwrap();
    ModelConfig::read(&path).map_err(|error| match error {
        Error::Config { path: named, problems } => {
            assert_eq!(named, path);
            problems
        }
        other => panic!("not a config error: {other}"),
    })
}

/// The tiny config with the value at a JSON pointer replaced, below `text_config`.
fn with(key: &str, value: Value) -> Value {
    let mut config = tiny_config();
    set(&mut config, &format!("text_config.{key}"), value);
    config
}

fn set(config: &mut Value, path: &str, value: Value) {
    let (parents, key) = path.rsplit_once('.').unwrap_or(("", path));
    let mut object = config;
    for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
        object = &mut object[parent];
    }
    object[key] = value;
}

fn without(key: &str) -> Value {
    let mut config = with(key, Value::Null);
    let (parents, key) = key.rsplit_once('.').unwrap_or(("", key));
    let mut object = &mut config["text_config"];
    for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
        object = &mut object[parent];
    }
    object.as_object_mut().unwrap().shift_remove(key);
    config
}

/// Asserts that there is exactly one problem and that it has these words.
fn assert_refused(config: &Value, words: &[&str]) {
    let problems = read(config).map(|file| file.config).expect_err(&words.join(" "));
    assert_eq!(problems.len(), 1, "{problems:?}");
    for word in words {
        assert!(problems[0].contains(word), "`{word}` is not in: {}", problems[0]);
    }
}

const REQUIRED: &[&str] = &[
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "rms_norm_eps",
    "linear_attn_config.kda_layers",
    "linear_attn_config.full_attn_layers",
    "linear_attn_config.num_heads",
    "linear_attn_config.head_dim",
    "linear_attn_config.short_conv_kernel_size",
    "num_attention_heads",
    "num_key_value_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "mla_use_nope",
    "first_k_dense_replace",
    "moe_layer_freq",
    "intermediate_size",
    "num_experts_per_token",
    "moe_intermediate_size",
    "latent_moe_use_norm",
    "moe_renormalize",
    "routed_scaling_factor",
    "moe_router_activation_func",
    "num_expert_group",
    "topk_group",
    "hidden_act",
    "quantization_config",
];

/// Keys that may be null but must be written.
const NULLABLE: &[&str] = &[
    "q_lora_rank",
    "num_experts",
    "num_shared_experts",
    "routed_expert_hidden_size",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "attn_res_block_size",
];

#[test]
fn tiny_config_is_read_in_full() {
    let file = read(&tiny_config()).unwrap();
    let config = file.config;
    assert_eq!(file.unknown_keys, Vec::<String>::new());
    assert_eq!(file.text_json["hidden_size"], json!(64));
    assert_eq!((config.hidden_size, config.vocab_size), (64, 64));
    assert!(!config.tied_embeddings);
    assert_eq!(config.norm_epsilon, 1e-5);
    let kinds: Vec<_> = config.layers.iter().map(|k| (k.attention, k.feed_forward)).collect();
    use {AttentionKind::*, FeedForwardKind::*};
    assert_eq!(kinds, [(Kda, Dense), (Kda, Experts), (Mla, Experts), (Mla, Experts)]);
    assert_eq!(
        config.kda,
        Some(KdaConfig {
            heads: 3,
            head_dim: 8,
            conv_taps: 4,
            gate_lower_bound: Some(-5.0),
            full_rank_gate: true
        })
    );
    assert_eq!(
        config.mla,
        Some(MlaConfig {
            heads: 2,
            query_rank: Some(24),
            latent_dim: 16,
            nope_dim: 8,
            rope_dim: 4,
            value_dim: 8,
            output_gate: true
        })
    );
    assert_eq!(
        config.moe,
        Some(MoeConfig {
            experts: 12,
            experts_per_token: 3,
            expert_width: 32,
            shared_width: 64,
            latent_dim: Some(96),
            latent_norm: true,
            renormalize: true,
            scaling_factor: 1.0,
            router_activation: RouterActivation::Sigmoid,
            groups: 1,
            groups_kept: 1
        })
    );
    assert_eq!(config.dense_width, Some(48));
    assert_eq!(config.activation, Activation::Situ { beta: 4.0, linear_beta: Some(25.0) });
    assert_eq!(config.residual_block, Some(2));
    assert_eq!(config.bos_token_id, Some(60));
    assert_eq!(config.eos_token_ids, [61]);
    assert_eq!(config.pad_token_id, Some(62));
}

#[test]
fn released_config_is_read_without_unknown_keys() {
    let Some(path) = shared("data/k3_config.json") else { return };
    let file = ModelConfig::read(&path).unwrap();
    assert_eq!(file.unknown_keys, Vec::<String>::new());
    let config = file.config;
    assert_eq!((config.hidden_size, config.vocab_size, config.layers.len()), (7168, 163840, 93));
    let mla = config.layers.iter().filter(|kind| kind.attention == AttentionKind::Mla).count();
    assert_eq!(mla, 24);
    assert_eq!(config.layers[91].attention, AttentionKind::Mla);
    assert_eq!(config.layers[90].attention, AttentionKind::Kda);
    assert_eq!(config.layers[0].feed_forward, FeedForwardKind::Dense);
    let moe = config.moe.unwrap();
    assert_eq!((moe.experts, moe.experts_per_token, moe.shared_width), (896, 16, 6144));
    assert_eq!((moe.latent_dim, moe.expert_width), (Some(3584), 3072));
    assert_eq!(config.kda.unwrap().width(), 12288);
    assert_eq!(config.eos_token_ids, [163586]);
}

#[test]
fn a_flat_config_says_the_same() {
    let nested = tiny_config();
    let mut flat = nested["text_config"].clone();
    for key in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        flat[key] = nested[key].clone();
    }
    let file = read(&flat).unwrap();
    assert_eq!(file.config, parse_config(&nested));
    assert_eq!(file.unknown_keys, Vec::<String>::new());
    flat["tie_word_embeddings"] = json!("no");
    assert_refused(&flat, &["`tie_word_embeddings`", "true or false"]);
    flat["tie_word_embeddings"] = json!(false);
    flat.as_object_mut().unwrap().shift_remove("hidden_size");
    assert_refused(&flat, &["`hidden_size` is missing"]);
}

#[test]
fn every_required_key_is_missed() {
    for key in REQUIRED.iter().chain(NULLABLE) {
        assert_refused(&without(key), &[&format!("`text_config.{key}`"), "missing"]);
    }
    let mut config = tiny_config();
    config.as_object_mut().unwrap().shift_remove("tie_word_embeddings");
    read(&config).expect("the text section says it too");
    config["text_config"].as_object_mut().unwrap().shift_remove("tie_word_embeddings");
    assert_refused(&config, &["`text_config.tie_word_embeddings` is missing"]);
}

#[test]
fn all_missing_keys_come_in_one_error() {
    let problems = read(&json!({"text_config": {"linear_attn_config": {}}})).unwrap_err();
    for key in REQUIRED.iter().chain(NULLABLE) {
        let named = problems.iter().filter(|p| p.contains(&format!("`text_config.{key}`")));
        assert_eq!(named.count(), 1, "{key}: {problems:?}");
    }
    assert_eq!(problems.len(), REQUIRED.len() + NULLABLE.len() + 1, "{problems:?}");
}

#[test]
fn only_what_has_a_published_default_may_be_absent() {
    let config = parse_config(&without("linear_attn_config.gate_lower_bound"));
    assert_eq!(config.kda.unwrap().gate_lower_bound, None);
    let config = parse_config(&without("linear_attn_config.use_full_rank_gate"));
    assert!(!config.kda.unwrap().full_rank_gate);
    let config = parse_config(&without("mla_use_output_gate"));
    assert!(!config.mla.unwrap().output_gate);
    parse_config(&without("num_nextn_predict_layers"));
}

#[test]
fn null_means_what_the_published_code_makes_of_it() {
    let bound = parse_config(&with("linear_attn_config.gate_lower_bound", Value::Null));
    assert_eq!(bound.kda.unwrap().gate_lower_bound, None);
    assert_eq!(parse_config(&with("q_lora_rank", Value::Null)).mla.unwrap().query_rank, None);
    let shared = parse_config(&with("num_shared_experts", Value::Null));
    assert_eq!(shared.moe.unwrap().shared_width, 0);
    assert_eq!(parse_config(&with("num_shared_experts", json!(0))).moe.unwrap().shared_width, 0);
    let latent = parse_config(&with("routed_expert_hidden_size", Value::Null));
    assert_eq!(latent.moe.as_ref().unwrap().latent_dim, None);
    assert_eq!(latent.expert_input_width(), 64);
    assert_eq!(parse_config(&with("attn_res_block_size", Value::Null)).residual_block, None);
    for beta in [Value::Null, json!(0), json!(0.0)] {
        let config = parse_config(&with("activation_situ_beta", beta));
        assert_eq!(config.activation, Activation::Situ { beta: 1.0, linear_beta: Some(25.0) });
    }
    let config = parse_config(&with("activation_situ_linear_beta", Value::Null));
    assert_eq!(config.activation, Activation::Situ { beta: 4.0, linear_beta: None });
    let config = parse_config(&with("num_experts", Value::Null));
    assert_eq!(config.moe, None);
    assert!(config.layers.iter().all(|kind| kind.feed_forward == FeedForwardKind::Dense));
}

#[test]
fn null_is_refused_everywhere_else() {
    for key in REQUIRED {
        let problems = read(&with(key, Value::Null)).unwrap_err();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains(&format!("`text_config.{key}`")), "{problems:?}");
    }
}

#[test]
fn supported_options_are_read() {
    let softmax = parse_config(&with("moe_router_activation_func", json!("softmax")));
    assert_eq!(softmax.moe.unwrap().router_activation, RouterActivation::Softmax);
    assert_eq!(parse_config(&with("hidden_act", json!("silu"))).activation, Activation::Silu);
    let raw = parse_config(&with("moe_renormalize", json!(false))).moe.unwrap();
    assert!(!raw.renormalize);
    let scaled = parse_config(&with("routed_scaling_factor", json!(2.5))).moe.unwrap();
    assert_eq!(scaled.scaling_factor, 2.5);
    let plain = parse_config(&with("latent_moe_use_norm", json!(false))).moe.unwrap();
    assert!(!plain.latent_norm);
    let taps = parse_config(&with("linear_attn_config.short_conv_kernel_size", json!(3)));
    assert_eq!(taps.kda.unwrap().conv_taps, 3);
    for kept in [2, 4] {
        let mut config = with("num_expert_group", json!(4));
        set(&mut config, "text_config.topk_group", json!(kept));
        let moe = parse_config(&config).moe.unwrap();
        assert_eq!((moe.groups, moe.groups_kept), (4, kept));
    }
    let every_second = parse_config(&with("moe_layer_freq", json!(2)));
    let experts: Vec<bool> = every_second
        .layers
        .iter()
        .map(|kind| kind.feed_forward == FeedForwardKind::Experts)
        .collect();
    assert_eq!(experts, [false, false, true, false]);
    let mut tied = with("tie_word_embeddings", json!(true));
    tied["tie_word_embeddings"] = json!(true);
    assert!(parse_config(&tied).tied_embeddings);
}

#[test]
fn keys_of_unused_sections_are_not_asked_for() {
    let mut config = with(
        "linear_attn_config",
        json!({
            "kda_layers": [], "full_attn_layers": [1, 2, 3, 4]
        }),
    );
    for key in ["num_experts", "quantization_config"] {
        set(&mut config, &format!("text_config.{key}"), Value::Null);
    }
    let text = config["text_config"].as_object_mut().unwrap();
    for key in ["moe_intermediate_size", "topk_group", "first_k_dense_replace"] {
        text.shift_remove(key);
    }
    let config = parse_config(&config);
    assert_eq!((config.kda, config.moe), (None, None));
    assert!(config.mla.is_some());
    let config = parse_config(&with("first_k_dense_replace", json!(0)));
    assert_eq!(config.dense_width, None);
}

#[test]
fn wrong_values_are_refused_with_their_key() {
    let huge = json!(u64::MAX);
    let cases = [
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-64)),
        ("hidden_size", json!(64.0)),
        ("hidden_size", json!("64")),
        ("hidden_size", huge.clone()),
        ("vocab_size", json!(1 << 21)),
        ("num_hidden_layers", json!(1_000_000)),
        ("num_hidden_layers", json!(0)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(-1e-5)),
        ("rms_norm_eps", json!(1e-60)),
        ("rms_norm_eps", json!("1e-5")),
        ("routed_scaling_factor", json!(1e300)),
        ("tie_word_embeddings", json!(1)),
        ("linear_attn_config", json!([])),
        ("linear_attn_config.num_heads", json!(0)),
        ("linear_attn_config.short_conv_kernel_size", json!(0)),
        ("linear_attn_config.gate_lower_bound", json!(0)),
        ("linear_attn_config.gate_lower_bound", json!(5.0)),
        ("linear_attn_config.gate_lower_bound", json!(-5.5)),
        ("linear_attn_config.use_full_rank_gate", json!("yes")),
        ("linear_attn_config.use_full_rank_gate", Value::Null),
        ("mla_use_nope", json!(false)),
        ("mla_use_output_gate", Value::Null),
        ("num_key_value_heads", json!(1)),
        ("q_lora_rank", json!(0)),
        ("num_nextn_predict_layers", json!(1)),
        ("num_nextn_predict_layers", json!("0")),
        ("hidden_act", json!("gelu")),
        ("moe_router_activation_func", json!("tanh")),
        ("activation_situ_beta", json!(-1.0)),
        ("activation_situ_linear_beta", json!(0.0)),
        ("num_experts", json!(0)),
        ("num_experts_per_token", json!(13)),
        ("num_experts_per_token", json!(0)),
        ("num_expert_group", json!(5)),
        ("topk_group", json!(2)),
        ("moe_layer_freq", json!(0)),
        ("routed_expert_hidden_size", json!(80)),
        ("moe_intermediate_size", json!(48)),
        ("num_shared_experts", huge),
        ("num_shared_experts", json!(1 << 20)),
        ("attn_res_block_size", json!(0)),
        ("model_type", json!("another_model")),
    ];
    for (key, value) in cases {
        assert_refused(&with(key, value), &[&format!("`text_config.{key}`")]);
    }
}

#[test]
fn wrong_combinations_are_refused() {
    let mut config = with("num_expert_group", json!(12));
    set(&mut config, "text_config.num_experts_per_token", json!(1));
    assert_refused(&config, &["`text_config.num_expert_group`", "12 groups of 1"]);
    config = with("num_expert_group", json!(6));
    assert_refused(&config, &["`text_config.num_experts_per_token`", "2 experts"]);
    config = with("routed_expert_hidden_size", Value::Null);
    set(&mut config, "text_config.hidden_size", json!(72));
    assert_refused(&config, &["`text_config.hidden_size`", "multiple of 32", "72"]);
    config = tiny_config();
    config["tie_word_embeddings"] = json!(true);
    assert_refused(&config, &["tie_word_embeddings", "false", "true"]);
    config = tiny_config();
    config["model_type"] = json!("llama");
    assert_refused(&config, &["`model_type`", "kimi_k3", "llama"]);
    config = tiny_config();
    config["text_config"] = json!(null);
    assert_refused(&config, &["`text_config` must be an object"]);
}

#[test]
fn layer_lists_count_from_one_and_share_out_all_layers() {
    let lists = |kda: Value, full: Value| {
        let mut config = with("linear_attn_config.kda_layers", kda);
        set(&mut config, "text_config.linear_attn_config.full_attn_layers", full);
        config
    };
    assert_refused(&lists(json!([0, 1]), json!([2, 3])), &["kda_layers", "from one", "found 0"]);
    assert_refused(&lists(json!([1, 2]), json!([3, 5])), &["full_attn_layers", "1 to 4", "5"]);
    assert_refused(&lists(json!([1, 2]), json!([4])), &["kda_layers", "layer 3", "neither"]);
    assert_refused(&lists(json!([1, 2, 3]), json!([3, 4])), &["full_attn_layers", "3", "twice"]);
    assert_refused(&lists(json!([1, 2, 2]), json!([3, 4])), &["kda_layers", "2", "twice"]);
    assert_refused(&lists(json!([1, "2"]), json!([3, 4])), &["kda_layers", "\"2\""]);
    assert_refused(&lists(json!({}), json!([3, 4])), &["kda_layers", "a list of layers"]);
    assert_refused(&lists(json!([1, 2.0]), json!([3, 4])), &["kda_layers", "2.0"]);
}

#[test]
fn expert_weights_other_than_mxfp4_are_refused() {
    let group = "quantization_config.config_groups.group_0";
    let cases = [
        ("quantization_config.quant_method".to_owned(), json!("gptq")),
        ("quantization_config.format".to_owned(), json!("pack-quantized")),
        ("quantization_config.quantization_status".to_owned(), json!("frozen")),
        ("quantization_config.kv_cache_scheme".to_owned(), json!({"num_bits": 8})),
        ("quantization_config.transform_config".to_owned(), json!({"R1": {}})),
        ("quantization_config.config_groups".to_owned(), json!({})),
        (format!("{group}.format"), json!("nvfp4-pack-quantized")),
        (format!("{group}.input_activations"), json!({"num_bits": 8})),
        (format!("{group}.weights"), Value::Null),
        (format!("{group}.weights.num_bits"), json!(8)),
        (format!("{group}.weights.type"), json!("int")),
        (format!("{group}.weights.strategy"), json!("channel")),
        (format!("{group}.weights.group_size"), json!(16)),
        (format!("{group}.weights.symmetric"), json!(false)),
        (format!("{group}.weights.scale_dtype"), json!("torch.float8_e4m3fn")),
        (format!("{group}.weights.actorder"), json!("group")),
    ];
    for (key, value) in cases {
        assert_refused(&with(&key, value), &[&format!("`text_config.{key}`")]);
    }
    let type_key = format!("{group}.weights.type");
    assert_refused(&without(&type_key), &[&format!("`text_config.{type_key}` is missing")]);
}

#[test]
fn quantization_may_stand_at_the_top_level() {
    let mut config = without("quantization_config");
    config["quantization_config"] = mxfp4_section();
    parse_config(&config);
    config["quantization_config"]["format"] = json!("int-quantized");
    assert_refused(&config, &["`quantization_config.format`", "int-quantized"]);
}

#[test]
fn token_ids_come_from_the_top_level_first() {
    let mut config = with("eos_token_id", json!(7));
    assert_eq!(parse_config(&config).eos_token_ids, [61]);
    config["eos_token_id"] = json!([5, 6]);
    assert_eq!(parse_config(&config).eos_token_ids, [5, 6]);
    config.as_object_mut().unwrap().shift_remove("eos_token_id");
    assert_eq!(parse_config(&config).eos_token_ids, [7]);
    config["pad_token_id"] = Value::Null;
    assert_eq!(parse_config(&config).pad_token_id, None);
    for wrong in [json!(64), json!(-1), json!("61"), json!([61, 64])] {
        config["eos_token_id"] = wrong;
        assert_refused(&config, &["`eos_token_id`", "token id"]);
    }
    config = tiny_config();
    config["bos_token_id"] = json!([1]);
    assert_refused(&config, &["`bos_token_id`", "[1]"]);
}

#[test]
fn unknown_keys_are_returned_with_their_paths() {
    let mut config = tiny_config();
    config["new_top"] = json!(1);
    set(&mut config, "text_config.new_text", json!({}));
    set(&mut config, "text_config.linear_attn_config.new_kda", json!(null));
    let weights = "text_config.quantization_config.config_groups.group_0.weights.new_weight";
    set(&mut config, weights, json!(true));
    let file = read(&config).unwrap();
    let expected =
        ["new_top", "text_config.new_text", "text_config.linear_attn_config.new_kda", weights];
    assert_eq!(file.unknown_keys, expected);
}

#[test]
fn invalid_json_is_refused_with_its_place() {
    let problems = read_text("{\n  \"text_config\": {,}\n}").unwrap_err();
    assert_eq!(problems.len(), 1);
    assert!(problems[0].contains("line 2 column 19"), "{problems:?}");
    for text in ["", "[]", "7", "{\"text_config\": []}", "\u{feff}{}"] {
        assert_eq!(read_text(text).unwrap_err().len(), 1, "{text}");
    }
    read_text(&"[".repeat(100_000)).expect_err("nesting without end");
}
