//! The truth: what every sum of products in k3rs is, to the bit.
//!
//! # The contract of a sum
//!
//! `dot(w, x)` over `K` columns of bfloat16 or float32:
//!
//! 1. every stored weight is widened to float32, exactly;
//! 2. columns are cut into blocks of [`BLOCK`] = 512; inside a block column `k`
//!    belongs to lane `k % 8` of float32 and to lane `k / 2 % 8` of bfloat16, whose
//!    neighbours are widened by different operations ([`bf16`]); each lane is
//!    one chain of fused multiply-adds in float32, from +0, in column order: at
//!    most 64 steps;
//! 3. at the end of a block the lanes are folded into four float64 sums:
//!    `wide[j] += lane[j] + lane[j + 4]`, all in float64;
//! 4. the result is `(wide[0] + wide[2]) + (wide[1] + wide[3])`, rounded once
//!    to float32.
//!
//! A tail counts as if it were filled up with zeros. Eight lanes are one AVX2
//! register (half an AVX-512 one, two of NEON), and a row gives one chain a
//! register, so that rows and tokens multiplied together keep the FMA units
//! busy without a word in the result. Chains of 64 steps hold the rounding
//! error at about 1.5e-7 of the result's root mean square at any `K`
//! (`tests/kernel_accuracy.rs` measures it; eight chains over all of `K` would
//! give 4e-7 at 3,584 columns and 1.1e-6 at 33,792), and let folding them cost an
//! eighth of the multiply-adds.
//!
//! # The contract of a sum over MXFP4
//!
//! Groups of 32 share a scale, and the kernels decode two of them at once, a
//! [`PAIR`] of 64 columns, in the order [`mxfp4::ARRANGED`] that leaves four lanes to each:
//!
//! 1. both `w` and `x` are put into that order, a missing group at the end of a
//!    row as zeros with a scale of 1;
//! 2. inside a pair each of the eight lanes is one chain of eight fused
//!    multiply-adds of the *unscaled* values, from +0;
//! 3. `sum[lane] = fma(scale of the lane's group, chain[lane], sum[lane])`, from
//!    +0, over at most [`SCALED`] = 8 whole pairs, or the one that is not whole;
//! 4. these sums are folded into four float64 and totalled as above.
//!
//! # The contract of a weighted sum
//!
//! `weighted_sum`, the product with a transposed matrix, runs its chains over
//! rows: blocks of [`CHAIN`] = 32 rows, one chain a column, folded into one
//! float64 sum a column.

use crate::kernels::bf16;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::{self, ARRANGED, GROUP, PAIR, VALUES, padded};

/// Version of the arithmetic: of every order of operations that the bits of a
/// logit depend on, here and in the model. A saved session continues only
/// under the version that it was made with.
pub const CONTRACT: u32 = 2;

/// Lanes of a block.
pub const LANES: usize = 8;

/// Columns of a block: 64 steps of each lane.
pub const BLOCK: usize = LANES * 64;

/// Steps of a chain of a weighted sum, and over the keys of a delta rule, before it is
/// folded into float64.
pub const CHAIN: usize = 32;

/// Pairs whose scaled chains are added up before they are folded into float64.
pub const SCALED: usize = 8;

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
    match matrix.weights() {
        Weights::Bf16(_) | Weights::F32(_) => dot_plain(matrix, x, tokens, out),
        Weights::Mxfp4 { packed, scales } => {
            dot_mxfp4(packed, scales, matrix.columns(), x, tokens, out);
        }
    }
}

fn dot_plain(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let (columns, places) = (matrix.columns(), matrix.arranged_columns());
    let mut decoded = [0.0; BLOCK];
    let mut arranged = [0.0; BLOCK];
    let mut wide = vec![[0.0; 4]; tokens];
    for row in 0..matrix.rows() {
        wide.fill([0.0; 4]);
        for first in (0..columns).step_by(BLOCK) {
            let decoded = &mut decoded[..BLOCK.min(columns - first)];
            matrix.decode(row, first, decoded);
            let weights = if let Weights::Bf16(_) = matrix.weights() {
                let arranged = &mut arranged[..BLOCK.min(places - first)];
                bf16::arrange(decoded, arranged);
                arranged
            } else {
                decoded
            };
            for (token, wide) in wide.iter_mut().enumerate() {
                let x = &x[token * places + first..][..weights.len()];
                fold(&block_lanes(weights, x), wide);
            }
        }
        for (out, wide) in out[row * tokens..].iter_mut().zip(&wide) {
            *out = total(wide);
        }
    }
}

fn dot_mxfp4(
    packed: &[u8],
    scales: &[u8],
    columns: usize,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    let places = padded(columns);
    let mut values = vec![0.0; places];
    let mut lane_scales = vec![1.0; places / PAIR * LANES];
    for row in 0..out.len() / tokens.max(1) {
        for (place, value) in values.iter_mut().enumerate() {
            let column = place - place % PAIR + ARRANGED[place % PAIR];
            if column < columns {
                let byte = packed[(row * columns + column) / 2];
                *value = VALUES
                    [usize::from(if column.is_multiple_of(2) { byte & 0x0f } else { byte >> 4 })];
            }
        }
        let groups = scales[row * columns / GROUP..][..columns / GROUP].iter();
        for (lanes, scale) in lane_scales.chunks_exact_mut(LANES / 2).zip(groups) {
            lanes.fill(mxfp4::scale(*scale));
        }
        for token in 0..tokens {
            let x = &x[token * places..][..places];
            let mut wide = [0.0; 4];
            let whole = columns / PAIR;
            let blocks = (0..whole).step_by(SCALED).map(|first| first..whole.min(first + SCALED));
            // A single group at the end.
            let single = (whole * PAIR < columns).then_some(whole..whole + 1);
            for block in blocks.chain(single) {
                let mut sums = [0.0; LANES];
                for pair in block {
                    let range = pair * PAIR..(pair + 1) * PAIR;
                    let chains = block_lanes(&values[range.clone()], &x[range]);
                    for (lane, sum) in sums.iter_mut().enumerate() {
                        *sum = lane_scales[pair * LANES + lane].mul_add(chains[lane], *sum);
                    }
                }
                fold(&sums, &mut wide);
            }
            out[row * tokens + token] = total(&wide);
        }
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
                wide[token * columns + column] += f64::from(chain);
            }
        }
    }
    for (out, wide) in out.iter_mut().zip(&wide) {
        *out = *wide as f32;
    }
}

/// The eight chains of one block of at most [`BLOCK`] columns.
fn block_lanes(weights: &[f32], x: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0f32; LANES];
    for (column, (weight, x)) in weights.iter().zip(x).enumerate() {
        let lane = &mut lanes[column % LANES];
        *lane = weight.mul_add(*x, *lane);
    }
    lanes
}

fn fold(lanes: &[f32; LANES], wide: &mut [f64; 4]) {
    for (j, wide) in wide.iter_mut().enumerate() {
        *wide += f64::from(lanes[j]) + f64::from(lanes[j + 4]);
    }
}

fn total(wide: &[f64; 4]) -> f32 {
    ((wide[0] + wide[2]) + (wide[1] + wide[3])) as f32
}
