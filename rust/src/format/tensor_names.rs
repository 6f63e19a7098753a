//! The only file that spells tensor names.
//!
//! Names are given as the released checkpoint has them after its
//! [`PREFIX`]; the catalog takes the prefix off. What exists in a layer follows
//! from the config alone, so the same list serves to check a checkpoint, to
//! bind its weights and to make one up.

use crate::format::config::{
    AttentionKind, FeedForwardKind, KdaConfig, MlaConfig, ModelConfig, MoeConfig,
};
use crate::format::dtype::Dtype;
use crate::format::expert_table::ExpertPart;

/// Prefix of every text tensor where the checkpoint also has image tensors.
pub const PREFIX: &str = "language_model.";
/// Token embedding `[vocab, hidden]`.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Norm before the output matrix `[hidden]`.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Output matrix `[vocab, hidden]`; absent when it is the embedding.
pub const LM_HEAD: &str = "lm_head.weight";
/// Norm of the last residual mix `[hidden]`.
pub const OUTPUT_RES_NORM: &str = "model.output_attn_res_norm.weight";
/// Projection of the last residual mix `[1, hidden]`.
pub const OUTPUT_RES_PROJ: &str = "model.output_attn_res_proj.weight";

/// Norm before the attention of a layer `[hidden]`.
pub const INPUT_NORM: &str = "input_layernorm.weight";
/// Norm before the feed-forward half of a layer `[hidden]`.
pub const POST_ATTENTION_NORM: &str = "post_attention_layernorm.weight";

/// The two attention-residual mixes of a layer.
pub mod residual {
    /// `[hidden]`.
    pub const ATTENTION_NORM: &str = "self_attention_res_norm.weight";
    /// `[1, hidden]`.
    pub const ATTENTION_PROJ: &str = "self_attention_res_proj.weight";
    /// `[hidden]`.
    pub const MLP_NORM: &str = "mlp_res_norm.weight";
    /// `[1, hidden]`.
    pub const MLP_PROJ: &str = "mlp_res_proj.weight";
}

/// Kimi Delta Attention; `P` is heads times head width `d`.
pub mod kda {
    /// `[P, hidden]`.
    pub const Q_PROJ: &str = "self_attn.q_proj.weight";
    /// `[P, hidden]`.
    pub const K_PROJ: &str = "self_attn.k_proj.weight";
    /// `[P, hidden]`.
    pub const V_PROJ: &str = "self_attn.v_proj.weight";
    /// `[P, 1, taps]`.
    pub const Q_CONV: &str = "self_attn.q_conv1d.weight";
    /// `[P, 1, taps]`.
    pub const K_CONV: &str = "self_attn.k_conv1d.weight";
    /// `[P, 1, taps]`.
    pub const V_CONV: &str = "self_attn.v_conv1d.weight";
    /// `[d, hidden]`.
    pub const F_A_PROJ: &str = "self_attn.f_a_proj.weight";
    /// `[P, d]`.
    pub const F_B_PROJ: &str = "self_attn.f_b_proj.weight";
    /// `[heads, hidden]`.
    pub const B_PROJ: &str = "self_attn.b_proj.weight";
    /// One value per head, then padding: `[d]` in the release.
    pub const A_LOG: &str = "self_attn.A_log";
    /// `[P]`.
    pub const DT_BIAS: &str = "self_attn.dt_bias";
    /// `[P, hidden]`, the gate in one matrix.
    pub const G_PROJ: &str = "self_attn.g_proj.weight";
    /// `[d, hidden]`, the first of two gate matrices.
    pub const G_A_PROJ: &str = "self_attn.g_a_proj.weight";
    /// `[P, d]`, the second of two gate matrices.
    pub const G_B_PROJ: &str = "self_attn.g_b_proj.weight";
    /// `[d]`, shared by all heads.
    pub const O_NORM: &str = "self_attn.o_norm.weight";
    /// `[hidden, P]`.
    pub const O_PROJ: &str = "self_attn.o_proj.weight";
}

/// Gated multi-head latent attention; `q` is heads times (nope + rope).
pub mod mla {
    /// `[q, hidden]`, without a query rank.
    pub const Q_PROJ: &str = "self_attn.q_proj.weight";
    /// `[query rank, hidden]`.
    pub const Q_A_PROJ: &str = "self_attn.q_a_proj.weight";
    /// `[query rank]`.
    pub const Q_A_NORM: &str = "self_attn.q_a_layernorm.weight";
    /// `[q, query rank]`.
    pub const Q_B_PROJ: &str = "self_attn.q_b_proj.weight";
    /// `[latent + rope, hidden]`.
    pub const KV_A_PROJ: &str = "self_attn.kv_a_proj_with_mqa.weight";
    /// `[latent]`.
    pub const KV_A_NORM: &str = "self_attn.kv_a_layernorm.weight";
    /// `[heads * (nope + value), latent]`.
    pub const KV_B_PROJ: &str = "self_attn.kv_b_proj.weight";
    /// `[heads * value, hidden]`.
    pub const G_PROJ: &str = "self_attn.g_proj.weight";
    /// `[hidden, heads * value]`.
    pub const O_PROJ: &str = "self_attn.o_proj.weight";
}

/// MLP of a dense layer.
pub mod dense {
    /// `[width, hidden]`.
    pub const GATE_PROJ: &str = "mlp.gate_proj.weight";
    /// `[width, hidden]`.
    pub const UP_PROJ: &str = "mlp.up_proj.weight";
    /// `[hidden, width]`.
    pub const DOWN_PROJ: &str = "mlp.down_proj.weight";
}

/// Trunk tensors of an expert layer.
pub mod moe {
    /// `[experts, hidden]`.
    pub const ROUTER: &str = "block_sparse_moe.gate.weight";
    /// `[experts]`.
    pub const ROUTER_BIAS: &str = "block_sparse_moe.gate.e_score_correction_bias";
    /// `[latent, hidden]`.
    pub const LATENT_DOWN: &str = "block_sparse_moe.routed_expert_down_proj.weight";
    /// `[latent]`.
    pub const LATENT_NORM: &str = "block_sparse_moe.routed_expert_norm.weight";
    /// `[hidden, latent]`.
    pub const LATENT_UP: &str = "block_sparse_moe.routed_expert_up_proj.weight";
    /// `[shared width, hidden]`.
    pub const SHARED_GATE: &str = "block_sparse_moe.shared_experts.gate_proj.weight";
    /// `[shared width, hidden]`.
    pub const SHARED_UP: &str = "block_sparse_moe.shared_experts.up_proj.weight";
    /// `[hidden, shared width]`.
    pub const SHARED_DOWN: &str = "block_sparse_moe.shared_experts.down_proj.weight";
}

const LAYERS: &str = "model.layers.";
const EXPERTS: &str = ".block_sparse_moe.experts.";

/// Name of a layer's tensor, `layer` counted from 0.
pub fn layer(layer: usize, suffix: &str) -> String {
    format!("{LAYERS}{layer}.{suffix}")
}

/// Name of one of the six tensors of a routed expert.
pub fn expert(layer: usize, expert: usize, part: ExpertPart) -> String {
    format!("{LAYERS}{layer}{EXPERTS}{expert}.{}", expert_suffix(part))
}

/// What the names of a layer's routed experts have in common.
pub fn experts(layer: usize) -> String {
    format!("{LAYERS}{layer}{EXPERTS}*")
}

/// The layer that a name (without prefix) belongs to.
pub fn layer_of(name: &str) -> Option<usize> {
    canonical_number(name.strip_prefix(LAYERS)?.split_once('.')?.0)
}

/// Takes an [`expert`] name apart. Only the canonical spelling counts: `01` or
/// `+1` is not the number of a layer.
pub fn parse_expert(name: &str) -> Option<(usize, usize, ExpertPart)> {
    let (layer, rest) = name.strip_prefix(LAYERS)?.split_once('.')?;
    let (expert, suffix) = rest.strip_prefix(&EXPERTS[1..])?.split_once('.')?;
    let part = ExpertPart::ALL.into_iter().find(|part| expert_suffix(*part) == suffix)?;
    Some((canonical_number(layer)?, canonical_number(expert)?, part))
}

fn canonical_number(digits: &str) -> Option<usize> {
    let canonical = digits.bytes().all(|byte| byte.is_ascii_digit())
        && (digits == "0" || !digits.starts_with('0'));
    canonical.then(|| digits.parse().ok()).flatten()
}

fn expert_suffix(part: ExpertPart) -> &'static str {
    match part {
        ExpertPart::GatePacked => "w1.weight_packed",
        ExpertPart::GateScale => "w1.weight_scale",
        ExpertPart::DownPacked => "w2.weight_packed",
        ExpertPart::DownScale => "w2.weight_scale",
        ExpertPart::UpPacked => "w3.weight_packed",
        ExpertPart::UpScale => "w3.weight_scale",
    }
}

/// Whether a name (without prefix) belongs to a layer, not to the roots.
pub fn is_layer(name: &str) -> bool {
    name.starts_with(LAYERS)
}

/// Whether a checkpoint without [`PREFIX`] has this tensor for images only.
pub fn is_vision(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    name.starts_with("vision_tower.") || name.starts_with("mm_projector.")
}

/// What the config demands of a tensor's shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExpectedShape {
    /// Exactly this.
    Exact(Vec<usize>),
    /// One axis of at least `used` values, the rest is padding; the release
    /// has `released`.
    Padded {
        /// Values that the model reads.
        used: usize,
        /// Length in the released layout.
        released: usize,
    },
}

impl ExpectedShape {
    /// Whether a stored shape will do.
    pub fn accepts(&self, shape: &[usize]) -> bool {
        match self {
            Self::Exact(exact) => exact == shape,
            Self::Padded { used, .. } => matches!(shape, [length] if length >= used),
        }
    }

    /// The shape in the released layout.
    pub fn released(&self) -> Vec<usize> {
        match self {
            Self::Exact(exact) => exact.clone(),
            Self::Padded { used, released } => vec![*released.max(used)],
        }
    }
}

impl std::fmt::Display for ExpectedShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exact(exact) => write!(f, "shape {exact:?}"),
            Self::Padded { used, .. } => write!(f, "one axis of at least {used} values"),
        }
    }
}

/// A trunk tensor that has to be there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// Name without [`PREFIX`].
    pub name: String,
    /// Its shape.
    pub shape: ExpectedShape,
    /// Element type in the released layout. Both BF16 and F32 can be read.
    pub dtype: Dtype,
}

/// All trunk tensors of the text model: the roots, then layer by layer.
pub fn expected_trunk(config: &ModelConfig) -> Vec<ExpectedTensor> {
    let mut tensors = expected_roots(config);
    for layer in 0..config.layers.len() {
        tensors.extend(expected_layer(config, layer));
    }
    tensors
}

/// The tensors outside the layers.
pub fn expected_roots(config: &ModelConfig) -> Vec<ExpectedTensor> {
    let (hidden, vocab) = (config.hidden_size, config.vocab_size);
    let mut list = List { prefix: String::new(), tensors: Vec::new() };
    list.bf16(EMBEDDING, &[vocab, hidden]);
    list.bf16(FINAL_NORM, &[hidden]);
    if config.residual_block.is_some() {
        list.bf16(OUTPUT_RES_NORM, &[hidden]);
        list.bf16(OUTPUT_RES_PROJ, &[1, hidden]);
    }
    if !config.tied_embeddings {
        list.bf16(LM_HEAD, &[vocab, hidden]);
    }
    list.tensors
}

/// The trunk tensors of a layer, counted from 0.
///
/// # Panics
/// If the config has no such layer, or lacks the section that its kind needs
/// (a config that was read never does).
pub fn expected_layer(config: &ModelConfig, layer: usize) -> Vec<ExpectedTensor> {
    let hidden = config.hidden_size;
    let kind = config.layers[layer];
    let mut list = List { prefix: format!("{LAYERS}{layer}."), tensors: Vec::new() };
    list.bf16(INPUT_NORM, &[hidden]);
    list.bf16(POST_ATTENTION_NORM, &[hidden]);
    if config.residual_block.is_some() {
        list.bf16(residual::ATTENTION_NORM, &[hidden]);
        list.bf16(residual::ATTENTION_PROJ, &[1, hidden]);
        list.bf16(residual::MLP_NORM, &[hidden]);
        list.bf16(residual::MLP_PROJ, &[1, hidden]);
    }
    match (kind.attention, &config.kda, &config.mla) {
        (AttentionKind::Kda, Some(kda), _) => list.kda(kda, hidden),
        (AttentionKind::Mla, _, Some(mla)) => list.mla(mla, hidden),
        (attention, ..) => panic!("layer {layer} is {attention:?}, which has no config section"),
    }
    match (kind.feed_forward, config.dense_width, &config.moe) {
        (FeedForwardKind::Dense, Some(width), _) => {
            list.bf16(dense::GATE_PROJ, &[width, hidden]);
            list.bf16(dense::UP_PROJ, &[width, hidden]);
            list.bf16(dense::DOWN_PROJ, &[hidden, width]);
        }
        (FeedForwardKind::Experts, _, Some(moe)) => list.moe(moe, hidden),
        (half, ..) => panic!("layer {layer} is {half:?}, which has no config section"),
    }
    list.tensors
}

/// Shape of a routed expert's tensor; `input_width` is what the expert reads
/// and writes (the latent width, or the full one).
pub fn expert_shape(part: ExpertPart, expert_width: usize, input_width: usize) -> [usize; 2] {
    match part {
        ExpertPart::GatePacked | ExpertPart::UpPacked => [expert_width, input_width / 2],
        ExpertPart::GateScale | ExpertPart::UpScale => [expert_width, input_width / 32],
        ExpertPart::DownPacked => [input_width, expert_width / 2],
        ExpertPart::DownScale => [input_width, expert_width / 32],
    }
}

struct List {
    prefix: String,
    tensors: Vec<ExpectedTensor>,
}

impl List {
    fn push(&mut self, suffix: &str, shape: ExpectedShape, dtype: Dtype) {
        let name = format!("{}{suffix}", self.prefix);
        self.tensors.push(ExpectedTensor { name, shape, dtype });
    }

    fn bf16(&mut self, suffix: &str, shape: &[usize]) {
        self.push(suffix, ExpectedShape::Exact(shape.to_vec()), Dtype::Bf16);
    }

    fn f32(&mut self, suffix: &str, shape: &[usize]) {
        self.push(suffix, ExpectedShape::Exact(shape.to_vec()), Dtype::F32);
    }

    fn kda(&mut self, config: &KdaConfig, hidden: usize) {
        let (heads, head_dim, width) = (config.heads, config.head_dim, config.width());
        for name in [kda::Q_PROJ, kda::K_PROJ, kda::V_PROJ] {
            self.bf16(name, &[width, hidden]);
        }
        for name in [kda::Q_CONV, kda::K_CONV, kda::V_CONV] {
            self.f32(name, &[width, 1, config.conv_taps]);
        }
        self.bf16(kda::F_A_PROJ, &[head_dim, hidden]);
        self.bf16(kda::F_B_PROJ, &[width, head_dim]);
        self.bf16(kda::B_PROJ, &[heads, hidden]);
        let padded = ExpectedShape::Padded { used: heads, released: head_dim };
        self.push(kda::A_LOG, padded, Dtype::F32);
        self.f32(kda::DT_BIAS, &[width]);
        if config.full_rank_gate {
            self.bf16(kda::G_PROJ, &[width, hidden]);
        } else {
            self.bf16(kda::G_A_PROJ, &[head_dim, hidden]);
            self.bf16(kda::G_B_PROJ, &[width, head_dim]);
        }
        self.f32(kda::O_NORM, &[head_dim]);
        self.bf16(kda::O_PROJ, &[hidden, width]);
    }

    fn mla(&mut self, config: &MlaConfig, hidden: usize) {
        let query = config.heads * (config.nope_dim + config.rope_dim);
        let value = config.heads * config.value_dim;
        if let Some(rank) = config.query_rank {
            self.bf16(mla::Q_A_PROJ, &[rank, hidden]);
            self.bf16(mla::Q_A_NORM, &[rank]);
            self.bf16(mla::Q_B_PROJ, &[query, rank]);
        } else {
            self.bf16(mla::Q_PROJ, &[query, hidden]);
        }
        let latent = config.latent_dim;
        self.bf16(mla::KV_A_PROJ, &[latent + config.rope_dim, hidden]);
        self.bf16(mla::KV_A_NORM, &[latent]);
        self.bf16(mla::KV_B_PROJ, &[config.heads * (config.nope_dim + config.value_dim), latent]);
        if config.output_gate {
            self.bf16(mla::G_PROJ, &[value, hidden]);
        }
        self.bf16(mla::O_PROJ, &[hidden, value]);
    }

    fn moe(&mut self, config: &MoeConfig, hidden: usize) {
        self.bf16(moe::ROUTER, &[config.experts, hidden]);
        self.f32(moe::ROUTER_BIAS, &[config.experts]);
        if let Some(latent) = config.latent_dim {
            self.bf16(moe::LATENT_DOWN, &[latent, hidden]);
            self.bf16(moe::LATENT_UP, &[hidden, latent]);
            if config.latent_norm {
                self.bf16(moe::LATENT_NORM, &[latent]);
            }
        }
        if config.shared_width > 0 {
            self.bf16(moe::SHARED_GATE, &[config.shared_width, hidden]);
            self.bf16(moe::SHARED_UP, &[config.shared_width, hidden]);
            self.bf16(moe::SHARED_DOWN, &[hidden, config.shared_width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expert_names_are_taken_apart_as_they_are_built() {
        for part in ExpertPart::ALL {
            assert_eq!(parse_expert(&expert(92, 895, part)), Some((92, 895, part)));
        }
        let last = expert(92, 895, ExpertPart::UpScale);
        assert_eq!(last, "model.layers.92.block_sparse_moe.experts.895.w3.weight_scale");
    }

    #[test]
    fn other_spellings_are_not_expert_names() {
        for name in [
            "model.layers.01.block_sparse_moe.experts.0.w1.weight_packed",
            "model.layers.1.block_sparse_moe.experts.+1.w1.weight_packed",
            "model.layers.1.block_sparse_moe.experts..w1.weight_packed",
            "model.layers.1.block_sparse_moe.experts.0.w4.weight_packed",
            "model.layers.1.block_sparse_moe.experts.0.w1.weight",
            "model.layers.1.block_sparse_moe.experts.99999999999999999999.w1.weight_scale",
            "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed",
        ] {
            assert_eq!(parse_expert(name), None, "{name}");
        }
    }
}
