//! Kimi K3, one file per idea.
//!
//! The forward pass follows the authors' published code, also where other
//! programs differ from it: see `gated_mla` for the epsilon of the latent norms.

pub mod attention_residuals;
pub mod binding;
pub mod decoder_layer;
pub mod delta_rule;
pub mod dense_ffn;
pub mod expert_schedule;
pub mod gated_mla;
pub mod kda;
pub mod latent_moe;
pub mod mla_cache;
pub mod pass;
pub mod router;
pub mod short_conv;
pub mod state;
pub mod vocabulary;
pub mod weights;
