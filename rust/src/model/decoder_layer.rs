//! The order of one layer.

use crate::error::Result;
use crate::format::config::ModelConfig;
use crate::kernels::backend::Backend;
use crate::kernels::rms_norm::rms_norm;
use crate::model::attention_residuals::ResidualStream;
use crate::model::pass::{Pass, check_finite};
use crate::model::router::Route;
use crate::model::state::AttentionState;
use crate::model::weights::{AttentionWeights, FeedForwardWeights, LayerWeights};
use crate::model::{dense_ffn, gated_mla, kda, latent_moe};

/// Takes the chunk in `stream` through layer `layer`; returns the route of each
/// token where the layer has experts.
///
/// # Errors
/// [`crate::Error::Io`] when weights cannot be read,
/// [`crate::Error::NumericalFault`] when the result is not finite.
pub fn forward(
    config: &ModelConfig,
    layer: usize,
    weights: &LayerWeights,
    state: &mut AttentionState,
    stream: &mut ResidualStream,
    pass: &mut Pass<'_>,
) -> Result<Option<Vec<Route>>> {
    let epsilon = config.norm_epsilon;
    let [attention_mix, feed_forward_mix] = match &weights.mixes {
        Some([first, second]) => [Some(first), Some(second)],
        None => [None, None],
    };
    let x = stream.gather(pass.backend, attention_mix, epsilon);
    stream.begin_layer(layer);
    let x = normed(pass.backend, x, &weights.attention_norm, epsilon);
    let attended = match (&weights.attention, state) {
        (AttentionWeights::Kda(weights), AttentionState::Kda(state)) => {
            let config = config.kda.as_ref().expect("a config with KDA layers has their section");
            kda::forward(config, weights, epsilon, state, &x, pass)?
        }
        (AttentionWeights::Mla(weights), AttentionState::Mla(cache)) => {
            let config = config.mla.as_ref().expect("a config with MLA layers has their section");
            gated_mla::forward(config, weights, cache, &x, pass)?
        }
        _ => unreachable!("weights and state are built from the same config"),
    };
    stream.add(attended);

    let y = stream.gather(pass.backend, feed_forward_mix, epsilon);
    let y = normed(pass.backend, y, &weights.feed_forward_norm, epsilon);
    let (transformed, routes) = match &weights.feed_forward {
        FeedForwardWeights::Dense(mlp) => {
            (dense_ffn::forward(config.activation, mlp, &y, pass)?, None)
        }
        FeedForwardWeights::Experts(weights) => {
            let moe = config.moe.as_ref().expect("a config with expert layers has their section");
            let (out, routes) = latent_moe::forward(config, moe, layer, weights, &y, pass)?;
            (out, Some(routes))
        }
    };
    stream.add(transformed);
    check_finite(stream.current(), || format!("the output of layer {layer}"))?;
    Ok(routes)
}

/// Root-mean-square norm of every token.
fn normed(backend: Backend, x: Vec<f32>, gain: &[f32], epsilon: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for (x, out) in x.chunks_exact(gain.len()).zip(out.chunks_exact_mut(gain.len())) {
        rms_norm(backend, x, gain, epsilon, out);
    }
    out
}
