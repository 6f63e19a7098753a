//! What `config.json` says about the text model.
//!
//! The file is read without guessing: every key that the forward pass depends
//! on must be there and be understood, all problems come in one error, and
//! keys that nobody knows are returned.

use std::path::Path;

use serde::Serialize;

use super::config_reader;
use crate::error::{Error, Result};

/// How a layer attends to earlier positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AttentionKind {
    /// Kimi Delta Attention: one fixed matrix per head.
    Kda,
    /// Gated multi-head latent attention.
    Mla,
}

/// What follows the attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FeedForwardKind {
    /// One MLP for every token.
    Dense,
    /// Routed experts.
    Experts,
}

/// The two halves of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LayerKind {
    /// Attention half.
    pub attention: AttentionKind,
    /// Feed-forward half.
    pub feed_forward: FeedForwardKind,
}

/// Kimi Delta Attention (`linear_attn_config`).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KdaConfig {
    /// `num_heads`.
    pub heads: usize,
    /// `head_dim`: width of a head's keys and of its values.
    pub head_dim: usize,
    /// `short_conv_kernel_size`: taps of the causal convolution.
    pub conv_taps: usize,
    /// `gate_lower_bound`: `None` (null or absent) is the softplus decay.
    pub gate_lower_bound: Option<f32>,
    /// `use_full_rank_gate`: `g_proj` instead of `g_a_proj`, `g_b_proj`.
    pub full_rank_gate: bool,
}

impl KdaConfig {
    /// `heads * head_dim`.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// Gated multi-head latent attention.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MlaConfig {
    /// `num_attention_heads`.
    pub heads: usize,
    /// `q_lora_rank`: `None` is one full query projection.
    pub query_rank: Option<usize>,
    /// `kv_lora_rank`: width of the cached latent.
    pub latent_dim: usize,
    /// `qk_nope_head_dim`.
    pub nope_dim: usize,
    /// `qk_rope_head_dim`: never rotated, yet part of every score.
    pub rope_dim: usize,
    /// `v_head_dim`.
    pub value_dim: usize,
    /// `mla_use_output_gate`.
    pub output_gate: bool,
}

/// Router scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterActivation {
    /// Each expert for itself.
    Sigmoid,
    /// Over all experts.
    Softmax,
}

/// Routed and shared experts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MoeConfig {
    /// `num_experts`.
    pub experts: usize,
    /// `num_experts_per_token`.
    pub experts_per_token: usize,
    /// `moe_intermediate_size`: inner width of a routed expert.
    pub expert_width: usize,
    /// `moe_intermediate_size * num_shared_experts`; 0 without shared experts.
    pub shared_width: usize,
    /// `routed_expert_hidden_size`: `None` means that experts work on the full width.
    pub latent_dim: Option<usize>,
    /// `latent_moe_use_norm`: norm on the weighted sum of the experts.
    pub latent_norm: bool,
    /// `moe_renormalize`.
    pub renormalize: bool,
    /// `routed_scaling_factor`.
    pub scaling_factor: f32,
    /// `moe_router_activation_func`.
    pub router_activation: RouterActivation,
    /// `num_expert_group`.
    pub groups: usize,
    /// `topk_group`.
    pub groups_kept: usize,
}

/// The gated activation of every MLP.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `hidden_act: situ` with both caps resolved (a null or zero beta is 1).
    Situ {
        /// `activation_situ_beta`.
        beta: f32,
        /// `activation_situ_linear_beta`: `None` leaves the up branch uncapped.
        linear_beta: Option<f32>,
    },
    /// `hidden_act: silu`.
    Silu,
}

/// Everything about the text model that its forward pass depends on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelConfig {
    /// `hidden_size`.
    pub hidden_size: usize,
    /// `vocab_size`.
    pub vocab_size: usize,
    /// `tie_word_embeddings`.
    pub tied_embeddings: bool,
    /// `rms_norm_eps`; not used by the two latent norms of MLA.
    pub norm_epsilon: f32,
    /// Kind of every layer, counted from 0.
    pub layers: Vec<LayerKind>,
    /// Present when a layer uses it.
    pub kda: Option<KdaConfig>,
    /// Present when a layer uses it.
    pub mla: Option<MlaConfig>,
    /// Present when a layer has experts.
    pub moe: Option<MoeConfig>,
    /// `intermediate_size`, width of the dense MLP; present when a layer is dense.
    pub dense_width: Option<usize>,
    /// Activation of every MLP.
    pub activation: Activation,
    /// `attn_res_block_size`: `None` is the ordinary residual stream.
    pub residual_block: Option<usize>,
    /// `bos_token_id`.
    pub bos_token_id: Option<u32>,
    /// `eos_token_id`, one or several.
    pub eos_token_ids: Vec<u32>,
    /// `pad_token_id`.
    pub pad_token_id: Option<u32>,
}

/// A config file that was understood.
#[derive(Debug, Clone)]
pub struct ConfigFile {
    /// What the forward pass depends on.
    pub config: ModelConfig,
    /// Paths of keys that are not known, e.g. `text_config.some_key`.
    pub unknown_keys: Vec<String>,
    /// The section of the text model as written (the whole file if it is flat).
    pub text_json: serde_json::Value,
}

impl ModelConfig {
    /// Reads a `config.json`: the released form, with everything about the
    /// text model under `text_config`, or a flat one.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read. [`Error::Config`] with all
    /// problems at once if it is no JSON, lacks keys, contradicts itself or
    /// asks for a form of the model that is not implemented.
    pub fn read(path: &Path) -> Result<ConfigFile> {
        let text = std::fs::read(path).map_err(|source| Error::io("read", path, source))?;
        Self::parse(&text, path)
    }

    /// Leaves out all layers but the first `count`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] if there are not that many, or `count` is 0.
    pub fn keep_layers(&mut self, count: usize) -> Result<()> {
        let layers = self.layers.len();
        if count == 0 || count > layers {
            return Err(Error::invalid(
                format!("expected a number of layers from 1 to {layers}, found {count}"),
                "leave it out for the whole model",
            ));
        }
        self.layers.truncate(count);
        let attends = |kind| self.layers.iter().any(|layer| layer.attention == kind);
        let follows = |kind| self.layers.iter().any(|layer| layer.feed_forward == kind);
        let (kda, mla) = (attends(AttentionKind::Kda), attends(AttentionKind::Mla));
        let (dense, moe) = (follows(FeedForwardKind::Dense), follows(FeedForwardKind::Experts));
        // A section is present when a layer uses it.
        self.kda = self.kda.take().filter(|_| kda);
        self.mla = self.mla.take().filter(|_| mla);
        self.dense_width = self.dense_width.filter(|_| dense);
        self.moe = self.moe.take().filter(|_| moe);
        Ok(())
    }

    /// [`ModelConfig::read`] for text that is in memory; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Config`] as above.
    pub fn parse(text: &[u8], path: &Path) -> Result<ConfigFile> {
        config_reader::read(text)
            .map_err(|problems| Error::Config { path: path.to_owned(), problems })
    }
}
