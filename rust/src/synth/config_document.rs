//! The `config.json` of a synthetic checkpoint: the released one or a given
//! one, made smaller.

use std::path::Path;

use serde_json::{Value, json};

use super::{SynthOptions, released};
use crate::error::{Error, Result};
use crate::format::config::ModelConfig;

/// Special tokens have the last ids of the vocabulary.
const SPECIAL_IDS: u64 = 256;
/// Leaves ordinary ids beside the special ones.
const VOCABULARY_MIN: u64 = 320;
const ID_KEYS: [&str; 4] =
    ["bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"];

/// A config as it will be written, and what it says.
pub(super) struct ConfigDocument {
    pub json: Value,
    pub config: ModelConfig,
    pub unknown_keys: Vec<String>,
}

impl ConfigDocument {
    /// Takes the config that `options` name and applies their changes.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for a change that the model does not allow;
    /// [`Error::Config`] and [`Error::Io`] for a given config.
    pub fn new(options: &SynthOptions) -> Result<Self> {
        let built_in = Path::new("config.json");
        let path = options.config.as_deref().unwrap_or(built_in);
        let mut json = match &options.config {
            None => released::config(),
            Some(path) => read(path)?,
        };
        resize(&mut json, options)?;
        let file = ModelConfig::parse(json.to_string().as_bytes(), path)?;
        Ok(ConfigDocument { json, config: file.config, unknown_keys: file.unknown_keys })
    }

    /// Whether the text model is a section beside an image part, as in the
    /// release, whose text tensors therefore have a prefix.
    pub fn is_nested(&self) -> bool {
        self.json.get("text_config").is_some()
    }

    /// Whether the image part is the released one, the only one whose tensors are known.
    pub fn has_released_images(&self) -> bool {
        let key = "vision_config";
        self.is_nested() && self.json.get(key) == released::config().get(key)
    }
}

/// Reads a given config and makes sure that it was understood before anything
/// in it is changed.
fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read(path).map_err(|source| Error::io("read", path, source))?;
    ModelConfig::parse(&text, path)?;
    serde_json::from_slice(&text).map_err(|error| Error::Config {
        path: path.to_owned(),
        problems: vec![format!("not valid JSON: {error}")],
    })
}

fn resize(json: &mut Value, options: &SynthOptions) -> Result<()> {
    let SynthOptions { layers, experts, vocabulary, .. } = *options;
    if let Some(vocabulary) = vocabulary {
        resize_vocabulary(json, vocabulary as u64)?;
    }
    let text = text_section(json);
    if let Some(layers) = layers {
        keep_layers(text, layers as u64)?;
    }
    if let Some(experts) = experts {
        resize_experts(text, experts as u64)?;
    }
    Ok(())
}

fn text_section(json: &mut Value) -> &mut Value {
    if json.get("text_config").is_some() { &mut json["text_config"] } else { json }
}

/// Keeps the first layers with the kinds they have.
fn keep_layers(text: &mut Value, layers: u64) -> Result<()> {
    let present = text["num_hidden_layers"].as_u64().unwrap_or_default();
    if !(1..=present).contains(&layers) {
        return Err(Error::invalid(
            format!("expected a number of layers from 1 to {present}, found {layers}"),
            format!("the first layers of a model with {present} are kept"),
        ));
    }
    text["num_hidden_layers"] = json!(layers);
    for key in ["kda_layers", "full_attn_layers"] {
        if let Value::Array(list) = &mut text["linear_attn_config"][key] {
            list.retain(|layer| layer.as_u64().is_some_and(|layer| layer <= layers));
        }
    }
    Ok(())
}

fn resize_experts(text: &mut Value, experts: u64) -> Result<()> {
    if text["num_experts"].is_null() {
        return Err(Error::invalid(
            format!("expected no number of experts, found {experts}: the config has no experts"),
            "leave the number of experts out, or give a config with experts",
        ));
    }
    let chosen = text["num_experts_per_token"].as_u64().unwrap_or_default();
    if experts < chosen {
        return Err(Error::invalid(
            format!("expected at least {chosen} experts, found {experts}"),
            format!("each token goes through {chosen} different experts of a layer"),
        ));
    }
    text["num_experts"] = json!(experts);
    Ok(())
}

/// Special ids keep their distance from the end of the vocabulary.
fn resize_vocabulary(json: &mut Value, size: u64) -> Result<()> {
    if size < VOCABULARY_MIN {
        return Err(Error::invalid(
            format!("expected a vocabulary of at least {VOCABULARY_MIN} ids, found {size}"),
            format!("the last {SPECIAL_IDS} ids are those of special tokens"),
        ));
    }
    let text = text_section(json);
    let old_size = text["vocab_size"].as_u64().unwrap_or_default();
    text["vocab_size"] = json!(size);
    move_special_ids(json, old_size, size);
    if json.get("text_config").is_some() {
        move_special_ids(&mut json["text_config"], old_size, size);
    }
    Ok(())
}

fn move_special_ids(section: &mut Value, old_size: u64, size: u64) {
    let Some(section) = section.as_object_mut() else { return };
    for key in ID_KEYS {
        let ids = match section.get_mut(key) {
            Some(Value::Array(ids)) => ids.as_mut_slice(),
            Some(id) => std::slice::from_mut(id),
            None => &mut [],
        };
        for id in ids {
            let from_end = id.as_u64().and_then(|id| old_size.checked_sub(id));
            if let Some(from_end) = from_end.filter(|from_end| *from_end <= SPECIAL_IDS) {
                *id = json!(size - from_end);
            }
        }
    }
}
