//! The expert block: routed experts on a narrow latent, shared experts beside.
//!
//! The router's weight multiplies an expert's *output*, the norm is taken of
//! the weighted sum, and the shared experts are added unscaled.

use rayon::prelude::*;

use crate::error::Result;
use crate::format::config::{Activation, ModelConfig, MoeConfig};
use crate::format::expert_table::ExpertPart;
use crate::format::tensor_names;
use crate::kernels::backend::Backend;
use crate::kernels::matmul::{dot_arranged, matmul_by_rows, scatter_rows, task_rows};
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::SCALE_NAN;
use crate::kernels::rms_norm::rms_norm_in_place;
use crate::model::dense_ffn;
use crate::model::expert_schedule::{Visit, schedule};
use crate::model::pass::{Pass, check_finite};
use crate::model::router::{Route, route};
use crate::model::weights::MoeWeights;
use crate::storage::expert_cache::ExpertBytes;

/// `x` `[tokens, hidden]`, normalised, to the block's output of that shape, and
/// the route of each token.
///
/// # Errors
/// [`crate::Error::Io`] when a tile or an expert cannot be read,
/// [`crate::Error::NumericalFault`] when an expert's output is not finite.
pub fn forward(
    config: &ModelConfig,
    moe: &MoeConfig,
    layer: usize,
    weights: &MoeWeights,
    x: &[f32],
    pass: &mut Pass<'_>,
) -> Result<(Vec<f32>, Vec<Route>)> {
    let (tokens, backend) = (pass.tokens, pass.backend);
    let logits = pass.matmul(&weights.router, x)?;
    let routes: Vec<Route> = logits
        .chunks_exact(moe.experts)
        .map(|logits| route(moe, logits, &weights.router_bias))
        .collect();
    let visits = schedule(&routes);
    let wanted: Vec<usize> = visits.iter().map(|visit| visit.expert).collect();
    let batch = pass.experts.request(layer, &wanted);

    // While the experts are read:
    let latent = weights.latent.as_ref().map(|[down, _]| pass.matmul(down, x)).transpose()?;
    let shared = weights.shared.as_ref();
    let shared =
        shared.map(|mlp| dense_ffn::forward(config.activation, mlp, x, pass)).transpose()?;

    let width = moe.latent_dim.unwrap_or(config.hidden_size);
    let activation = config.activation;
    let experts = Experts { moe, weights, layer, width, activation, backend };
    let mut outputs = vec![0.0; tokens * moe.experts_per_token * width];
    let latent = latent.as_deref().unwrap_or(x);
    pass.experts.finish(batch, |expert, bytes| {
        let visit = visits.binary_search_by_key(&expert, |visit| visit.expert);
        let visit = visit.expect("the cache hands out what was asked for");
        experts.visit(&visits[visit], bytes, latent, &mut outputs)
    })?;

    let mut sum = experts.weighted_sum(&routes, &outputs);
    if let Some(norm) = &weights.latent_norm {
        for sum in sum.chunks_exact_mut(width) {
            rms_norm_in_place(backend, sum, norm, config.norm_epsilon);
        }
    }
    let mut out = match &weights.latent {
        Some([_, up]) => pass.matmul(up, &sum)?,
        None => sum,
    };
    if let Some(shared) = shared {
        for (out, shared) in out.iter_mut().zip(shared) {
            *out += shared;
        }
    }
    Ok((out, routes))
}

/// The routed experts of one layer and chunk.
struct Experts<'a> {
    moe: &'a MoeConfig,
    weights: &'a MoeWeights,
    layer: usize,
    /// What an expert reads and writes.
    width: usize,
    activation: Activation,
    backend: Backend,
}

impl Experts<'_> {
    /// One expert for all tokens that want it: its output for the token's rank
    /// `r` goes to row `token * experts_per_token + r` of `outputs`.
    fn visit(
        &self,
        visit: &Visit,
        bytes: ExpertBytes<'_>,
        latent: &[f32],
        outputs: &mut [f32],
    ) -> Result<()> {
        let (inner, width, users) = (self.moe.expert_width, self.width, visit.users.len());
        let [gate, gate_scale, down, down_scale, up, up_scale] = bytes;
        let matrix = |rows, columns, packed, scales| {
            Matrix::new(rows, columns, Weights::Mxfp4 { packed, scales })
        };
        let gate = matrix(inner, width, gate, gate_scale);
        let up = matrix(inner, width, up, up_scale);
        let down = matrix(width, inner, down, down_scale);

        let inputs: Vec<&[f32]> =
            visit.users.iter().map(|(token, _)| &latent[token * width..][..width]).collect();
        let located = || self.fault_location(visit.expert, &bytes);
        let activated = self.gate_up(gate, up, &inputs.concat(), users, &located)?;
        let mut by_rows = vec![0.0; width * users];
        matmul_by_rows(self.backend, &[down], &activated, users, &mut by_rows);
        check_finite(&by_rows, located)?;
        for (user, (token, rank)) in visit.users.iter().enumerate() {
            let row = token * self.moe.experts_per_token + rank;
            for (i, out) in outputs[row * width..(row + 1) * width].iter_mut().enumerate() {
                *out = by_rows[i * users + user];
            }
        }
        Ok(())
    }

    /// `activation(gate x, up x)`, `[users, inner]`. Gate and up rows are
    /// multiplied in one task, so the activation costs no pass of its own.
    fn gate_up(
        &self,
        gate: Matrix<'_>,
        up: Matrix<'_>,
        x: &[f32],
        users: usize,
        located: &(impl Fn() -> String + Sync),
    ) -> Result<Vec<f32>> {
        let inner = self.moe.expert_width;
        let rows = task_rows(gate, users).div_ceil(2).next_multiple_of(16);
        let x = &gate.arranged(x);
        let mut by_rows = vec![0.0; inner * users];
        by_rows.par_chunks_mut(rows * users).enumerate().try_for_each(|(task, gated)| {
            let first = task * rows;
            let last = first + gated.len() / users;
            let mut lifted = vec![0.0; gated.len()];
            dot_arranged(self.backend, gate.row_range(first..last), x, users, gated);
            dot_arranged(self.backend, up.row_range(first..last), x, users, &mut lifted);
            // Before the activation, which saturates and would hide an infinity.
            check_finite(gated, located)?;
            check_finite(&lifted, located)?;
            dense_ffn::activate(self.backend, self.activation, gated, &lifted);
            Ok(())
        })?;
        if users == 1 {
            return Ok(by_rows);
        }
        let mut out = vec![0.0; users * inner];
        scatter_rows(&by_rows, users, &mut out, inner, 0);
        Ok(out)
    }

    /// Adds the experts' outputs in the order of their ids, in float64, so that
    /// the order in which they were read leaves no trace: `[tokens, width]`.
    fn weighted_sum(&self, routes: &[Route], outputs: &[f32]) -> Vec<f32> {
        let width = self.width;
        let mut sum = vec![0.0; routes.len() * width];
        sum.par_chunks_mut(width).enumerate().for_each(|(token, sum)| {
            let first = token * self.moe.experts_per_token;
            for (i, sum) in sum.iter_mut().enumerate() {
                let ranks = routes[token].weights.iter().enumerate();
                let terms = ranks.map(|(rank, weight)| {
                    f64::from(*weight) * f64::from(outputs[(first + rank) * width + i])
                });
                *sum = terms.sum::<f64>() as f32;
            }
        });
        sum
    }

    /// The tensor that holds a scale of 255, which the format defines as NaN;
    /// or just the expert, when its scales are in order.
    fn fault_location(&self, expert: usize, bytes: &ExpertBytes<'_>) -> String {
        let name = |part| tensor_names::expert(self.layer, expert, part);
        let prefix = self.weights.name_prefix(self.layer);
        let broken = ExpertPart::ALL
            .into_iter()
            .zip(bytes)
            .find(|(part, bytes)| part.is_scale() && bytes.contains(&SCALE_NAN));
        match broken {
            Some((part, _)) => format!("tensor `{prefix}{}` (scale byte 255)", name(part)),
            None => format!("the products with expert {expert} of layer {}", self.layer),
        }
    }
}
