//! Tiny checkpoints of the released layout, written into a temporary directory.

// Every test binary uses its own part of this module.
#![allow(dead_code)]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use _k3rs::format::catalog::ExpertPart;
use _k3rs::format::config::{FeedForwardKind, ModelConfig};
use _k3rs::format::tensor_names;
use serde_json::{Map, Value, json};

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
}

impl Tensor {
    pub fn new(name: impl Into<String>, dtype: &str, shape: &[usize]) -> Self {
        Tensor { name: name.into(), dtype: dtype.to_owned(), shape: shape.to_vec() }
    }

    pub fn byte_count(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.element_bytes()
    }

    fn element_bytes(&self) -> u64 {
        match self.dtype.as_str() {
            "F64" | "I64" => 8,
            "F32" => 4,
            "BF16" | "F16" => 2,
            _ => 1,
        }
    }
}

/// A nested config of the released form: a dense KDA layer, a KDA layer with
/// experts, and two MLA layers with experts.
pub fn tiny_config() -> Value {
    let mut config: Value = serde_json::from_str(TINY_CONFIG).unwrap();
    config["text_config"]["quantization_config"] = mxfp4_section();
    config
}

const TINY_CONFIG: &str = r#"{
    "architectures": ["KimiK3ForConditionalGeneration"],
    "bos_token_id": 60,
    "eos_token_id": 61,
    "model_type": "kimi_k3",
    "pad_token_id": 62,
    "tie_word_embeddings": false,
    "vision_config": {"patch_size": 14},
    "text_config": {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 64,
        "intermediate_size": 48,
        "kv_lora_rank": 16,
        "latent_moe_use_norm": true,
        "linear_attn_config": {
            "full_attn_layers": [3, 4],
            "gate_lower_bound": -5.0,
            "head_dim": 8,
            "kda_layers": [1, 2],
            "num_heads": 3,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": true
        },
        "mla_use_nope": true,
        "mla_use_output_gate": true,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 2,
        "num_expert_group": 1,
        "num_experts": 12,
        "num_experts_per_token": 3,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "routed_expert_hidden_size": 96,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "v_head_dim": 8,
        "vocab_size": 64
    }
}"#;

/// `quantization_config` as the release has it.
pub fn mxfp4_section() -> Value {
    json!({
        "config_groups": {"group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": null,
            "output_activations": null,
            "targets": ["Linear"],
            "weights": {
                "actorder": null, "block_structure": null, "dynamic": false, "group_size": 32,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": true,
                "type": "float", "zp_dtype": null
            }
        }},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": null,
        "ignore": ["re:.*lm_head.*"],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed"
    })
}

/// The config behind a JSON value.
pub fn parse_config(value: &Value) -> ModelConfig {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.json");
    fs::write(&path, value.to_string()).unwrap();
    ModelConfig::read(&path).unwrap().config
}

/// All text tensors of a layer in the released types, with prefix, experts included.
pub fn layer_tensors(config: &ModelConfig, layer: usize) -> Vec<Tensor> {
    let mut tensors = with_prefix(tensor_names::expected_layer(config, layer));
    if config.layers[layer].feed_forward == FeedForwardKind::Experts {
        let shapes = config.expert_shapes();
        for expert in 0..config.moe.as_ref().unwrap().experts {
            for part in ExpertPart::ALL {
                let name = tensor_names::expert(layer, expert, part);
                let name = format!("{}{name}", tensor_names::PREFIX);
                tensors.push(Tensor::new(name, "U8", &shapes[part as usize]));
            }
        }
    }
    tensors
}

/// The tensors outside the layers, with prefix.
pub fn root_tensors(config: &ModelConfig) -> Vec<Tensor> {
    with_prefix(tensor_names::expected_roots(config))
}

fn with_prefix(expected: Vec<tensor_names::ExpectedTensor>) -> Vec<Tensor> {
    let tensor = |tensor: tensor_names::ExpectedTensor| {
        let name = format!("{}{}", tensor_names::PREFIX, tensor.name);
        Tensor::new(name, tensor.dtype.name(), &tensor.shape.released())
    };
    expected.into_iter().map(tensor).collect()
}

/// A checkpoint as lists of tensors, one list per shard, to be changed and written.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub config: Value,
    pub shards: Vec<(String, Vec<Tensor>)>,
}

impl Checkpoint {
    /// One shard per layer, one for the roots, one for images, named as in the release.
    pub fn tiny() -> Self {
        Self::of(&tiny_config())
    }

    /// The same for any config.
    pub fn of(config: &Value) -> Self {
        let model = parse_config(config);
        let mut lists: Vec<Vec<Tensor>> =
            (0..model.layers.len()).map(|layer| layer_tensors(&model, layer)).collect();
        lists.push(root_tensors(&model));
        lists.push(vec![
            Tensor::new("mm_projector.proj.0.weight", "BF16", &[8, 8]),
            Tensor::new("vision_tower.patch_embed.pos_emb.weight", "F16", &[4, 3]),
        ]);
        let count = lists.len();
        let name = |number: usize| format!("model-{:05}-of-{count:06}.safetensors", number + 1);
        let shards = lists.into_iter().enumerate().map(|(i, list)| (name(i), list)).collect();
        Checkpoint { config: config.clone(), shards }
    }

    /// Applies a change to every tensor.
    pub fn map(mut self, change: impl Fn(&mut Tensor)) -> Self {
        self.shards.iter_mut().flat_map(|(_, tensors)| tensors).for_each(change);
        self
    }

    /// The tensor whose full name ends with `suffix`.
    pub fn tensor(&mut self, suffix: &str) -> &mut Tensor {
        let mut all = self.shards.iter_mut().flat_map(|(_, tensors)| tensors);
        all.find(|tensor| tensor.name.ends_with(suffix)).unwrap()
    }

    /// Takes the tensor whose full name ends with `suffix` out.
    pub fn remove(&mut self, suffix: &str) -> Tensor {
        let name = self.tensor(suffix).name.clone();
        let shards = self.shards.iter_mut();
        let (list, index) = shards
            .map(|(_, tensors)| tensors)
            .find_map(|list| {
                let index = list.iter().position(|tensor| tensor.name == name);
                index.map(|index| (list, index))
            })
            .unwrap();
        list.remove(index)
    }

    /// Index file for the shards as they are.
    pub fn index(&self) -> Value {
        let mut weight_map = Map::new();
        let mut total = 0;
        for (shard, tensors) in &self.shards {
            for tensor in tensors {
                weight_map.insert(tensor.name.clone(), json!(shard));
                total += tensor.byte_count();
            }
        }
        json!({"metadata": {"total_size": total}, "weight_map": weight_map})
    }

    /// Writes config, index and shards.
    pub fn write(&self, directory: &Path) {
        self.write_without_index(directory);
        write_json(&directory.join("model.safetensors.index.json"), &self.index());
    }

    /// Writes config and shards.
    pub fn write_without_index(&self, directory: &Path) {
        fs::create_dir_all(directory).unwrap();
        write_json(&directory.join("config.json"), &self.config);
        for (name, tensors) in &self.shards {
            write_shard(&directory.join(name), tensors, &Map::new());
        }
    }

    /// [`Checkpoint::write`] into a new temporary directory.
    pub fn written(&self) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        self.write(directory.path());
        directory
    }
}

pub fn write_json(path: &Path, value: &Value) {
    fs::write(path, value.to_string()).unwrap();
}

/// Header text of the released layout: descending element size, then by name,
/// padded to a multiple of 8. Returns it with the bytes of the data.
pub fn header(tensors: &[Tensor], first: &Map<String, Value>) -> (String, u64) {
    let mut tensors: Vec<&Tensor> = tensors.iter().collect();
    tensors.sort_by_key(|tensor| (std::cmp::Reverse(tensor.element_bytes()), &tensor.name));
    let mut object = first.clone();
    let mut end = 0;
    for tensor in tensors {
        let begin = end;
        end += tensor.byte_count();
        let entry = json!({
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]
        });
        object.insert(tensor.name.clone(), entry);
    }
    let mut text = Value::Object(object).to_string();
    while !text.len().is_multiple_of(8) {
        text.push(' ');
    }
    (text, end)
}

/// Writes a shard; the data are a hole.
pub fn write_shard(path: &Path, tensors: &[Tensor], first: &Map<String, Value>) {
    let (text, data_bytes) = header(tensors, first);
    write_raw(path, text.as_bytes(), data_bytes);
}

/// Writes any header text with a hole of `data_bytes` behind it.
pub fn write_raw(path: &Path, header: &[u8], data_bytes: u64) {
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header).unwrap();
    file.set_len(8 + header.len() as u64 + data_bytes).unwrap();
}

/// A file of the shared data outside the project; `None`, with a message, where
/// it is absent.
pub fn shared(file: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared").join(file);
    if path.exists() {
        return Some(path);
    }
    let _ = writeln!(std::io::stderr(), "skipped: there is no {}", path.display());
    None
}
