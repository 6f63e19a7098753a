//! The product with a transposed matrix: chains run over rows, columns side by
//! side in registers.

use std::arch::x86_64::*;

use crate::kernels::avx2::panel::SCRATCH;
use crate::kernels::matrix::Matrix;
use crate::kernels::scalar::{CHAIN, LANES, SUMMED};

/// See [`crate::kernels::scalar::weighted_sum`], whose bits these are.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn weighted_sum(matrix: Matrix<'_>, factors: &[f32], tokens: usize, out: &mut [f32]) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert!(factors.len() == tokens * rows && out.len() == tokens * columns);
    let padded = columns.next_multiple_of(LANES);
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.panel.clear();
        scratch.panel.resize(CHAIN * padded, 0.0);
        scratch.sums.clear();
        scratch.sums.resize(tokens * padded, 0.0);
        scratch.wide.clear();
        scratch.wide.resize(tokens * padded, 0.0);
        for first in (0..rows).step_by(CHAIN) {
            let count = CHAIN.min(rows - first);
            for i in 0..count {
                let row = &mut scratch.panel[i * padded..][..columns];
                matrix.decode(first + i, 0, row);
            }
            let block = Block { panel: &scratch.panel, padded, count, factors, first, rows };
            block.multiply(tokens, &mut scratch.sums);
            if (first / CHAIN + 1).is_multiple_of(SUMMED) || first + count == rows {
                fold_columns(&mut scratch.sums, &mut scratch.wide);
            }
        }
        for (token, out) in out.chunks_exact_mut(columns.max(1)).enumerate() {
            for (out, wide) in out.iter_mut().zip(&scratch.wide[token * padded..]) {
                *out = *wide as f32;
            }
        }
    });
}

/// Moves the float32 sums into the float64 ones.
pub(in crate::kernels) fn fold_columns(sums: &mut [f32], wide: &mut [f64]) {
    for (wide, sum) in wide.iter_mut().zip(sums) {
        *wide += f64::from(*sum);
        *sum = 0.0;
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
    #[target_feature(enable = "avx2,fma")]
    fn multiply(&self, tokens: usize, sums: &mut [f32]) {
        for token in (0..tokens).step_by(3) {
            let mut column = 0;
            while column + 4 * LANES <= self.padded {
                match tokens - token {
                    3.. => self.corner::<3, 4>(token, column, sums),
                    2 => self.corner::<2, 4>(token, column, sums),
                    _ => self.corner::<1, 4>(token, column, sums),
                }
                column += 4 * LANES;
            }
            while column < self.padded {
                for token in token..tokens.min(token + 3) {
                    self.corner::<1, 1>(token, column, sums);
                }
                column += LANES;
            }
        }
    }

    /// The chains of `T` tokens in `C` registers of columns.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn corner<const T: usize, const C: usize>(
        &self,
        token: usize,
        column: usize,
        sums: &mut [f32],
    ) {
        let Block { panel, padded, count, factors, first, rows } = *self;
        assert!(count <= CHAIN && column + C * LANES <= padded && count * padded <= panel.len());
        assert!(first + count <= rows && (token + T) * rows <= factors.len());
        assert!((token + T) * padded <= sums.len());
        let mut chains = [[_mm256_setzero_ps(); C]; T];
        for i in 0..count {
            let row: [__m256; C] = std::array::from_fn(|c| {
                // SAFETY: by the first assertion these columns are in row `i`.
                unsafe { _mm256_loadu_ps(panel.as_ptr().add(i * padded + column + c * LANES)) }
            });
            for (t, chains) in chains.iter_mut().enumerate() {
                // SAFETY: the second assertion.
                let factor = unsafe { factors.get_unchecked((token + t) * rows + first + i) };
                let factor = _mm256_broadcast_ss(factor);
                for (chain, row) in chains.iter_mut().zip(row) {
                    *chain = _mm256_fmadd_ps(factor, row, *chain);
                }
            }
        }
        for (t, chains) in chains.into_iter().enumerate() {
            for (c, chain) in chains.into_iter().enumerate() {
                let place = (token + t) * padded + column + c * LANES;
                // SAFETY: by the third assertion the token's columns are in `sums`.
                unsafe {
                    let sums = sums.as_mut_ptr().add(place);
                    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_loadu_ps(sums), chain));
                }
            }
        }
    }
}
