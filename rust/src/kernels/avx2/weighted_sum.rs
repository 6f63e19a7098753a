//! The product with a transposed matrix: chains run over rows, columns side by
//! side in registers.

use std::arch::x86_64::*;

use crate::kernels::avx2::panel::SCRATCH;
use crate::kernels::matrix::Matrix;
use crate::kernels::scalar::{CHAIN, LANES};

/// See [`crate::kernels::scalar::weighted_sum`], whose bits these are.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn weighted_sum(matrix: Matrix<'_>, factors: &[f32], tokens: usize, out: &mut [f32]) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert!(factors.len() == tokens * rows && out.len() == tokens * columns);
    let padded = columns.next_multiple_of(LANES);
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.panel.clear();
        scratch.panel.resize(CHAIN * padded, 0.0);
        scratch.wide.clear();
        scratch.wide.resize(tokens * padded, 0.0);
        for first in (0..rows).step_by(CHAIN) {
            let count = CHAIN.min(rows - first);
            for i in 0..count {
                let row = &mut scratch.panel[i * padded..][..columns];
                matrix.decode(first + i, 0, row);
            }
            for token in 0..tokens {
                let factors = &factors[token * rows + first..][..count];
                let wide = &mut scratch.wide[token * padded..][..padded];
                add_chains(factors, &scratch.panel, wide);
            }
        }
        for (token, out) in out.chunks_exact_mut(columns.max(1)).enumerate() {
            for (out, wide) in out.iter_mut().zip(&scratch.wide[token * padded..]) {
                *out = *wide as f32;
            }
        }
    });
}

/// One chain a column over `factors.len()` rows of `panel`, folded into `wide`.
#[target_feature(enable = "avx2,fma")]
fn add_chains(factors: &[f32], panel: &[f32], wide: &mut [f64]) {
    let padded = wide.len();
    assert!(factors.len() * padded <= panel.len());
    for column in (0..padded).step_by(LANES) {
        let mut chain = _mm256_setzero_ps();
        for (i, factor) in factors.iter().enumerate() {
            // SAFETY: `padded` is whole lanes and row `i` is inside the panel.
            let row = unsafe { _mm256_loadu_ps(panel.as_ptr().add(i * padded + column)) };
            chain = _mm256_fmadd_ps(_mm256_set1_ps(*factor), row, chain);
        }
        let halves = [_mm256_castps256_ps128(chain), _mm256_extractf128_ps::<1>(chain)];
        for (half, chain) in halves.into_iter().enumerate() {
            // SAFETY: `column + 8 <= padded`, the length of `wide`.
            unsafe {
                let wide = wide.as_mut_ptr().add(column + half * 4);
                let sum = _mm256_add_pd(_mm256_loadu_pd(wide), _mm256_cvtps_pd(chain));
                _mm256_storeu_pd(wide, sum);
            }
        }
    }
}
