//! The product with a transposed matrix: chains run over rows, columns side by
//! side in registers.

use std::arch::x86_64::*;
use std::cell::RefCell;

use crate::kernels::avx2::weighted_sum::fold_columns;
use crate::kernels::bf16::widen_slice;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::scalar::{CHAIN, SUMMED};

/// Floats of a register.
const WIDTH: usize = 16;

/// Columns and tokens of a corner, whose sums fill the registers.
const COLUMNS: usize = 4 * WIDTH;
const TOKENS_MAX: usize = 6;

/// Buffers that are kept by each thread between calls.
#[derive(Default)]
struct Scratch {
    /// Decoded rows, `[CHAIN, padded]`.
    panel: Vec<f32>,
    /// `[tokens, padded]`.
    sums: Vec<f32>,
    /// `[tokens, padded]`.
    wide: Vec<f64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// See [`crate::kernels::scalar::weighted_sum`], whose bits these are.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn weighted_sum(matrix: Matrix<'_>, factors: &[f32], tokens: usize, out: &mut [f32]) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert!(factors.len() == tokens * rows && out.len() == tokens * columns);
    let padded = columns.next_multiple_of(WIDTH);
    SCRATCH.with_borrow_mut(|Scratch { panel, sums, wide }| {
        panel.clear();
        panel.resize(CHAIN * padded, 0.0);
        sums.clear();
        sums.resize(tokens * padded, 0.0);
        wide.clear();
        wide.resize(tokens * padded, 0.0);
        for first in (0..rows).step_by(CHAIN) {
            let count = CHAIN.min(rows - first);
            let decoded = match floats(matrix).filter(|_| columns == padded) {
                Some(floats) => &floats[first * columns..],
                None => {
                    for (i, row) in panel.chunks_exact_mut(padded.max(1)).take(count).enumerate() {
                        decode(matrix, first + i, &mut row[..columns]);
                    }
                    &panel[..]
                }
            };
            let block = Block { panel: decoded, padded, count, factors, first, rows };
            block.multiply(tokens, sums);
            if (first / CHAIN + 1).is_multiple_of(SUMMED) || first + count == rows {
                fold_columns(sums, wide);
            }
        }
        for (token, out) in out.chunks_exact_mut(columns.max(1)).enumerate() {
            for (out, wide) in out.iter_mut().zip(&wide[token * padded..]) {
                *out = *wide as f32;
            }
        }
    });
}

/// Stored floats that can be used where they are.
fn floats(matrix: Matrix<'_>) -> Option<&[f32]> {
    match matrix.weights() {
        Weights::F32(bytes) => bytemuck::try_cast_slice(bytes).ok(),
        Weights::Bf16(_) | Weights::Mxfp4 { .. } => None,
    }
}

/// [`Matrix::decode`] of a whole row.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode(matrix: Matrix<'_>, row: usize, out: &mut [f32]) {
    match matrix.weights() {
        Weights::Bf16(bytes) => {
            let columns = out.len();
            widen_slice(&bytes[row * columns * 2..][..columns * 2], out);
        }
        Weights::F32(_) | Weights::Mxfp4 { .. } => matrix.decode(row, 0, out),
    }
}

/// At most [`CHAIN`] decoded rows, and the factors of all tokens.
struct Block<'a> {
    /// `[count, padded]`.
    panel: &'a [f32],
    padded: usize,
    count: usize,
    /// `[tokens, rows]`, of which `count` from `first` on belong to the panel.
    factors: &'a [f32],
    first: usize,
    rows: usize,
}

impl Block<'_> {
    /// Adds this block to `sums`, `[tokens, padded]`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(&self, tokens: usize, sums: &mut [f32]) {
        for column in (0..self.padded).step_by(COLUMNS) {
            let mut token = 0;
            while token < tokens {
                let together = (tokens - token).min(TOKENS_MAX);
                let wide = self.padded - column >= COLUMNS;
                match together {
                    6 if wide => self.corner::<6, 4>(token, column, sums),
                    5 if wide => self.corner::<5, 4>(token, column, sums),
                    4 if wide => self.corner::<4, 4>(token, column, sums),
                    3 if wide => self.corner::<3, 4>(token, column, sums),
                    2 if wide => self.corner::<2, 4>(token, column, sums),
                    1 if wide => self.corner::<1, 4>(token, column, sums),
                    _ => {
                        for token in token..token + together {
                            for column in (column..self.padded).step_by(WIDTH) {
                                self.corner::<1, 1>(token, column, sums);
                            }
                        }
                    }
                }
                token += together;
            }
        }
    }

    /// What comes after the columns from `column` on, in its first row: one of its
    /// registers for each of the first corners, because many requests at once would
    /// wait for each other. The rows of a long cache come from far away.
    fn next(&self, corner: usize, column: usize) -> Option<*const f32> {
        let later = column + COLUMNS;
        let later = if later < self.padded { later } else { CHAIN * self.padded };
        let place = self.panel.as_ptr().wrapping_add(later + corner * WIDTH);
        (corner < COLUMNS / WIDTH).then_some(place)
    }

    /// The chains of `T` tokens in `C` registers of columns.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn corner<const T: usize, const C: usize>(
        &self,
        token: usize,
        column: usize,
        sums: &mut [f32],
    ) {
        let Block { panel, padded, count, factors, first, rows } = *self;
        assert!(count <= CHAIN && column + C * WIDTH <= padded && count * padded <= panel.len());
        assert!(first + count <= rows && (token + T) * rows <= factors.len());
        assert!((token + T) * padded <= sums.len());
        let mut chains = [[_mm512_setzero_ps(); C]; T];
        let next = self.next(token / TOKENS_MAX, column);
        for i in 0..count {
            if let Some(next) = next {
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(i * padded).cast());
            }
            let mut row = [_mm512_setzero_ps(); C];
            for (c, row) in row.iter_mut().enumerate() {
                // SAFETY: by the first assertion these columns are in row `i`.
                *row =
                    unsafe { _mm512_loadu_ps(panel.as_ptr().add(i * padded + column + c * WIDTH)) };
            }
            for (t, chains) in chains.iter_mut().enumerate() {
                // SAFETY: the second assertion.
                let factor = unsafe { factors.get_unchecked((token + t) * rows + first + i) };
                let factor = _mm512_set1_ps(*factor);
                for (chain, row) in chains.iter_mut().zip(row) {
                    *chain = _mm512_fmadd_ps(factor, row, *chain);
                }
            }
        }
        for (t, chains) in chains.into_iter().enumerate() {
            for (c, chain) in chains.into_iter().enumerate() {
                let place = (token + t) * padded + column + c * WIDTH;
                // SAFETY: by the third assertion the token's columns are in `sums`.
                unsafe {
                    let sums = sums.as_mut_ptr().add(place);
                    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_loadu_ps(sums), chain));
                }
            }
        }
    }
}
