//! What the bytes of a checkpoint directory mean.

pub mod catalog;
pub mod config;
pub mod dtype;
pub mod safetensors;
pub mod tensor_names;
