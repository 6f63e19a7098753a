//! MXFP4 rows: decoding a block of two rows at a time, and the product with few
//! tokens.

use std::arch::x86_64::*;

use crate::kernels::avx2::mxfp4::{ask, lane_order};
use crate::kernels::avx512::panel::Line;
use crate::kernels::avx512::{fold, totals};
use crate::kernels::matrix::Matrix;
use crate::kernels::mxfp4::{BLOCK_BYTES, BlockRows, SCALE_NAN, Stored, VALUES};
use crate::kernels::scalar::{BLOCK, CHAIN, LANES, SUMMED};

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// Registers of decoded values that a register of packed ones gives: one for each of
/// the nibbles of a lane.
const NIBBLES: usize = 8;

/// Registers of a packed block of two rows.
const PACKED: usize = CHAIN / NIBBLES;

/// All rows of `matrix` with `tokens` of them, at most eight: `x` is `[tokens,
/// columns]`, arranged, `out` `[rows, tokens]`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let x = x.as_chunks::<BLOCK>().0;
    if x.is_empty() {
        return out.fill(0.0);
    }
    match tokens {
        1 => dot_row_pairs::<1>(matrix, x, out),
        2 => dot_row_pairs::<2>(matrix, x, out),
        3 => dot_row_pairs::<3>(matrix, x, out),
        4 => dot_row_pairs::<4>(matrix, x, out),
        5 => dot_row_pairs::<5>(matrix, x, out),
        6 => dot_row_pairs::<6>(matrix, x, out),
        7 => dot_row_pairs::<7>(matrix, x, out),
        _ => dot_row_pairs::<8>(matrix, x, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot_row_pairs<const T: usize>(matrix: Matrix<'_>, x: &[[f32; BLOCK]], out: &mut [f32]) {
    let rows = BlockRows::of(matrix);
    let out = out.as_chunks_mut::<T>().0;
    let fours = out.len() - out.len() % 4;
    for first in (0..fours).step_by(4) {
        let pairs = [[first, first + 1], [first + 2, first + 3]];
        let sums = dot_pairs::<2, T>(rows, pairs, x);
        for (pair, sums) in pairs.into_iter().zip(sums) {
            write_pair(pair, sums, out);
        }
    }
    for first in (fours..out.len()).step_by(2) {
        // The last row of an odd number is its own companion.
        let pair = [first, (first + 1).min(out.len() - 1)];
        let [sums] = dot_pairs::<1, T>(rows, [pair], x);
        write_pair(pair, sums, out);
    }
}

/// Results `[T, 2]` of two rows to `out`, `[rows, T]`.
fn write_pair<const T: usize>(pair: [usize; 2], sums: [[f32; 2]; T], out: &mut [[f32; T]]) {
    for (row, which) in pair.into_iter().zip([0, 1]) {
        out[row] = sums.map(|sums| sums[which]);
    }
}

/// `R` pairs of rows with `T` tokens, `x` being `[T, blocks]`; the result is
/// `[R, T, 2]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot_pairs<const R: usize, const T: usize>(
    rows: BlockRows<'_>,
    pairs: [[usize; 2]; R],
    x: &[[f32; BLOCK]],
) -> [[[f32; 2]; T]; R] {
    let (blocks, whole) = (x.len() / T, rows.whole());
    // The same place of the rows that come next.
    let ahead = PREFETCH_BYTES.max(2 * R * whole * BLOCK_BYTES);
    let last = (whole < blocks).then(|| pairs.map(|pair| pair.map(|row| rows.last(row))));
    let mut wide = [[_mm512_setzero_pd(); T]; R];
    let mut sums = [[_mm512_setzero_ps(); T]; R];
    for (block, x) in x[..blocks].iter().enumerate() {
        let mut stored = [[Stored::NONE; 2]; R];
        for (r, stored) in stored.iter_mut().enumerate() {
            for (row, stored) in stored.iter_mut().enumerate() {
                *stored = match &last {
                    Some(last) if block == whole => last[r][row].stored(),
                    _ => rows.block(pairs[r][row], block),
                };
                ask(*stored, ahead);
            }
        }
        // SAFETY: each token has a block that is so many tokens' blocks after this one.
        unsafe { add_block(stored, x, blocks, &mut sums) };
        if (block + 1).is_multiple_of(SUMMED) || block + 1 == blocks {
            fold_all(&mut sums, &mut wide);
        }
    }
    let mut out = [[[0.0; 2]; T]; R];
    for (out, wide) in out.as_flattened_mut().iter_mut().zip(wide.as_flattened()) {
        *out = totals(*wide);
    }
    out
}

/// `sums += scales * chains(values, x)` of `R` times two stored blocks with each of `T`
/// tokens, whose blocks follow each other at `stride` blocks.
///
/// # Safety
/// The tokens' blocks must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn add_block<const R: usize, const T: usize>(
    stored: [[Stored<'_>; 2]; R],
    x: &[f32; BLOCK],
    stride: usize,
    sums: &mut [[__m512; T]; R],
) {
    let mut packed = [[_mm512_setzero_si512(); PACKED]; R];
    for (packed, stored) in packed.iter_mut().zip(stored) {
        *packed = transpose(stored);
    }
    let mut chains = [[_mm512_setzero_ps(); T]; R];
    for part in 0..PACKED {
        let x = x.as_ptr().wrapping_add(part * NIBBLES * LANES);
        let part = Part { packed: &packed, part, x, stride: stride * BLOCK };
        // SAFETY: as the caller vouches; four parts of eight steps are the block.
        unsafe {
            part.step::<0, T>(&mut chains);
            part.step::<1, T>(&mut chains);
            part.step::<2, T>(&mut chains);
            part.step::<3, T>(&mut chains);
            part.step::<4, T>(&mut chains);
            part.step::<5, T>(&mut chains);
            part.step::<6, T>(&mut chains);
            part.step::<7, T>(&mut chains);
        }
    }
    for ((sums, chains), stored) in sums.iter_mut().zip(chains).zip(stored) {
        let scales = decode_scales(stored);
        for (sum, chain) in sums.iter_mut().zip(chains) {
            *sum = _mm512_fmadd_ps(scales, chain, *sum);
        }
    }
}

/// Eight steps of the chains of [`add_block`].
struct Part<'a, const R: usize> {
    packed: &'a [[__m512i; PACKED]; R],
    part: usize,
    /// Where the first step of the first token is.
    x: *const f32,
    /// From there to that of the next token.
    stride: usize,
}

impl<const R: usize> Part<'_, R> {
    /// One of them: each value is decoded when it is needed, because registers are few.
    ///
    /// # Safety
    /// `x` must be readable at this step of `T` tokens.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn step<const NIBBLE: usize, const T: usize>(&self, chains: &mut [[__m512; T]; R]) {
        let mut values = [_mm512_setzero_ps(); R];
        for (values, packed) in values.iter_mut().zip(self.packed) {
            *values = decode_values::<NIBBLE>(packed[self.part]);
        }
        for token in 0..T {
            // SAFETY: as the caller vouches.
            let x = unsafe { _mm256_loadu_ps(self.x.add(token * self.stride + NIBBLE * LANES)) };
            let x = _mm512_broadcast_f32x8(x);
            for (chains, values) in chains.iter_mut().zip(values) {
                chains[token] = _mm512_fmadd_ps(values, x, chains[token]);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fold_all<const R: usize, const T: usize>(
    sums: &mut [[__m512; T]; R],
    wide: &mut [[__m512d; T]; R],
) {
    for (wide, sums) in wide.as_flattened_mut().iter_mut().zip(sums.as_flattened_mut()) {
        *wide = fold(*sums, *wide);
        *sums = _mm512_setzero_ps();
    }
}

/// Decodes a block of each of two rows: the unscaled values, one row beside the other,
/// in the order of `mxfp4::ARRANGED`, to `out`; returns the scale of each lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn decode_block(stored: [Stored<'_>; 2], out: &mut [Line; CHAIN]) -> __m512 {
    let parts = transpose(stored).into_iter();
    for (packed, out) in parts.zip(out.as_chunks_mut::<NIBBLES>().0) {
        let [line0, line1, line2, line3, line4, line5, line6, line7] = out;
        line0.store(decode_values::<0>(packed));
        line1.store(decode_values::<1>(packed));
        line2.store(decode_values::<2>(packed));
        line3.store(decode_values::<3>(packed));
        line4.store(decode_values::<4>(packed));
        line5.store(decode_values::<5>(packed));
        line6.store(decode_values::<6>(packed));
        line7.store(decode_values::<7>(packed));
    }
    decode_scales(stored)
}

/// Four bytes of each group of a block of each of two rows, group beside group as
/// in `mxfp4::LANE_GROUPS`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn transpose([one, two]: [Stored<'_>; 2]) -> [__m512i; PACKED] {
    let [a, b, c, d] = std::array::from_fn(|register| {
        // SAFETY: four registers of thirty-two bytes of each row.
        unsafe {
            let one = _mm256_loadu_si256(one.packed.as_ptr().cast::<__m256i>().add(register));
            let two = _mm256_loadu_si256(two.packed.as_ptr().cast::<__m256i>().add(register));
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(one), two)
        }
    });
    let [ab, cd] = [_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)];
    let [ab_high, cd_high] = [_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)];
    [
        _mm512_unpacklo_epi64(ab, cd),
        _mm512_unpackhi_epi64(ab, cd),
        _mm512_unpacklo_epi64(ab_high, cd_high),
        _mm512_unpackhi_epi64(ab_high, cd_high),
    ]
}

/// The values of one of the eight nibbles of each lane of a transposed register. A
/// permutation of a register is a table of sixteen floats, which looks at the lowest
/// four bits of a lane only.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_values<const NIBBLE: usize>(packed: __m512i) -> __m512 {
    // SAFETY: an array of sixteen floats.
    let table = unsafe { _mm512_loadu_ps(VALUES.as_ptr()) };
    let codes = match NIBBLE {
        0 => packed,
        1 => _mm512_srli_epi32::<4>(packed),
        2 => _mm512_srli_epi32::<8>(packed),
        3 => _mm512_srli_epi32::<12>(packed),
        4 => _mm512_srli_epi32::<16>(packed),
        5 => _mm512_srli_epi32::<20>(packed),
        6 => _mm512_srli_epi32::<24>(packed),
        _ => _mm512_srli_epi32::<28>(packed),
    };
    _mm512_permutexvar_ps(codes, table)
}

/// The scale of each lane's group of two rows: `mxfp4::scale`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_scales([one, two]: [Stored<'_>; 2]) -> __m512 {
    const ORDER: i64 = i64::from_le_bytes(lane_order());
    const SECOND: i64 = ORDER + i64::from_le_bytes([LANES as u8; LANES]);
    let bytes = _mm_set_epi64x(i64::from_le_bytes(*two.scales), i64::from_le_bytes(*one.scales));
    let bytes = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(bytes, _mm_set_epi64x(SECOND, ORDER)));
    // Byte 0 is 2^-127, which is subnormal; the others are an exponent as it is.
    const SMALLEST: i32 = 1 << 22;
    let exponents = _mm512_max_epu32(_mm512_slli_epi32::<23>(bytes), _mm512_set1_epi32(SMALLEST));
    let missing = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(i32::from(SCALE_NAN)));
    _mm512_mask_mov_ps(_mm512_castsi512_ps(exponents), missing, _mm512_set1_ps(f32::NAN))
}
