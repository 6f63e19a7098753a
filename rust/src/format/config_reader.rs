//! From the text of `config.json` to a [`ModelConfig`].
//!
//! A key may be absent only where the published configuration's description
//! says so (`gate_lower_bound`, the two gate flags); keys that may be null must
//! still be written. Keys of a section that no layer uses are not asked for.

use serde_json::{Map, Value};

use super::config::{
    Activation, AttentionKind, ConfigFile, FeedForwardKind, KdaConfig, LayerKind, MlaConfig,
    ModelConfig, MoeConfig, RouterActivation,
};
use super::config_fields::{Fields, SIZE_MAX};
use super::{config_keys, quantization};

/// More layers than any model has; bounds what a config can make us allocate.
const LAYERS_MAX: u64 = 4096;
/// Weights that share one scale in MXFP4.
const MXFP4_GROUP: usize = 32;
const MODEL_TYPES: &[(&str, ())] = &[("kimi_k3", ()), ("kimi_linear", ())];

/// The config, or everything that is wrong with it.
pub(super) fn read(text: &[u8]) -> Result<ConfigFile, Vec<String>> {
    let value: Value =
        serde_json::from_slice(text).map_err(|error| vec![format!("not valid JSON: {error}")])?;
    let Value::Object(top) = &value else {
        return Err(vec!["must be a JSON object".to_owned()]);
    };
    let mut problems = Vec::new();
    let (text, path) = match top.get("text_config") {
        None => (top, ""),
        Some(Value::Object(text)) => (text, "text_config."),
        Some(_) => return Err(vec!["`text_config` must be an object".to_owned()]),
    };
    let mut reader = Reader { top, text, path, problems: &mut problems, unknown_keys: Vec::new() };
    let config = reader.model();
    reader.list_unknown_keys();
    let unknown_keys = reader.unknown_keys;
    match config {
        Some(config) if problems.is_empty() => {
            let text_json = Value::Object(text.clone());
            Ok(ConfigFile { config, unknown_keys, text_json })
        }
        _ => Err(problems),
    }
}

struct Reader<'r> {
    top: &'r Map<String, Value>,
    text: &'r Map<String, Value>,
    /// Path of `text`: empty if the file is flat.
    path: &'r str,
    problems: &'r mut Vec<String>,
    unknown_keys: Vec<String>,
}

impl<'r> Reader<'r> {
    fn text(&mut self) -> Fields<'r, '_> {
        Fields { object: self.text, path: self.path, problems: self.problems }
    }

    fn top(&mut self) -> Fields<'r, '_> {
        Fields { object: self.top, path: "", problems: self.problems }
    }

    /// Reads everything before giving up on anything.
    fn model(&mut self) -> Option<ModelConfig> {
        self.check_fixed_values();
        let hidden_size = self.text().size("hidden_size");
        let vocab_size = self.text().size("vocab_size");
        let tied_embeddings = self.tied_embeddings();
        let norm_epsilon = self.text().positive("rms_norm_eps");
        let layer_count = self.text().count("num_hidden_layers", 1, LAYERS_MAX);
        let attention = self.attention_kinds(layer_count);
        let feed_forward = self.feed_forward_kinds(layer_count);
        // A list that cannot be read must not hide what else is missing.
        let attends = |kind| attention.as_ref().is_none_or(|kinds| kinds.contains(&kind));
        let feeds = |kind| feed_forward.as_ref().is_none_or(|kinds| kinds.contains(&kind));
        let kda = attends(AttentionKind::Kda).then(|| self.kda());
        let mla = attends(AttentionKind::Mla).then(|| self.mla());
        let moe = feeds(FeedForwardKind::Experts).then(|| self.moe(hidden_size));
        let dense_width =
            feeds(FeedForwardKind::Dense).then(|| self.text().size("intermediate_size"));
        let activation = self.activation();
        let residual_block = self.text().size_or_null("attn_res_block_size");
        let ids = ["bos_token_id", "eos_token_id", "pad_token_id"]
            .map(|key| self.token_ids(key, vocab_size.unwrap_or(usize::MAX)));
        let [bos, eos, pad] = ids;
        let layers = attention?.into_iter().zip(feed_forward?);
        Some(ModelConfig {
            hidden_size: hidden_size?,
            vocab_size: vocab_size?,
            tied_embeddings: tied_embeddings?,
            norm_epsilon: norm_epsilon?,
            layers: layers
                .map(|(attention, feed_forward)| LayerKind { attention, feed_forward })
                .collect(),
            kda: present(kda)?,
            mla: present(mla)?,
            moe: present(moe)?,
            dense_width: present(dense_width)?,
            activation: activation?,
            residual_block: residual_block?,
            bos_token_id: bos?.first().copied(),
            eos_token_ids: eos?,
            pad_token_id: pad?.first().copied(),
        })
    }

    /// Keys that name another model or a part that is not implemented.
    fn check_fixed_values(&mut self) {
        let key = "model_type";
        if self.top.contains_key(key) {
            self.top().choice(key, MODEL_TYPES);
        }
        let is_nested = !self.path.is_empty();
        let mut text = self.text();
        if is_nested && text.object.contains_key(key) {
            text.choice(key, MODEL_TYPES);
        }
        let key = "num_nextn_predict_layers";
        if text.object.get(key).is_some_and(|value| !value.is_null())
            && text.count(key, 0, u64::MAX).is_some_and(|count| count > 0)
        {
            text.problem(key, "must be 0: draft layers are not supported");
        }
    }

    fn tied_embeddings(&mut self) -> Option<bool> {
        let key = "tie_word_embeddings";
        let is_nested = !self.path.is_empty();
        match (is_nested && self.top.contains_key(key), self.text.contains_key(key)) {
            (true, false) => self.top().flag(key),
            (true, true) => {
                let (top, text) = (self.top().flag(key)?, self.text().flag(key)?);
                if top != text {
                    self.text().problem(key, format_args!("is {text}, but {top} at the top level"));
                }
                Some(text)
            }
            _ => self.text().flag(key),
        }
    }

    /// The two lists, which count from one and must share out all layers.
    fn attention_kinds(&mut self, layer_count: Option<usize>) -> Option<Vec<AttentionKind>> {
        let path = format!("{}linear_attn_config.", self.path);
        let object = self.text().section("linear_attn_config")?;
        let mut fields = Fields { object, path: &path, problems: self.problems };
        let largest = layer_count.unwrap_or(LAYERS_MAX as usize);
        let keys = [("kda_layers", AttentionKind::Kda), ("full_attn_layers", AttentionKind::Mla)];
        let lists = keys.map(|(key, kind)| (fields.numbers_from_one(key, largest), key, kind));
        let layer_count = layer_count?;
        let mut kinds = vec![None; layer_count];
        for (list, key, kind) in lists {
            for layer in list? {
                if kinds[layer - 1].replace(kind).is_some() {
                    fields.problem(key, format_args!("names layer {layer}, which is listed twice"));
                    return None;
                }
            }
        }
        if let Some(layer) = kinds.iter().position(Option::is_none) {
            let layer = layer + 1;
            fields.problem(
                "kda_layers",
                format_args!(
                    "and `full_attn_layers` must cover all {layer_count} layers, but layer {layer} \
                 (counted from one) is in neither"
                ),
            );
        }
        kinds.into_iter().collect()
    }

    fn feed_forward_kinds(&mut self, layer_count: Option<usize>) -> Option<Vec<FeedForwardKind>> {
        let mut text = self.text();
        let experts = text.value("num_experts");
        if experts.is_some_and(Value::is_null) {
            return Some(vec![FeedForwardKind::Dense; layer_count?]);
        }
        let first = text.count("first_k_dense_replace", 0, SIZE_MAX);
        let every = text.size("moe_layer_freq");
        let (first, every) = (first?, every?);
        experts?;
        let kind = |layer: usize| {
            if layer >= first && layer.is_multiple_of(every) {
                FeedForwardKind::Experts
            } else {
                FeedForwardKind::Dense
            }
        };
        Some((0..layer_count?).map(kind).collect())
    }

    fn kda(&mut self) -> Option<KdaConfig> {
        let path = format!("{}linear_attn_config.", self.path);
        // Its absence was noted with the layer lists.
        let object = self.text.get("linear_attn_config")?.as_object()?;
        let mut fields = Fields { object, path: &path, problems: self.problems };
        let heads = fields.size("num_heads");
        let head_dim = fields.size("head_dim");
        let conv_taps = fields.size("short_conv_kernel_size");
        let full_rank_gate = fields.flag_or_false("use_full_rank_gate");
        let bound = "gate_lower_bound";
        let gate_lower_bound = match object.get(bound) {
            None => Some(None),
            Some(_) => fields.number_or_null(
                bound,
                "null or a number from -5 to below 0 (the published kernel takes no other)",
                |number| (-5.0..0.0).contains(&number),
            ),
        };
        Some(KdaConfig {
            heads: heads?,
            head_dim: head_dim?,
            conv_taps: conv_taps?,
            gate_lower_bound: gate_lower_bound?,
            full_rank_gate: full_rank_gate?,
        })
    }

    fn mla(&mut self) -> Option<MlaConfig> {
        let mut text = self.text();
        let heads = text.size("num_attention_heads");
        let key_heads = text.size("num_key_value_heads");
        if let (Some(heads), Some(key_heads)) = (heads, key_heads)
            && heads != key_heads
        {
            let problem = format!("must equal `num_attention_heads` {heads}, found {key_heads}");
            text.problem("num_key_value_heads", problem);
        }
        if text.flag("mla_use_nope") == Some(false) {
            text.problem("mla_use_nope", "must be true: rotary embedding is not supported");
        }
        let query_rank = text.size_or_null("q_lora_rank");
        let latent_dim = text.size("kv_lora_rank");
        let nope_dim = text.size("qk_nope_head_dim");
        let rope_dim = text.size("qk_rope_head_dim");
        let value_dim = text.size("v_head_dim");
        let output_gate = text.flag_or_false("mla_use_output_gate");
        Some(MlaConfig {
            heads: heads?,
            query_rank: query_rank?,
            latent_dim: latent_dim?,
            nope_dim: nope_dim?,
            rope_dim: rope_dim?,
            value_dim: value_dim?,
            output_gate: output_gate?,
        })
    }

    fn moe(&mut self, hidden_size: Option<usize>) -> Option<MoeConfig> {
        self.quantization();
        let mut text = self.text();
        // Its absence was noted with the kinds of layers.
        let experts = text.object.contains_key("num_experts").then(|| text.size("num_experts"));
        let experts_per_token = text.size("num_experts_per_token");
        let expert_width = text.size("moe_intermediate_size");
        let shared = match text.value("num_shared_experts") {
            Some(Value::Null) => Some(0),
            Some(_) => text.count("num_shared_experts", 0, SIZE_MAX),
            None => None,
        };
        let latent_dim = text.size_or_null("routed_expert_hidden_size");
        let latent_norm = text.flag("latent_moe_use_norm");
        let renormalize = text.flag("moe_renormalize");
        let scaling_factor = text.positive("routed_scaling_factor");
        let router_activation = text.choice(
            "moe_router_activation_func",
            &[("sigmoid", RouterActivation::Sigmoid), ("softmax", RouterActivation::Softmax)],
        );
        let groups = text.size("num_expert_group");
        let groups_kept = text.size("topk_group");
        let moe = MoeConfig {
            experts: experts??,
            experts_per_token: experts_per_token?,
            expert_width: expert_width?,
            shared_width: expert_width? * shared?,
            latent_dim: latent_dim?,
            latent_norm: latent_norm?,
            renormalize: renormalize?,
            scaling_factor: scaling_factor?,
            router_activation: router_activation?,
            groups: groups?,
            groups_kept: groups_kept?,
        };
        self.check_moe(&moe, hidden_size?);
        Some(moe)
    }

    fn check_moe(&mut self, moe: &MoeConfig, hidden_size: usize) {
        let mut text = self.text();
        let MoeConfig { experts, experts_per_token, groups, groups_kept, .. } = *moe;
        let input = match moe.latent_dim {
            Some(latent) => ("routed_expert_hidden_size", latent),
            None => ("hidden_size", hidden_size),
        };
        for (key, width) in [input, ("moe_intermediate_size", moe.expert_width)] {
            if !width.is_multiple_of(MXFP4_GROUP) {
                text.problem(
                    key,
                    format_args!(
                        "must be a multiple of {MXFP4_GROUP} (one MXFP4 scale), found {width}"
                    ),
                );
            }
        }
        if moe.shared_width as u64 > SIZE_MAX {
            text.problem(
                "num_shared_experts",
                format_args!(
                    "times `moe_intermediate_size` must be at most {SIZE_MAX}, found {}",
                    moe.shared_width
                ),
            );
        }
        if experts_per_token > experts {
            text.problem(
                "num_experts_per_token",
                format_args!("must be at most `num_experts` {experts}, found {experts_per_token}"),
            );
        }
        if groups_kept > groups {
            text.problem(
                "topk_group",
                format_args!("must be at most `num_expert_group` {groups}, found {groups_kept}"),
            );
        }
        if !experts.is_multiple_of(groups) {
            text.problem(
                "num_expert_group",
                format_args!("must divide `num_experts` {experts}, found {groups}"),
            );
        } else if groups > groups_kept {
            // Only then does the router look at groups.
            let group = experts / groups;
            if group < 2 {
                text.problem("num_expert_group", format_args!(
                    "must leave two experts or more to a group, found {groups} groups of {group}"
                ));
            }
            if experts_per_token > group * groups_kept {
                text.problem("num_experts_per_token", format_args!(
                    "must be at most the {} experts of the groups kept, found {experts_per_token}",
                    group * groups_kept
                ));
            }
        }
    }

    fn quantization(&mut self) {
        let key = "quantization_config";
        let sections = if self.path.is_empty() {
            vec![(self.top, "")]
        } else {
            vec![(self.text, self.path), (self.top, "")]
        };
        let mut found = false;
        for (object, path) in sections {
            match object.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::Object(section)) => {
                    found = true;
                    let findings = quantization::check(section, &format!("{path}{key}."));
                    self.problems.extend(findings.problems);
                    self.unknown_keys.extend(findings.unknown_keys);
                }
                Some(_) => {
                    found = true;
                    self.problems.push(format!("`{path}{key}` must be an object"));
                }
            }
        }
        if !found {
            self.text().problem(key, "is missing: it must say that the experts are MXFP4");
        }
    }

    fn activation(&mut self) -> Option<Activation> {
        let mut text = self.text();
        let is_situ = text.choice("hidden_act", &[("situ", true), ("silu", false)]);
        if is_situ == Some(false) {
            return Some(Activation::Silu);
        }
        let beta = text.number_or_null(
            "activation_situ_beta",
            "null or a number of at least 0",
            |number| number >= 0.0,
        );
        let linear_beta = text.number_or_null(
            "activation_situ_linear_beta",
            "null or a number above 0",
            |number| number > 0.0,
        );
        is_situ?;
        let beta = beta?.filter(|beta| *beta != 0.0).unwrap_or(1.0);
        Some(Activation::Situ { beta, linear_beta: linear_beta? })
    }

    /// Token ids: one, several, or none. The top level goes before the text section.
    fn token_ids(&mut self, key: &str, vocab_size: usize) -> Option<Vec<u32>> {
        let value = |object: &'r Map<String, Value>| object.get(key).filter(|v| !v.is_null());
        let (value, path) = match (value(self.top), value(self.text)) {
            (Some(value), _) => (value, ""),
            (None, Some(value)) => (value, self.path),
            (None, None) => return Some(Vec::new()),
        };
        let items = match value {
            Value::Array(items) if key == "eos_token_id" => items.as_slice(),
            single => std::slice::from_ref(single),
        };
        let id = |item: &Value| {
            let id = item.as_u64().filter(|id| *id < vocab_size as u64);
            id.and_then(|id| u32::try_from(id).ok())
        };
        let ids: Option<Vec<u32>> = items.iter().map(id).collect();
        if ids.is_none() {
            let problem = format!("must be a token id below the vocabulary size, found {value}");
            self.problems.push(format!("`{path}{key}` {problem}"));
        }
        ids
    }

    fn list_unknown_keys(&mut self) {
        let mut unknown = Vec::new();
        if self.path.is_empty() {
            unknown.extend(config_keys::unknown(self.text, "", config_keys::TEXT, true));
        } else {
            unknown.extend(config_keys::unknown(self.top, "", config_keys::TOP_LEVEL, true));
            unknown.extend(config_keys::unknown(self.text, self.path, config_keys::TEXT, true));
        }
        if let Some(Value::Object(section)) = self.text.get("linear_attn_config") {
            let path = format!("{}linear_attn_config.", self.path);
            let read = config_keys::LINEAR_ATTENTION;
            unknown.extend(config_keys::unknown(section, &path, read, false));
        }
        unknown.append(&mut self.unknown_keys);
        self.unknown_keys = unknown;
    }
}

/// Turns a section that is asked for but could not be read into `None`.
fn present<T>(section: Option<Option<T>>) -> Option<Option<T>> {
    match section {
        None => Some(None),
        Some(section) => section.map(Some),
    }
}
