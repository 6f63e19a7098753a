//! AVX-512: the contracts of `scalar`, two rows to a register, eight lanes each.
//!
//! Only what is bound by arithmetic is here: MXFP4, panels for several tokens, and
//! weighted sums, whose columns fill registers.
//! bfloat16 and float32 with one or two tokens wait for memory: AVX2 is enough.
#![allow(unsafe_code)]

mod mxfp4;
mod panel;
mod plain;
mod weighted_sum;

use std::arch::x86_64::*;

use crate::kernels::avx2;
use crate::kernels::matrix::{Matrix, Weights};
pub(crate) use weighted_sum::weighted_sum;

/// Tokens up to which decoding the weights in registers costs less than a panel.
const FEW_PLAIN: usize = 2;
const FEW_MXFP4: usize = 8;

/// See [`crate::kernels::scalar::dot_rows`], whose bits these are.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    assert!(x.len() == tokens * matrix.arranged_columns() && out.len() == matrix.rows() * tokens);
    match (tokens, matrix.weights()) {
        (0, _) => {}
        (1..=FEW_PLAIN, Weights::Bf16(_) | Weights::F32(_)) => {
            avx2::dot_rows(matrix, x, tokens, out);
        }
        (1..=FEW_MXFP4, Weights::Mxfp4 { .. }) => mxfp4::dot_rows(matrix, x, tokens, out),
        _ => panel::dot_rows(matrix, x, tokens, out),
    }
}

/// `wide[r, j] += lane[r, j] + lane[r, j + 4]` in float64, for both rows `r`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fold(lanes: __m512, wide: __m512d) -> __m512d {
    let first = _mm512_cvtps_pd(_mm512_castps512_ps256(lanes));
    let second = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(lanes));
    let low = _mm512_shuffle_f64x2::<0x44>(first, second);
    let high = _mm512_shuffle_f64x2::<0xee>(first, second);
    _mm512_add_pd(wide, _mm512_add_pd(low, high))
}

/// The totals of both rows, rounded to float32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn totals(wide: __m512d) -> [f32; 2] {
    let second = _mm512_extractf64x4_pd::<1>(wide);
    [avx2::total(_mm512_castpd512_pd256(wide)), avx2::total(second)]
}

/// Both halves of a register.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn join(first: __m256, second: __m256) -> __m512 {
    _mm512_insertf32x8::<1>(_mm512_castps256_ps512(first), second)
}
