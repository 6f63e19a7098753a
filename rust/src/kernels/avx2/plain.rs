//! bfloat16 and float32 rows with one token: four rows at a time, each with a
//! chain of its own.

use std::arch::x86_64::*;

use crate::kernels::avx2::{fold, total};
use crate::kernels::scalar::{BLOCK, LANES};

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// A plain stored form: how to widen eight columns.
pub(super) trait PlainRow {
    const BYTES: usize;

    /// # Safety
    /// Eight elements must be readable at `pointer`, on a CPU with AVX2.
    unsafe fn load(pointer: *const u8) -> __m256;
}

pub(super) struct Bf16Row;
pub(super) struct F32Row;

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

/// All rows of `bytes` with one token.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot_rows<Row: PlainRow>(bytes: &[u8], x: &[f32], out: &mut [f32]) {
    let row_bytes = x.len() * Row::BYTES;
    let (fours, rest) = out.as_chunks_mut::<4>();
    let whole = fours.len() * 4;
    for (group, out) in fours.iter_mut().enumerate() {
        dot_plain::<Row, 4>(&bytes[group * 4 * row_bytes..][..4 * row_bytes], x, out);
    }
    for (row, out) in rest.iter_mut().enumerate() {
        let row = &bytes[(whole + row) * row_bytes..][..row_bytes];
        dot_plain::<Row, 1>(row, x, std::array::from_mut(out));
    }
}

/// `R` consecutive rows with one token.
#[target_feature(enable = "avx2,fma")]
fn dot_plain<Row: PlainRow, const R: usize>(bytes: &[u8], x: &[f32], out: &mut [f32; R]) {
    let columns = x.len();
    let row_bytes = columns * Row::BYTES;
    assert_eq!(bytes.len(), R * row_bytes);
    let mut wide = [_mm256_setzero_pd(); R];
    for first in (0..columns).step_by(BLOCK) {
        let width = BLOCK.min(columns - first);
        let mut lanes = [_mm256_setzero_ps(); R];
        for step in 0..width / LANES {
            let column = first + step * LANES;
            // SAFETY: `column + 8 <= columns`, the length of `x`.
            let x = unsafe { _mm256_loadu_ps(x.as_ptr().add(column)) };
            for (row, lane) in lanes.iter_mut().enumerate() {
                let start = row * row_bytes + column * Row::BYTES;
                // SAFETY: the eight columns end inside row `row` of `bytes`.
                let pointer = unsafe { bytes.as_ptr().add(start) };
                if (step * LANES * Row::BYTES).is_multiple_of(64) {
                    _mm_prefetch::<_MM_HINT_T0>(pointer.wrapping_add(PREFETCH_BYTES).cast());
                }
                // SAFETY: as above.
                let weights = unsafe { Row::load(pointer) };
                *lane = _mm256_fmadd_ps(weights, x, *lane);
            }
        }
        let tail = width % LANES;
        if tail != 0 {
            let column = first + width - tail;
            let x = load_rest::<F32Row>(bytemuck::cast_slice(&x[column..]));
            for (row, lane) in lanes.iter_mut().enumerate() {
                let start = row * row_bytes + column * Row::BYTES;
                let weights = load_rest::<Row>(&bytes[start..start + tail * Row::BYTES]);
                *lane = _mm256_fmadd_ps(weights, x, *lane);
            }
        }
        for (wide, lanes) in wide.iter_mut().zip(lanes) {
            *wide = fold(lanes, *wide);
        }
    }
    *out = wide.map(|wide| total(wide));
}

/// Widens up to seven stored elements, filled up with zeros.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn load_rest<Row: PlainRow>(bytes: &[u8]) -> __m256 {
    let mut stored = [0; LANES * 4];
    stored[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: `stored` holds eight elements of the widest form.
    unsafe { Row::load(stored.as_ptr()) }
}
