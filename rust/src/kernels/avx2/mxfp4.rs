//! MXFP4 rows: decoding a block at a time, and the product with few tokens.

use std::arch::x86_64::*;

use crate::kernels::aligned::CACHE_LINE;
use crate::kernels::avx2::panel::store;
use crate::kernels::avx2::{fold, total};
use crate::kernels::matrix::Matrix;
use crate::kernels::mxfp4::{BLOCK_BYTES, BlockRows, LANE_GROUPS, SCALE_NAN, Stored, VALUE_BYTES};
use crate::kernels::scalar::{BLOCK, CHAIN, LANES, SUMMED};

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// Registers of decoded values that a register of packed ones gives.
const VALUES: usize = 8;

/// Registers of a packed block.
const PACKED: usize = CHAIN / VALUES;

/// All rows of `matrix` with `tokens` of them, at most two: `x` is `[tokens, columns]`,
/// arranged, `out` `[rows, tokens]`.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let x = x.as_chunks::<BLOCK>().0;
    match tokens {
        _ if x.is_empty() => out.fill(0.0),
        1 => dot_all::<1>(matrix, x, out),
        _ => dot_all::<2>(matrix, x, out),
    }
}

#[target_feature(enable = "avx2,fma")]
fn dot_all<const T: usize>(matrix: Matrix<'_>, x: &[[f32; BLOCK]], out: &mut [f32]) {
    let rows = BlockRows::of(matrix);
    let (twos, rest) = out.as_chunks_mut::<T>().0.as_chunks_mut::<2>();
    for (pair, out) in twos.iter_mut().enumerate() {
        *out = dot_some(rows, [2 * pair, 2 * pair + 1], x);
    }
    if let [out] = rest {
        [*out] = dot_some(rows, [2 * twos.len()], x);
    }
}

/// `R` rows, so that no chain waits for itself, with `T` tokens, `x` being `[T, blocks]`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dot_some<const R: usize, const T: usize>(
    rows: BlockRows<'_>,
    which: [usize; R],
    x: &[[f32; BLOCK]],
) -> [[f32; T]; R] {
    let (blocks, whole) = (x.len() / T, rows.whole());
    let last = (whole < blocks).then(|| which.map(|row| rows.last(row)));
    let mut wide = [[_mm256_setzero_pd(); T]; R];
    let mut sums = [[_mm256_setzero_ps(); T]; R];
    for (block, x) in x[..blocks].iter().enumerate() {
        let mut stored = [Stored::NONE; R];
        for (r, stored) in stored.iter_mut().enumerate() {
            *stored = match &last {
                Some(last) if block == whole => last[r].stored(),
                _ => rows.block(which[r], block),
            };
            ask(*stored, PREFETCH_BYTES);
        }
        // SAFETY: each token has a block that is so many tokens' blocks after this one.
        unsafe { add_block(stored, x, blocks, &mut sums) };
        if (block + 1).is_multiple_of(SUMMED) || block + 1 == blocks {
            for (wide, sums) in wide.as_flattened_mut().iter_mut().zip(sums.as_flattened_mut()) {
                *wide = fold(*sums, *wide);
                *sums = _mm256_setzero_ps();
            }
        }
    }
    let mut out = [[0.0; T]; R];
    for (out, wide) in out.as_flattened_mut().iter_mut().zip(wide.as_flattened()) {
        *out = total(*wide);
    }
    out
}

/// Asks for the bytes `ahead` of a block.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn ask(stored: Stored<'_>, ahead: usize) {
    let place = stored.packed.as_ptr().wrapping_add(ahead);
    _mm_prefetch::<_MM_HINT_T0>(place.cast());
    _mm_prefetch::<_MM_HINT_T0>(place.wrapping_add(CACHE_LINE).cast());
}

/// `sums += scales * chains(values, x)` of `R` stored blocks with each of `T` tokens,
/// whose blocks follow each other at `stride` blocks.
///
/// # Safety
/// The tokens' blocks must be readable.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn add_block<const R: usize, const T: usize>(
    stored: [Stored<'_>; R],
    x: &[f32; BLOCK],
    stride: usize,
    sums: &mut [[__m256; T]; R],
) {
    let mut packed = [[_mm256_setzero_si256(); PACKED]; R];
    for (packed, stored) in packed.iter_mut().zip(stored) {
        *packed = transpose(stored.packed);
    }
    let mut chains = [[_mm256_setzero_ps(); T]; R];
    for part in 0..PACKED {
        for (chains, packed) in chains.iter_mut().zip(packed) {
            for (step, values) in decode_values(packed[part]).into_iter().enumerate() {
                for (token, chain) in chains.iter_mut().enumerate() {
                    let place = token * stride * BLOCK + (part * VALUES + step) * LANES;
                    // SAFETY: as the caller vouches; four parts of eight steps are the
                    // block.
                    let x = unsafe { _mm256_loadu_ps(x.as_ptr().add(place)) };
                    *chain = _mm256_fmadd_ps(values, x, *chain);
                }
            }
        }
    }
    for ((sums, chains), stored) in sums.iter_mut().zip(chains).zip(stored) {
        let scales = decode_scales(stored.scales);
        for (sum, chain) in sums.iter_mut().zip(chains) {
            *sum = _mm256_fmadd_ps(scales, chain, *sum);
        }
    }
}

/// Decodes a block: its unscaled values in the order of `mxfp4::ARRANGED` to `out`;
/// returns the scale of each lane.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn decode_block(stored: Stored<'_>, out: &mut [f32; BLOCK]) -> __m256 {
    let parts = out.as_chunks_mut::<{ VALUES * LANES }>().0;
    for (packed, out) in transpose(stored.packed).into_iter().zip(parts) {
        for (values, out) in decode_values(packed).into_iter().zip(out.as_chunks_mut().0) {
            store(values, out);
        }
    }
    decode_scales(stored.scales)
}

/// Four bytes of each group of a block, group beside group as in
/// [`LANE_GROUPS`]: the first two bytes of four groups, then their other two.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn transpose(packed: &[u8; BLOCK_BYTES]) -> [__m256i; PACKED] {
    let [a, b, c, d] = std::array::from_fn(|register| {
        // SAFETY: four registers of thirty-two bytes.
        unsafe { _mm256_loadu_si256(packed.as_ptr().cast::<__m256i>().add(register)) }
    });
    let [ab, cd] = [_mm256_unpacklo_epi16(a, b), _mm256_unpacklo_epi16(c, d)];
    let [ab_high, cd_high] = [_mm256_unpackhi_epi16(a, b), _mm256_unpackhi_epi16(c, d)];
    [
        _mm256_unpacklo_epi32(ab, cd),
        _mm256_unpackhi_epi32(ab, cd),
        _mm256_unpacklo_epi32(ab_high, cd_high),
        _mm256_unpackhi_epi32(ab_high, cd_high),
    ]
}

/// The scale of each lane's group: `mxfp4::scale`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn decode_scales(scales: &[u8; LANES]) -> __m256 {
    const ORDER: u64 = u64::from_le_bytes(lane_order());
    let order = _mm_cvtsi64_si128(ORDER.cast_signed());
    let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(*scales));
    let bytes = _mm256_cvtepu8_epi32(_mm_shuffle_epi8(bytes, order));
    // Byte 0 is 2^-127, which is subnormal; the others are an exponent as it is.
    const SMALLEST: i32 = 1 << 22;
    let exponents = _mm256_max_epu32(_mm256_slli_epi32::<23>(bytes), _mm256_set1_epi32(SMALLEST));
    let missing = _mm256_cmpeq_epi32(bytes, _mm256_set1_epi32(i32::from(SCALE_NAN)));
    let nan = _mm256_set1_ps(f32::NAN);
    _mm256_blendv_ps(_mm256_castsi256_ps(exponents), nan, _mm256_castsi256_ps(missing))
}

/// [`LANE_GROUPS`] as bytes.
pub(in crate::kernels) const fn lane_order() -> [u8; LANES] {
    let mut order = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        order[lane] = LANE_GROUPS[lane] as u8;
        lane += 1;
    }
    order
}

/// The eight values of each lane of a transposed register.
///
/// A value is a bfloat16, so two byte shuffles give the high and the low bytes of
/// all low nibbles, and two more those of the high nibbles. Interleaving them
/// gives bfloat16 pairs, which a shift and a mask make floats.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn decode_values(packed: __m256i) -> [__m256; VALUES] {
    let [high, low] = VALUE_BYTES.map(|bytes| {
        // SAFETY: an array of sixteen bytes.
        _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
    });
    let nibble = _mm256_set1_epi8(0x0f);
    let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    let even = _mm256_and_si256(packed, nibble);
    let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), nibble);
    let bytes = |codes| [_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes)];
    let ([even_low, even_high], [odd_low, odd_high]) = (bytes(even), bytes(odd));
    let halves = |pairs| {
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, upper)),
        ]
    };
    let [v0, v2] = halves(_mm256_unpacklo_epi8(even_low, even_high));
    let [v1, v3] = halves(_mm256_unpacklo_epi8(odd_low, odd_high));
    let [v4, v6] = halves(_mm256_unpackhi_epi8(even_low, even_high));
    let [v5, v7] = halves(_mm256_unpackhi_epi8(odd_low, odd_high));
    [v0, v1, v2, v3, v4, v5, v6, v7]
}
