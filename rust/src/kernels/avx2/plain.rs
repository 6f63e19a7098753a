//! bfloat16 and float32 rows with few tokens: widened in registers, four rows by
//! up to three tokens at a time, each pair with a chain of its own.

use std::arch::x86_64::*;

use crate::kernels::aligned::CACHE_LINE;
use crate::kernels::avx2::{fold, total};
use crate::kernels::bf16::GROUP;
use crate::kernels::scalar::{BLOCK, LANES, SUMMED};

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// A plain stored form: how to widen half a group of sixteen columns, in the order
/// in which [`crate::kernels::matrix::Matrix::arranged`] puts the other factor.
pub(in crate::kernels) trait PlainRow {
    const BYTES: usize;

    /// # Safety
    /// A group must be readable at `group`, on a CPU with AVX2.
    unsafe fn half<const HALF: usize>(group: *const u8) -> __m256;
}

pub(in crate::kernels) struct Bf16Row;
pub(in crate::kernels) struct F32Row;

impl PlainRow for Bf16Row {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn half<const HALF: usize>(group: *const u8) -> __m256 {
        // SAFETY: the caller vouches for thirty-two readable bytes.
        let stored = unsafe { _mm256_loadu_si256(group.cast()) };
        _mm256_castsi256_ps(match HALF {
            0 => _mm256_slli_epi32::<16>(stored),
            _ => _mm256_and_si256(stored, _mm256_set1_epi32(0xffff_0000_u32 as i32)),
        })
    }
}

impl PlainRow for F32Row {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn half<const HALF: usize>(group: *const u8) -> __m256 {
        // SAFETY: the caller vouches for sixty-four readable bytes.
        unsafe { _mm256_loadu_ps(group.cast::<f32>().add(HALF * LANES)) }
    }
}

/// A group whose last columns are not stored: zeros stand for them.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct LastGroup([u8; GROUP * 4]);

impl LastGroup {
    pub(in crate::kernels) fn of(stored: &[u8]) -> Self {
        let mut bytes = [0; GROUP * 4];
        bytes[..stored.len()].copy_from_slice(stored);
        LastGroup(bytes)
    }

    pub(in crate::kernels) fn as_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }
}

/// All rows of `matrix` with all tokens: `x` is arranged, `out` `[rows, tokens]`.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn dot_rows<Row: PlainRow>(
    bytes: &[u8],
    columns: usize,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    let rows = Rows { bytes, x, columns, places: x.len() / tokens, tokens };
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
    columns: usize,
    /// `[tokens, places]`.
    x: &'a [f32],
    places: usize,
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
        let row_bytes = self.columns * Row::BYTES;
        let bytes = &self.bytes[row * row_bytes..][..R * row_bytes];
        let x = &self.x[token * self.places..][..T * self.places];
        let mut wide = [[_mm256_setzero_pd(); T]; R];
        let mut sums = [[_mm256_setzero_ps(); T]; R];
        for first in (0..self.columns).step_by(BLOCK) {
            let width = BLOCK.min(self.columns - first);
            let mut lanes = [[_mm256_setzero_ps(); T]; R];
            for column in (first..first + width - width % GROUP).step_by(GROUP) {
                let groups: [*const u8; R] = std::array::from_fn(|row| {
                    // SAFETY: the sixteen columns are inside row `row` of `bytes`.
                    unsafe { bytes.as_ptr().add(row * row_bytes + column * Row::BYTES) }
                });
                if (column * Row::BYTES).is_multiple_of(CACHE_LINE) {
                    for group in groups {
                        _mm_prefetch::<_MM_HINT_T0>(group.wrapping_add(PREFETCH_BYTES).cast());
                    }
                }
                // SAFETY: as above, and the row of `x` has as many places.
                unsafe { self.group::<Row, R, T>(groups, &x[column..], &mut lanes) };
            }
            let rest = width % GROUP;
            if rest > 0 {
                let column = first + width - rest;
                let groups: [LastGroup; R] = std::array::from_fn(|row| {
                    let start = row * row_bytes + column * Row::BYTES;
                    LastGroup::of(&bytes[start..start + rest * Row::BYTES])
                });
                let groups = std::array::from_fn(|row| groups[row].as_ptr());
                // SAFETY: whole groups, and the row of `x` is filled up to one.
                unsafe { self.group::<Row, R, T>(groups, &x[column..], &mut lanes) };
            }
            for (sum, lanes) in sums.as_flattened_mut().iter_mut().zip(lanes.as_flattened()) {
                *sum = _mm256_add_ps(*sum, *lanes);
            }
            let end = first + BLOCK;
            if end.is_multiple_of(SUMMED * BLOCK) || end >= self.columns {
                for (wide, sum) in wide.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
                    *wide = fold(*sum, *wide);
                }
                sums = [[_mm256_setzero_ps(); T]; R];
            }
        }
        for (r, wide) in wide.into_iter().enumerate() {
            for (t, wide) in wide.into_iter().enumerate() {
                out[(row + r) * self.tokens + token + t] = total(wide);
            }
        }
    }

    /// Two steps of the chains.
    ///
    /// # Safety
    /// A group of stored columns must be readable at each of `groups`, and as many
    /// places of `T` tokens from the beginning of `x` on.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn group<Row: PlainRow, const R: usize, const T: usize>(
        &self,
        groups: [*const u8; R],
        x: &[f32],
        lanes: &mut [[__m256; T]; R],
    ) {
        // SAFETY: as the caller vouches.
        unsafe {
            self.step::<Row, 0, R, T>(groups, x, lanes);
            self.step::<Row, 1, R, T>(groups, x, lanes);
        }
    }

    /// One of them: half a group.
    ///
    /// # Safety
    /// As for [`Rows::group`].
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn step<Row: PlainRow, const HALF: usize, const R: usize, const T: usize>(
        &self,
        groups: [*const u8; R],
        x: &[f32],
        lanes: &mut [[__m256; T]; R],
    ) {
        let x: [__m256; T] = std::array::from_fn(|t| {
            // SAFETY: as the caller vouches.
            unsafe { _mm256_loadu_ps(x.as_ptr().add(t * self.places + HALF * LANES)) }
        });
        for (group, lanes) in groups.into_iter().zip(lanes) {
            // SAFETY: as the caller vouches.
            let weights = unsafe { Row::half::<HALF>(group) };
            for (lane, x) in lanes.iter_mut().zip(x) {
                *lane = _mm256_fmadd_ps(weights, x, *lane);
            }
        }
    }
}
