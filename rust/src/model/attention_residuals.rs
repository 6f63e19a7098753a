//! Attention residuals: instead of one residual stream, each sublayer reads a
//! softmax mix of block snapshots and the running sum since the last one.
//!
//! The mix only feeds the sublayer; it is never added to the sum. Keys are
//! normalised, values are not: neither the norm nor its gain touches them.

use rayon::prelude::*;

use crate::kernels::backend::{Backend, for_each_backend};
use crate::kernels::math::exp;
use crate::kernels::rms_norm::{inverse_rms, lane_sum};
use crate::model::weights::MixWeights;

/// The stream of a chunk: snapshots and running sum, each `[tokens, hidden]`.
/// Nothing of it is carried from token to token.
pub struct ResidualStream {
    hidden_size: usize,
    /// Layers of a block; `None` is the ordinary residual stream.
    block: Option<usize>,
    blocks: Vec<Vec<f32>>,
    current: Vec<f32>,
}

impl ResidualStream {
    /// A stream that starts with `embedded`, `[tokens, hidden]`.
    pub fn new(embedded: Vec<f32>, hidden_size: usize, block: Option<usize>) -> Self {
        ResidualStream { hidden_size, block, blocks: Vec::new(), current: embedded }
    }

    /// The running sum since the last block boundary, `[tokens, hidden]`.
    pub fn current(&self) -> &[f32] {
        &self.current
    }

    /// What a sublayer reads: the mix of all snapshots and the running sum.
    pub fn gather(&self, backend: Backend, mix: Option<&MixWeights>, epsilon: f32) -> Vec<f32> {
        let Some(mix) = mix.filter(|_| !self.blocks.is_empty()) else {
            return self.current.clone();
        };
        let width = self.hidden_size;
        let mut out = vec![0.0; self.current.len()];
        out.par_chunks_mut(width).enumerate().for_each(|(token, out)| {
            let span = token * width..(token + 1) * width;
            let sources = self.blocks.iter().chain([&self.current]);
            let sources: Vec<&[f32]> = sources.map(|source| &source[span.clone()]).collect();
            mix_sources(backend, &sources, &mix.norm, &mix.projection, epsilon, out);
        });
        out
    }

    /// At a block boundary the running sum becomes a snapshot. Comes after the
    /// layer's first [`ResidualStream::gather`], which still sees it as the sum.
    pub fn begin_layer(&mut self, layer: usize) {
        if self.block.is_some_and(|block| layer.is_multiple_of(block)) {
            self.blocks.push(std::mem::take(&mut self.current));
        }
    }

    /// Adds a sublayer's output to the running sum, or starts it anew.
    pub fn add(&mut self, update: Vec<f32>) {
        if self.current.is_empty() {
            self.current = update;
            return;
        }
        for (sum, update) in self.current.iter_mut().zip(update) {
            *sum += update;
        }
    }
}

for_each_backend! {
    /// `sum_i softmax_i(key_i . (norm * projection)) * source_i` for one token,
    /// `key_i` the normalised source.
    fn mix_sources(
        sources: &[&[f32]],
        norm: &[f32],
        projection: &[f32],
        epsilon: f32,
        out: &mut [f32],
    ) {
        let mut weights: Vec<f64> = Vec::with_capacity(sources.len());
        for source in sources {
            let product = lane_sum(source.len(), |i| {
                f64::from(source[i]) * (f64::from(norm[i]) * f64::from(projection[i]))
            });
            weights.push(product * inverse_rms(source, epsilon));
        }
        let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sum = 0.0;
        for weight in &mut weights {
            *weight = exp(*weight - largest);
            sum += *weight;
        }
        for (i, out) in out.iter_mut().enumerate() {
            let mut mixed = 0.0;
            for (weight, source) in weights.iter().zip(sources) {
                mixed += weight * f64::from(source[i]);
            }
            *out = (mixed / sum) as f32;
        }
    }
}
