//! What the bytes of a checkpoint directory mean.

use std::path::Path;

use crate::error::Error;

pub mod catalog;
pub mod config;
mod config_fields;
mod config_keys;
mod config_reader;
pub mod dtype;
pub mod expert_table;
mod quantization;
pub mod safetensors;
mod shard_index;
mod shard_list;
mod shard_reader;
pub mod survey;
pub mod tensor_names;
mod validation;

/// An [`Error::Checkpoint`] about a file, or about one tensor in it.
fn checkpoint_error(
    path: &Path,
    tensor: Option<&str>,
    expected: impl Into<String>,
    found: impl Into<String>,
    hint: impl Into<String>,
) -> Error {
    Error::Checkpoint {
        path: path.to_owned(),
        tensor: tensor.map(str::to_owned),
        expected: expected.into(),
        found: found.into(),
        hint: hint.into(),
    }
}

/// Up to `shown` names in backticks, and how many of `count` are not among them.
fn name_some(names: &[String], count: usize, shown: usize) -> String {
    let mut text: Vec<String> = names.iter().take(shown).map(|name| format!("`{name}`")).collect();
    if count > text.len() {
        text.push(format!("and {} more", count - text.len()));
    }
    text.join(", ")
}

/// All names in backticks.
fn name_all(names: &[String]) -> String {
    name_some(names, names.len(), names.len())
}
