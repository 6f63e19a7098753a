//! AVX2 and FMA: the contracts of `scalar`, eight lanes to a register.
//!
//! Few tokens: stored weights are decoded in registers. Many tokens: a panel of
//! rows is decoded once into floats that stay in a cache and is multiplied with all
//! tokens. Both follow the same chains, so a token's bits do
//! not depend on its company.
#![allow(unsafe_code)]

pub(super) mod mxfp4;
pub(super) mod panel;
pub(super) mod plain;
pub(super) mod weighted_sum;

use std::arch::x86_64::*;

use crate::kernels::matrix::{Matrix, Weights};
pub(crate) use weighted_sum::weighted_sum;

/// Tokens up to which decoding the weights in registers, once for every three of
/// them, costs less than a panel.
const FEW_PLAIN: usize = 8;
const FEW_MXFP4: usize = 2;

/// See [`crate::kernels::scalar::dot_rows`], whose bits these are.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    assert!(x.len() == tokens * matrix.arranged_columns() && out.len() == matrix.rows() * tokens);
    match (tokens, matrix.weights()) {
        (0, _) => {}
        (1..=FEW_PLAIN, Weights::Bf16(bytes)) => {
            plain::dot_rows::<plain::Bf16Row>(bytes, matrix.columns(), x, tokens, out)
        }
        (1..=FEW_PLAIN, Weights::F32(bytes)) => {
            plain::dot_rows::<plain::F32Row>(bytes, matrix.columns(), x, tokens, out)
        }
        (1..=FEW_MXFP4, Weights::Mxfp4 { .. }) => mxfp4::dot_rows(matrix, x, tokens, out),
        _ => panel::dot_rows(matrix, x, tokens, out),
    }
}

/// `wide[j] += lane[j] + lane[j + 4]` in float64.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn fold(lanes: __m256, wide: __m256d) -> __m256d {
    let low = _mm256_cvtps_pd(_mm256_castps256_ps128(lanes));
    let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(lanes));
    _mm256_add_pd(wide, _mm256_add_pd(low, high))
}

/// `(wide[0] + wide[2]) + (wide[1] + wide[3])`, rounded to float32.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn total(wide: __m256d) -> f32 {
    let pairs = _mm_add_pd(_mm256_castpd256_pd128(wide), _mm256_extractf128_pd::<1>(wide));
    _mm_cvtsd_f64(_mm_add_sd(pairs, _mm_unpackhi_pd(pairs, pairs))) as f32
}
