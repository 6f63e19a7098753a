//! All that a text leaves behind in the model.

use crate::format::config::{AttentionKind, KdaConfig, ModelConfig};
use crate::model::mla_cache::MlaCache;

/// State of every layer's attention, in layer order.
#[derive(Debug, Clone)]
pub struct ModelState {
    /// One entry a layer.
    pub layers: Vec<AttentionState>,
}

/// What one layer carries from token to token.
#[derive(Debug, Clone)]
pub enum AttentionState {
    /// A fixed matrix per head, however long the text.
    Kda(Vec<HeadState>),
    /// Latents of all positions.
    Mla(MlaCache),
}

/// One head of Kimi Delta Attention.
#[derive(Debug, Clone)]
pub struct HeadState {
    /// `[d, d]` (key, value).
    pub matrix: Vec<f32>,
    /// Last inputs of the convolutions of query, key and value:
    /// `[3, taps - 1, d]`, oldest first.
    pub history: Vec<f32>,
}

impl HeadState {
    fn new(config: &KdaConfig) -> Self {
        HeadState {
            matrix: vec![0.0; config.head_dim * config.head_dim],
            history: vec![0.0; 3 * (config.conv_taps - 1) * config.head_dim],
        }
    }
}

impl ModelState {
    /// The state before the first token.
    pub fn new(config: &ModelConfig) -> Self {
        let layer = |kind: AttentionKind| match (kind, &config.kda, &config.mla) {
            (AttentionKind::Kda, Some(kda), _) => {
                AttentionState::Kda(vec![HeadState::new(kda); kda.heads])
            }
            (AttentionKind::Mla, _, Some(mla)) => {
                AttentionState::Mla(MlaCache::new(mla.latent_dim + mla.rope_dim))
            }
            _ => unreachable!("a config has the sections that its layers need"),
        };
        ModelState { layers: config.layers.iter().map(|kind| layer(kind.attention)).collect() }
    }

    /// Bytes of the recurrent part, which does not grow.
    pub fn fixed_bytes(config: &ModelConfig) -> u64 {
        let Some(kda) = &config.kda else { return 0 };
        let layers = config.layers.iter().filter(|kind| kind.attention == AttentionKind::Kda);
        let head = kda.head_dim * kda.head_dim + 3 * (kda.conv_taps - 1) * kda.head_dim;
        (layers.count() * kda.heads * head * size_of::<f32>()) as u64
    }

    /// Bytes of the latent cache for one position, over all layers.
    pub fn position_bytes(config: &ModelConfig) -> u64 {
        let Some(mla) = &config.mla else { return 0 };
        let layers = config.layers.iter().filter(|kind| kind.attention == AttentionKind::Mla);
        (layers.count() * (mla.latent_dim + mla.rope_dim) * size_of::<f32>()) as u64
    }
}
