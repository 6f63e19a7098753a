//! The truth: what every sum of products in k3rs is, to the bit.
//!
//! # The contract of a sum
//!
//! `dot(w, x)` over `K` columns:
//!
//! 1. every stored weight is widened to float32, exactly, an MXFP4 value without its
//!    scale; weights and `x` are put into the order in which the kernels meet
//!    them ([`bf16::ARRANGED`], [`mxfp4::ARRANGED`], float32 as it is) and filled
//!    up with zeros;
//! 2. these places are cut into blocks of [`BLOCK`] = 256; inside a block place `p`
//!    belongs to lane `p % 8`, and each lane is one chain of fused multiply-adds in
//!    float32, from +0: [`CHAIN`] = 32 steps;
//! 3. `sum[lane] = fma(scale, chain[lane], sum[lane])` in float32, from +0, over
//!    [`SUMMED`] = 16 blocks. The scale of MXFP4 is that of the lane's group, of
//!    which the chain has all 32 columns, that of a missing group 1; bfloat16 and
//!    float32 have none, which is a scale of 1;
//! 4. after so many blocks, and at the end, these sums are folded into four float64
//!    sums, `wide[j] += sum[j] + sum[j + 4]`, and start again from +0;
//! 5. the result is `(wide[0] + wide[2]) + (wide[1] + wide[3])`, rounded once
//!    to float32.
//!
//! Eight lanes are one AVX2 register (half an AVX-512 one, two of NEON), and a row
//! gives one chain a register, so that rows and tokens multiplied together keep the
//! FMA units busy without a word in the result. Three levels of sums hold the
//! rounding error at about 1.4e-7 of the result's root mean square at any `K`
//! (`tests/kernel_accuracy.rs` measures it; eight chains over all of `K` would
//! give 4e-7 at 3,584 columns and 1.1e-6 at 33,792), and cost one operation for 32
//! multiply-adds.
//!
//! # The contract of a weighted sum
//!
//! `weighted_sum`, the product with a transposed matrix, runs its chains over
//! rows: each column is one chain of [`CHAIN`] rows, [`SUMMED`] of which are added up
//! in float32, from +0, before they are added to one float64 sum.

use crate::kernels::bf16;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::{self, GROUP, LANE_GROUPS, SCALE_ONE};

/// Version of the arithmetic: of every order of operations that the bits of a
/// logit depend on, here and in the model. A saved session continues only
/// under the version that it was made with.
pub const CONTRACT: u32 = 3;

/// Lanes of a block.
pub const LANES: usize = 8;

/// Steps of a chain of fused multiply-adds.
pub const CHAIN: usize = 32;

/// Columns of a block: a chain of each lane.
pub const BLOCK: usize = LANES * CHAIN;

/// Chains that are added up in float32 before they are folded into float64.
pub const SUMMED: usize = 16;

/// `out[row, token] = dot(matrix[row], x[token])`.
///
/// Shapes: `x` is `[tokens, columns]`, arranged as `matrix` wants it
/// ([`Matrix::arranged`]), `out` is `[rows, tokens]`. The order inside a sum is
/// the contract of this module.
///
/// # Panics
/// If the lengths do not agree with the shape of `matrix`.
pub fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    assert!(x.len() == tokens * matrix.arranged_columns() && out.len() == matrix.rows() * tokens);
    let places = matrix.arranged_columns();
    let mut row_weights = ArrangedRow::of_width(places);
    for (row, out) in out.chunks_exact_mut(tokens.max(1)).enumerate() {
        row_weights.read(matrix, row);
        for (token, out) in out.iter_mut().enumerate() {
            *out = row_weights.dot(&x[token * places..][..places]);
        }
    }
}

/// One row of weights in the order of its products.
struct ArrangedRow {
    /// In column order, before they are arranged.
    columns: Vec<f32>,
    /// Without their scales.
    values: Vec<f32>,
    /// Of each lane of each block.
    scales: Vec<[f32; LANES]>,
}

impl ArrangedRow {
    fn of_width(places: usize) -> Self {
        ArrangedRow {
            columns: Vec::new(),
            values: vec![0.0; places],
            scales: vec![[1.0; LANES]; places.div_ceil(BLOCK)],
        }
    }

    fn read(&mut self, matrix: Matrix<'_>, row: usize) {
        let columns = matrix.columns();
        match matrix.weights() {
            Weights::Bf16(_) => {
                self.columns.resize(columns, 0.0);
                matrix.decode(row, 0, &mut self.columns);
                bf16::arrange(&self.columns, &mut self.values);
            }
            Weights::F32(_) => matrix.decode(row, 0, &mut self.values[..columns]),
            Weights::Mxfp4 { packed, scales } => {
                let packed = packed[row * columns / 2..].as_chunks().0;
                self.columns.resize(columns, 0.0);
                for (packed, values) in packed.iter().zip(self.columns.as_chunks_mut().0) {
                    mxfp4::decode_group(packed, SCALE_ONE, values);
                }
                mxfp4::arrange(&self.columns, &mut self.values);
                let scales = &scales[row * columns / GROUP..][..columns / GROUP];
                for (scales, lanes) in scales.chunks(LANES).zip(&mut self.scales) {
                    *lanes = LANE_GROUPS
                        .map(|group| scales.get(group).map_or(1.0, |byte| mxfp4::scale(*byte)));
                }
            }
        }
    }

    fn dot(&self, x: &[f32]) -> f32 {
        let mut wide = [0.0; 4];
        let blocks: Vec<_> = self.values.chunks(BLOCK).zip(x.chunks(BLOCK)).collect();
        for (blocks, scales) in blocks.chunks(SUMMED).zip(self.scales.chunks(SUMMED)) {
            let mut sums = [0.0; LANES];
            for ((values, x), scales) in blocks.iter().zip(scales) {
                let chains = block_chains(values, x);
                for ((sum, chain), scale) in sums.iter_mut().zip(chains).zip(scales) {
                    *sum = scale.mul_add(chain, *sum);
                }
            }
            for (j, wide) in wide.iter_mut().enumerate() {
                *wide += f64::from(sums[j]) + f64::from(sums[j + 4]);
            }
        }
        ((wide[0] + wide[2]) + (wide[1] + wide[3])) as f32
    }
}

/// `out[token] = sum over rows of factors[token, row] * matrix[row]`.
///
/// Shapes: `factors` is `[tokens, rows]`, `out` is `[tokens, columns]`.
///
/// # Panics
/// If the lengths do not agree with the shape of `matrix`.
pub fn weighted_sum(matrix: Matrix<'_>, factors: &[f32], tokens: usize, out: &mut [f32]) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert!(factors.len() == tokens * rows && out.len() == tokens * columns);
    let mut decoded = vec![0.0; CHAIN.min(rows) * columns];
    let mut sums = vec![0.0; tokens * columns];
    let mut wide = vec![0.0; tokens * columns];
    for first in (0..rows).step_by(CHAIN) {
        let count = CHAIN.min(rows - first);
        for (i, row) in decoded.chunks_exact_mut(columns.max(1)).take(count).enumerate() {
            matrix.decode(first + i, 0, row);
        }
        for token in 0..tokens {
            let factors = &factors[token * rows + first..][..count];
            for column in 0..columns {
                let mut chain = 0.0f32;
                for (i, factor) in factors.iter().enumerate() {
                    chain = factor.mul_add(decoded[i * columns + column], chain);
                }
                sums[token * columns + column] += chain;
            }
        }
        let chains = first / CHAIN + 1;
        if chains.is_multiple_of(SUMMED) || first + count == rows {
            for (wide, sum) in wide.iter_mut().zip(&mut sums) {
                *wide += f64::from(*sum);
                *sum = 0.0;
            }
        }
    }
    for (out, wide) in out.iter_mut().zip(&wide) {
        *out = *wide as f32;
    }
}

/// The eight chains of at most [`BLOCK`] places.
fn block_chains(weights: &[f32], x: &[f32]) -> [f32; LANES] {
    let mut chains = [0.0f32; LANES];
    for (place, (weight, x)) in weights.iter().zip(x).enumerate() {
        let chain = &mut chains[place % LANES];
        *chain = weight.mul_add(*x, *chain);
    }
    chains
}
