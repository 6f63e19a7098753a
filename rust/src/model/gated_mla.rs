//! Gated multi-head latent attention, over the latents themselves.
//!
//! A head's keys and values are linear in the cached latent, so they are never
//! made: the key half of `kv_b_proj` is absorbed into the query and its value
//! half is applied to the weighted sum of latents. One position costs the same
//! few floats for all heads, and one token or many take the same steps.
//!
//! There is no rotary embedding, yet the "rope" part of query and key takes
//! part in every score and in its scale.
//!
//! **The two latent norms use an epsilon of 1e-6**, not the config's
//! `rms_norm_eps`: the published model code builds them without passing it.
//! Programs that use `rms_norm_eps` here differ visibly when latents are small.

use rayon::prelude::*;

use crate::error::Result;
use crate::format::config::MlaConfig;
use crate::kernels::backend::Backend;
use crate::kernels::matmul::{dot_rows, weighted_sum};
use crate::kernels::matrix::Matrix;
use crate::kernels::rms_norm::rms_norm_in_place;
use crate::kernels::situ_glu::sigmoid_gate;
use crate::kernels::softmax::softmax_in_place;
use crate::model::mla_cache::MlaCache;
use crate::model::pass::{Pass, check_finite};
use crate::model::weights::MlaWeights;

/// Epsilon of the two latent norms in the published code.
const LATENT_NORM_EPSILON: f32 = 1e-6;

/// Queries (heads times tokens) that share one pass over the cache.
pub const QUERIES_MAX: usize = 48;

/// Positions whose scores are made together, so that their latents and the products' sums
/// stay in the second-level cache.
pub const POSITIONS_TOGETHER: usize = 96;

/// `x` `[tokens, hidden]`, normalised, to the attention's output of that shape;
/// the chunk's latents are appended to `cache`.
///
/// # Errors
/// [`crate::Error::Io`] when a tile cannot be read,
/// [`crate::Error::NumericalFault`] when a product is not finite.
pub fn forward(
    config: &MlaConfig,
    weights: &MlaWeights,
    cache: &mut MlaCache,
    x: &[f32],
    pass: &mut Pass<'_>,
) -> Result<Vec<f32>> {
    let (tokens, backend) = (pass.tokens, pass.backend);
    let query = match &weights.query_down {
        Some((down, norm)) => {
            let mut low = pass.matmul(down, x)?;
            for low in low.chunks_exact_mut(norm.len()) {
                rms_norm_in_place(backend, low, norm, LATENT_NORM_EPSILON);
            }
            pass.matmul(&weights.query, &low)?
        }
        None => pass.matmul(&weights.query, x)?,
    };
    let mut latents = pass.matmul(&weights.latent, x)?;
    for row in latents.chunks_exact_mut(cache.width()) {
        // The norm does not cover the shared key part behind the latent.
        let latent = &mut row[..config.latent_dim];
        rms_norm_in_place(backend, latent, &weights.latent_norm, LATENT_NORM_EPSILON);
    }
    cache.append(&latents);
    let gate = weights.gate.as_ref().map(|gate| pass.matmul(gate, x)).transpose()?;
    let attention = Attention { config, cache, query: &query, tokens, backend };
    let mut out = vec![0.0; tokens * config.heads * config.value_dim];
    let head_rows = config.nope_dim + config.value_dim;
    pass.for_tiles(&weights.expansion, |first_row, tiles| {
        attention.heads(first_row / head_rows, tiles, &mut out);
    })?;
    check_finite(&out, || format!("the product with tensor `{}`", weights.expansion.name))?;
    if let Some(gate) = &gate {
        let width = config.heads * config.value_dim;
        let gates = gate.par_chunks(width);
        out.par_chunks_mut(width)
            .zip(gates)
            .for_each(|(out, gate)| sigmoid_gate(backend, out, gate));
    }
    pass.matmul(&weights.output, &out)
}

/// The queries of a chunk over a cache that has its latents.
pub(crate) struct Attention<'a> {
    pub(crate) config: &'a MlaConfig,
    pub(crate) cache: &'a MlaCache,
    /// `[tokens, heads, nope + rope]`.
    pub(crate) query: &'a [f32],
    pub(crate) tokens: usize,
    pub(crate) backend: Backend,
}

/// One head of one token.
#[derive(Clone, Copy)]
struct Query<'a> {
    head: usize,
    /// The rows of the expansion that make the head's keys and values.
    keys: Matrix<'a>,
    values: Matrix<'a>,
    token: usize,
}

impl Attention<'_> {
    /// All tokens of the heads whose keys and values `tiles` expand, from
    /// `first_head` on, into `out`, `[tokens, heads, value]`.
    pub(crate) fn heads(&self, first_head: usize, tiles: &[Matrix<'_>], out: &mut [f32]) {
        let (nope, dim) = (self.config.nope_dim, self.config.value_dim);
        let rows = nope + dim;
        let parts = tiles.iter().flat_map(|tile| {
            (0..tile.rows()).step_by(rows).map(|first| tile.row_range(first..first + rows))
        });
        let queries: Vec<Query<'_>> = parts
            .enumerate()
            .flat_map(|(index, part)| {
                let (keys, values) = (part.row_range(0..nope), part.row_range(nope..rows));
                let head = first_head + index;
                (0..self.tokens).map(move |token| Query { head, keys, values, token })
            })
            .collect();
        let share = queries.len().div_ceil(rayon::current_num_threads());
        let results: Vec<Vec<f32>> = queries
            .par_chunks(share.clamp(1, QUERIES_MAX))
            .map(|queries| self.attend(queries))
            .collect();
        let values = results.iter().flat_map(|values| values.chunks_exact(dim));
        for (query, values) in queries.iter().zip(values) {
            let start = (query.token * self.config.heads + query.head) * dim;
            out[start..start + dim].copy_from_slice(values);
        }
    }

    /// `[queries, value]`.
    fn attend(&self, queries: &[Query<'_>]) -> Vec<f32> {
        let config = self.config;
        let (width, latent) = (self.cache.width(), config.latent_dim);
        let query_dim = config.nope_dim + config.rope_dim;
        let before = self.cache.positions() - self.tokens;
        let mut absorbed = vec![0.0; queries.len() * width];
        for (query, absorbed) in queries.iter().zip(absorbed.chunks_exact_mut(width)) {
            let start = (query.token * config.heads + query.head) * query_dim;
            let (nope, rope) = self.query[start..start + query_dim].split_at(config.nope_dim);
            weighted_sum(self.backend, query.keys, nope, 1, &mut absorbed[..latent]);
            absorbed[latent..].copy_from_slice(rope);
        }
        let last = queries.iter().map(|query| query.token).max().unwrap_or(0);
        let positions = before + last + 1;
        let rows = &self.cache.rows()[..positions * width];
        let factor = 1.0 / (query_dim as f64).sqrt();
        let mut weights = vec![0.0; queries.len() * positions];
        self.scores(&absorbed, rows, &mut weights);
        for (query, weights) in queries.iter().zip(weights.chunks_exact_mut(positions)) {
            let (visible, future) = weights.split_at_mut(before + query.token + 1);
            softmax_in_place(self.backend, visible, factor);
            future.fill(0.0);
        }
        let rows = Matrix::of_floats(positions, width, rows);
        weighted_sum(self.backend, rows, &weights, queries.len(), &mut absorbed);
        let mut out = vec![0.0; queries.len() * config.value_dim];
        let outputs = out.chunks_exact_mut(config.value_dim);
        for ((query, mixed), out) in queries.iter().zip(absorbed.chunks_exact(width)).zip(outputs) {
            dot_rows(self.backend, query.values, &mixed[..latent], 1, out);
        }
        out
    }

    /// Products of all `queries` `[queries, width]` with all `rows` of the cache,
    /// `[positions, width]`, to `out`, `[queries, positions]`.
    fn scores(&self, queries: &[f32], rows: &[f32], out: &mut [f32]) {
        let width = self.cache.width();
        let (count, positions) = (queries.len() / width, rows.len() / width);
        let queries = Matrix::of_floats(count, width, queries);
        let mut part = vec![0.0; count * positions.min(POSITIONS_TOGETHER)];
        for (index, rows) in rows.chunks(POSITIONS_TOGETHER * width).enumerate() {
            let together = rows.len() / width;
            let part = &mut part[..count * together];
            dot_rows(self.backend, queries, rows, together, part);
            for (part, out) in part.chunks_exact(together).zip(out.chunks_exact_mut(positions)) {
                let first = index * POSITIONS_TOGETHER;
                out[first..first + together].copy_from_slice(part);
            }
        }
    }
}
