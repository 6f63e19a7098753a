//! bfloat16 and float32 rows with few tokens: widened in registers, four rows by
//! up to three tokens at a time, each pair with a chain of its own.

use std::arch::x86_64::*;

use crate::kernels::avx2::{fold, total};
use crate::kernels::scalar::{BLOCK, LANES};

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// A plain stored form: how to widen eight columns.
pub(in crate::kernels) trait PlainRow {
    const BYTES: usize;

    /// # Safety
    /// Eight elements must be readable at `pointer`, on a CPU with AVX2.
    unsafe fn load(pointer: *const u8) -> __m256;
}

pub(in crate::kernels) struct Bf16Row;
pub(in crate::kernels) struct F32Row;

impl PlainRow for Bf16Row {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load(pointer: *const u8) -> __m256 {
        // SAFETY: the caller vouches for sixteen readable bytes.
        let stored = unsafe { _mm_loadu_si128(pointer.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(stored), 16))
    }
}

impl PlainRow for F32Row {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn load(pointer: *const u8) -> __m256 {
        // SAFETY: the caller vouches for thirty-two readable bytes.
        unsafe { _mm256_loadu_ps(pointer.cast()) }
    }
}

/// All rows of `bytes` with all tokens: `x` is `[tokens, columns]`, `out`
/// `[rows, tokens]`.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn dot_rows<Row: PlainRow>(
    bytes: &[u8],
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    let rows = Rows { bytes, x, columns: x.len() / tokens, tokens };
    let row_count = out.len() / tokens;
    for row in (0..row_count).step_by(4) {
        for token in (0..tokens).step_by(3) {
            match (row_count - row, tokens - token) {
                (4.., 3..) => rows.dot::<Row, 4, 3>(row, token, out),
                (4.., 2) => rows.dot::<Row, 4, 2>(row, token, out),
                (4.., _) => rows.dot::<Row, 4, 1>(row, token, out),
                (rest, 3..) => {
                    (0..rest).for_each(|i| rows.dot::<Row, 1, 3>(row + i, token, out));
                }
                (rest, _) => {
                    for (i, token) in (0..rest).flat_map(|i| (token..tokens).map(move |t| (i, t))) {
                        rows.dot::<Row, 1, 1>(row + i, token, out);
                    }
                }
            }
        }
    }
}

/// Stored rows and the tokens that they meet.
struct Rows<'a> {
    bytes: &'a [u8],
    /// `[tokens, columns]`.
    x: &'a [f32],
    columns: usize,
    tokens: usize,
}

impl Rows<'_> {
    /// `R` rows from `row` on by `T` tokens from `token` on, into `out`, which is
    /// `[rows, tokens]`.
    #[target_feature(enable = "avx2,fma")]
    fn dot<Row: PlainRow, const R: usize, const T: usize>(
        &self,
        row: usize,
        token: usize,
        out: &mut [f32],
    ) {
        let columns = self.columns;
        let row_bytes = columns * Row::BYTES;
        let bytes = &self.bytes[row * row_bytes..][..R * row_bytes];
        let x = &self.x[token * columns..][..T * columns];
        let mut wide = [[_mm256_setzero_pd(); T]; R];
        for first in (0..columns).step_by(BLOCK) {
            let width = BLOCK.min(columns - first);
            let mut lanes = [[_mm256_setzero_ps(); T]; R];
            for step in 0..width / LANES {
                let column = first + step * LANES;
                let x: [__m256; T] = std::array::from_fn(|t| {
                    // SAFETY: `column + 8 <= columns`, and `x` has `T` times as many.
                    unsafe { _mm256_loadu_ps(x.as_ptr().add(t * columns + column)) }
                });
                for (row, lanes) in lanes.iter_mut().enumerate() {
                    let start = row * row_bytes + column * Row::BYTES;
                    // SAFETY: the eight columns end inside row `row` of `bytes`.
                    let pointer = unsafe { bytes.as_ptr().add(start) };
                    if (step * LANES * Row::BYTES).is_multiple_of(64) {
                        _mm_prefetch::<_MM_HINT_T0>(pointer.wrapping_add(PREFETCH_BYTES).cast());
                    }
                    // SAFETY: as above.
                    let weights = unsafe { Row::load(pointer) };
                    for (lane, x) in lanes.iter_mut().zip(x) {
                        *lane = _mm256_fmadd_ps(weights, x, *lane);
                    }
                }
            }
            let tail = width % LANES;
            if tail != 0 {
                let column = first + width - tail;
                for (row, lanes) in lanes.iter_mut().enumerate() {
                    let start = row * row_bytes + column * Row::BYTES;
                    let weights = load_rest::<Row>(&bytes[start..start + tail * Row::BYTES]);
                    for (t, lane) in lanes.iter_mut().enumerate() {
                        let x = &x[t * columns + column..][..tail];
                        let x = load_rest::<F32Row>(bytemuck::cast_slice(x));
                        *lane = _mm256_fmadd_ps(weights, x, *lane);
                    }
                }
            }
            for (wide, lanes) in wide.iter_mut().zip(lanes) {
                for (wide, lane) in wide.iter_mut().zip(lanes) {
                    *wide = fold(lane, *wide);
                }
            }
        }
        for (r, wide) in wide.into_iter().enumerate() {
            for (t, wide) in wide.into_iter().enumerate() {
                out[(row + r) * self.tokens + token + t] = total(wide);
            }
        }
    }
}

/// Widens up to seven stored elements, filled up with zeros.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn load_rest<Row: PlainRow>(bytes: &[u8]) -> __m256 {
    let mut stored = [0; LANES * 4];
    stored[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: `stored` holds eight elements of the widest form.
    unsafe { Row::load(stored.as_ptr()) }
}
