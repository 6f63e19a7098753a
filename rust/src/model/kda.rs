//! Kimi Delta Attention over a chunk, head by head.
//!
//! Source: arXiv 2510.26692. The decay is the "safe gate" of the release,
//! `g = bound * sigmoid(exp(A_log) * (z + dt_bias))` with one `A_log` per
//! *head*, or `-exp(A_log) * softplus(z + dt_bias)` where the config has no bound.

use rayon::prelude::*;

use crate::error::Result;
use crate::format::config::KdaConfig;
use crate::kernels::backend::{Backend, for_each_backend};
use crate::kernels::math::{exp, sigmoid, softplus};
use crate::kernels::rms_norm::{lane_sum, rms_norm_in_place};
use crate::kernels::situ_glu::sigmoid_gate;
use crate::model::delta_rule::delta_rule;
use crate::model::pass::Pass;
use crate::model::short_conv::short_conv;
use crate::model::state::HeadState;
use crate::model::weights::KdaWeights;

/// Inside the root of the norm of queries and keys; not the config's epsilon.
const UNIT_NORM_EPSILON: f64 = 1e-6;

/// `x` `[tokens, hidden]`, normalised, to the attention's output of that shape.
///
/// # Errors
/// [`crate::Error::Io`] when a tile cannot be read.
pub fn forward(
    config: &KdaConfig,
    weights: &KdaWeights,
    norm_epsilon: f32,
    state: &mut [HeadState],
    x: &[f32],
    pass: &mut Pass<'_>,
) -> Result<Vec<f32>> {
    let [query, key, value] = &weights.projections;
    let inputs = [pass.matmul(query, x)?, pass.matmul(key, x)?, pass.matmul(value, x)?];
    let decay = pass.matmul(&weights.decay[0], x)?;
    let decay = pass.matmul(&weights.decay[1], &decay)?;
    let beta = pass.matmul(&weights.beta, x)?;
    let mut gate = pass.matmul(&weights.gate[0], x)?;
    if let Some(second) = weights.gate.get(1) {
        gate = pass.matmul(second, &gate)?;
    }
    let chunk = Chunk { config, weights, norm_epsilon, inputs, decay, beta, gate };
    let (tokens, backend) = (pass.tokens, pass.backend);
    let heads: Vec<Vec<f32>> = state
        .par_iter_mut()
        .enumerate()
        .map(|(head, state)| chunk.head(head, state, tokens, backend))
        .collect();
    let mut out = vec![0.0; tokens * config.width()];
    for (head, values) in heads.iter().enumerate() {
        for (token, values) in values.chunks_exact(config.head_dim).enumerate() {
            let start = token * config.width() + head * config.head_dim;
            out[start..start + config.head_dim].copy_from_slice(values);
        }
    }
    pass.matmul(&weights.output, &out)
}

/// Projections of a chunk: `inputs` (query, key, value), `decay` and `gate`
/// `[tokens, P]`, `beta` `[tokens, heads]`.
struct Chunk<'a> {
    config: &'a KdaConfig,
    weights: &'a KdaWeights,
    norm_epsilon: f32,
    inputs: [Vec<f32>; 3],
    decay: Vec<f32>,
    beta: Vec<f32>,
    gate: Vec<f32>,
}

impl Chunk<'_> {
    /// All tokens of one head, its state staying in cache: `[tokens, d]`.
    fn head(
        &self,
        head: usize,
        state: &mut HeadState,
        tokens: usize,
        backend: Backend,
    ) -> Vec<f32> {
        let (dim, width) = (self.config.head_dim, self.config.width());
        let kernel_length = self.config.conv_taps * dim;
        let history_length = kernel_length - dim;
        let bias = &self.weights.decay_bias[head * dim..][..dim];
        let rate = self.weights.decay_rate[head];
        let mut convolved: [Vec<f32>; 3] = std::array::from_fn(|_| vec![0.0; dim]);
        let mut decay = vec![0.0; dim];
        let mut out = vec![0.0; tokens * dim];
        for (token, out) in out.chunks_exact_mut(dim).enumerate() {
            let start = token * width + head * dim;
            for (which, convolved) in convolved.iter_mut().enumerate() {
                let kernel = &self.weights.convolutions[which][head * kernel_length..];
                let history = &mut state.history[which * history_length..][..history_length];
                let input = &self.inputs[which][start..start + dim];
                short_conv(backend, &kernel[..kernel_length], history, input, convolved);
            }
            let [query, key, value] = &mut convolved;
            unit_norm(backend, query, 1.0 / (dim as f64).sqrt());
            unit_norm(backend, key, 1.0);
            let z = &self.decay[start..start + dim];
            decay_factors(backend, z, bias, rate, self.config.gate_lower_bound, &mut decay);
            let beta = sigmoid(f64::from(self.beta[token * self.config.heads + head])) as f32;
            delta_rule(backend, &mut state.matrix, query, key, value, &decay, beta, out);
            rms_norm_in_place(backend, out, &self.weights.output_norm, self.norm_epsilon);
            sigmoid_gate(backend, out, &self.gate[start..start + dim]);
        }
        out
    }
}

for_each_backend! {
    /// `x = factor * x / sqrt(sum(x^2) + 1e-6)`: a sum, not a mean.
    pub(crate) fn unit_norm(x: &mut [f32], factor: f64) {
        let squares = lane_sum(x.len(), |i| f64::from(x[i]) * f64::from(x[i]));
        let scale = factor / (squares + UNIT_NORM_EPSILON).sqrt();
        for x in x {
            *x = (f64::from(*x) * scale) as f32;
        }
    }
}

for_each_backend! {
    /// `e^g` per channel, `g` the log decay of this token.
    pub(crate) fn decay_factors(
        z: &[f32],
        bias: &[f32],
        rate: f64,
        lower_bound: Option<f32>,
        out: &mut [f32],
    ) {
        match lower_bound.map(f64::from) {
            Some(bound) => {
                for ((out, z), bias) in out.iter_mut().zip(z).zip(bias) {
                    *out = exp(bound * sigmoid(rate * (f64::from(*z) + f64::from(*bias)))) as f32;
                }
            }
            None => {
                for ((out, z), bias) in out.iter_mut().zip(z).zip(bias) {
                    *out = exp(-rate * softplus(f64::from(*z) + f64::from(*bias))) as f32;
                }
            }
        }
    }
}
