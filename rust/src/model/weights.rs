//! The weights of each part of the model as the forward pass sees them: small
//! vectors as floats, matrices as tiles to be streamed.

use std::ops::Range;

use crate::format::dtype::Dtype;
use crate::format::tensor_names;
use crate::storage::trunk_stream::TileIndex;

/// A trunk matrix `[rows, columns]` that arrives in tiles of whole rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamedMatrix {
    /// Full tensor name, for messages.
    pub name: String,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// Stored form.
    pub dtype: Dtype,
    /// Rows of every tile but the last.
    pub tile_rows: usize,
    /// Its tiles in the walk.
    pub tiles: Range<TileIndex>,
}

impl StreamedMatrix {
    /// The rows that tile number `index` of this matrix (from 0) holds.
    pub fn rows_of(&self, index: usize) -> Range<usize> {
        let first = index * self.tile_rows;
        first..self.rows.min(first + self.tile_rows)
    }
}

/// One attention-residual mix: `norm` and `projection` are `[hidden]`.
#[derive(Debug, Clone)]
pub struct MixWeights {
    /// Gain on the normalised keys.
    pub norm: Vec<f32>,
    /// Query.
    pub projection: Vec<f32>,
}

/// Everything outside the layers.
#[derive(Debug)]
pub struct RootWeights {
    /// Mix before the last norm, if the model has attention residuals.
    pub output_mix: Option<MixWeights>,
    /// Last norm `[hidden]`.
    pub norm: Vec<f32>,
    /// Output matrix `[vocab, hidden]`.
    pub lm_head: StreamedMatrix,
}

/// One layer.
#[derive(Debug)]
pub struct LayerWeights {
    /// Mixes before the attention and before the feed-forward half.
    pub mixes: Option<[MixWeights; 2]>,
    /// Norm before the attention `[hidden]`.
    pub attention_norm: Vec<f32>,
    /// Norm before the feed-forward half `[hidden]`.
    pub feed_forward_norm: Vec<f32>,
    /// Attention half.
    pub attention: AttentionWeights,
    /// Feed-forward half.
    pub feed_forward: FeedForwardWeights,
}

/// Either attention.
#[derive(Debug)]
pub enum AttentionWeights {
    /// Kimi Delta Attention.
    Kda(Box<KdaWeights>),
    /// Gated multi-head latent attention.
    Mla(Box<MlaWeights>),
}

/// Either feed-forward half.
#[derive(Debug)]
pub enum FeedForwardWeights {
    /// Dense MLP.
    Dense(Box<MlpWeights>),
    /// Routed and shared experts.
    Experts(Box<MoeWeights>),
}

/// Kimi Delta Attention; `P` is heads times head width `d`.
#[derive(Debug)]
pub struct KdaWeights {
    /// Query, key and value projections `[P, hidden]`.
    pub projections: [StreamedMatrix; 3],
    /// Convolution kernels of query, key and value, each `[heads, taps, d]`.
    pub convolutions: [Vec<f32>; 3],
    /// `f_a_proj [d, hidden]`, `f_b_proj [P, d]`.
    pub decay: [StreamedMatrix; 2],
    /// `b_proj [heads, hidden]`.
    pub beta: StreamedMatrix,
    /// `exp(A_log)`, one value per head.
    pub decay_rate: Vec<f64>,
    /// `[P]`.
    pub decay_bias: Vec<f32>,
    /// `g_proj`, or `g_a_proj` and `g_b_proj`.
    pub gate: Vec<StreamedMatrix>,
    /// `[d]`.
    pub output_norm: Vec<f32>,
    /// `[hidden, P]`.
    pub output: StreamedMatrix,
}

/// Gated multi-head latent attention.
#[derive(Debug)]
pub struct MlaWeights {
    /// Low-rank query: `q_a_proj` and the norm after it.
    pub query_down: Option<(StreamedMatrix, Vec<f32>)>,
    /// `q_b_proj` or `q_proj`.
    pub query: StreamedMatrix,
    /// `kv_a_proj_with_mqa [latent + rope, hidden]`.
    pub latent: StreamedMatrix,
    /// `kv_a_layernorm [latent]`.
    pub latent_norm: Vec<f32>,
    /// `g_proj [heads * value, hidden]`.
    pub gate: Option<StreamedMatrix>,
    /// `kv_b_proj [heads * (nope + value), latent]`, tiles of whole heads.
    pub expansion: StreamedMatrix,
    /// `o_proj [hidden, heads * value]`.
    pub output: StreamedMatrix,
}

/// A gated MLP: dense layers and shared experts.
#[derive(Debug)]
pub struct MlpWeights {
    /// `[width, hidden]`.
    pub gate: StreamedMatrix,
    /// `[width, hidden]`.
    pub up: StreamedMatrix,
    /// `[hidden, width]`.
    pub down: StreamedMatrix,
}

/// Routed and shared experts; the routed ones come from the expert cache.
#[derive(Debug)]
pub struct MoeWeights {
    /// `[experts, hidden]`.
    pub router: StreamedMatrix,
    /// Added to the scores for the choice only, `[experts]`.
    pub router_bias: Vec<f32>,
    /// Down to the latent width and up again.
    pub latent: Option<[StreamedMatrix; 2]>,
    /// Norm on the weighted sum of the experts.
    pub latent_norm: Option<Vec<f32>>,
    /// Shared experts, fused into one MLP.
    pub shared: Option<MlpWeights>,
}

impl MoeWeights {
    /// What stands before every tensor's name in this checkpoint; `layer` is
    /// the layer of these weights.
    pub fn name_prefix(&self, layer: usize) -> &str {
        let short = tensor_names::layer(layer, tensor_names::moe::ROUTER);
        self.router.name.strip_suffix(&short).unwrap_or_default()
    }
}
