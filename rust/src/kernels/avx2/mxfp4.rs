//! MXFP4 rows: decoding two groups at a time, and the product with few tokens,
//! one row at a time: the chains of different pairs do not depend on each other.

use std::arch::x86_64::*;

use crate::kernels::avx2::{fold, total};
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::{GROUP, GROUP_BYTES, PAIR, SCALE_LANES, SCALE_ONE, VALUE_BYTES};
use crate::kernels::scalar::{LANES, SCALED};

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// All rows of `matrix` with all tokens: `x` is `[tokens, columns]`, arranged,
/// `out` `[rows, tokens]`.
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let x = x.as_chunks::<PAIR>().0;
    let pairs = x.len() / tokens;
    if pairs == 0 {
        return out.fill(0.0);
    }
    for (row, out) in out.chunks_exact_mut(tokens).enumerate() {
        let row = Mxfp4Row::of(matrix, row);
        let (threes, rest) = out.as_chunks_mut::<3>();
        let (x_threes, x_rest) = x.split_at(threes.len() * 3 * pairs);
        for (out, x) in threes.iter_mut().zip(x_threes.chunks_exact(3 * pairs)) {
            *out = dot_row(row, x);
        }
        match rest {
            [a, b] => [*a, *b] = dot_row(row, x_rest),
            [a] => [*a] = dot_row(row, x_rest),
            _ => {}
        }
    }
}

/// One row with `T` tokens, `x` being `[T, pairs]`.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn dot_row<const T: usize>(row: Mxfp4Row<'_>, x: &[[f32; PAIR]]) -> [f32; T] {
    let token_pairs = x.len() / T;
    assert!(row.pairs.len() <= token_pairs);
    let mut wide = [_mm256_setzero_pd(); T];
    let blocks = row.pairs.chunks(SCALED).zip(row.scales.chunks(SCALED));
    for (block, (pairs, scales)) in blocks.enumerate() {
        let mut sums = [_mm256_setzero_ps(); T];
        for (index, (packed, scales)) in pairs.iter().zip(scales).enumerate() {
            let x = std::array::from_fn(|token| {
                // SAFETY: by the assertion there is a pair of `x` for each of the row.
                unsafe { x.get_unchecked(token * token_pairs + block * SCALED + index) }
            });
            sums = add_pair(decode_pair(packed, *scales, PREFETCH_BYTES), x, sums);
        }
        fold_all(sums, &mut wide);
    }
    if let Some(half) = row.half {
        let x = std::array::from_fn(|token| &x[(token + 1) * token_pairs - 1]);
        fold_all(add_pair(half.decode(), x, [_mm256_setzero_ps(); T]), &mut wide);
    }
    wide.map(|wide| total(wide))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn fold_all<const T: usize>(sums: [__m256; T], wide: &mut [__m256d; T]) {
    for (wide, sums) in wide.iter_mut().zip(sums) {
        *wide = fold(sums, *wide);
    }
}

/// `sums + scales * chains(values, x)` for each of `T` tokens.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_pair<const T: usize>(
    pair: Pair,
    x: [&[f32; PAIR]; T],
    mut sums: [__m256; T],
) -> [__m256; T] {
    let mut chains = [_mm256_setzero_ps(); T];
    for (step, values) in pair.values.into_iter().enumerate() {
        for (chain, x) in chains.iter_mut().zip(x) {
            // SAFETY: eight steps of eight places are the 64 of the pair.
            let x = unsafe { _mm256_loadu_ps(x.as_ptr().add(step * LANES)) };
            *chain = _mm256_fmadd_ps(values, x, *chain);
        }
    }
    for (sum, chain) in sums.iter_mut().zip(chains) {
        *sum = _mm256_fmadd_ps(pair.scales, chain, *sum);
    }
    sums
}

/// The packed bytes of one row.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Mxfp4Row<'a> {
    pub(in crate::kernels) pairs: &'a [[u8; PAIR / 2]],
    pub(in crate::kernels) scales: &'a [[u8; 2]],
    /// The group that follows the pairs where their number is odd.
    pub(in crate::kernels) half: Option<HalfPair<'a>>,
}

/// One packed group; the missing one counts as zeros with a scale of 1.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct HalfPair<'a> {
    packed: &'a [u8; GROUP_BYTES],
    scale: u8,
}

/// Two decoded groups.
pub(in crate::kernels) struct Pair {
    /// The 64 unscaled values in the order of `mxfp4::ARRANGED`.
    pub(in crate::kernels) values: [__m256; 8],
    /// The scale of each lane's group.
    pub(in crate::kernels) scales: __m256,
}

impl<'a> Mxfp4Row<'a> {
    #[inline]
    pub(in crate::kernels) fn of(matrix: Matrix<'a>, row: usize) -> Self {
        let Weights::Mxfp4 { packed, scales } = matrix.weights() else { unreachable!() };
        let groups = matrix.columns() / GROUP;
        let packed = &packed[row * groups * GROUP_BYTES..][..groups * GROUP_BYTES];
        let (pairs, rest) = packed.as_chunks();
        let (scales, last) = scales[row * groups..][..groups].as_chunks();
        let half = rest.first_chunk().zip(last.first());
        let half = half.map(|(packed, scale)| HalfPair { packed, scale: *scale });
        Mxfp4Row { pairs, scales, half }
    }
}

/// Decodes two groups and asks for the bytes `ahead` of them.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(in crate::kernels) fn decode_pair(
    packed: &[u8; PAIR / 2],
    scales: [u8; 2],
    ahead: usize,
) -> Pair {
    _mm_prefetch::<_MM_HINT_T0>(packed.as_ptr().wrapping_add(ahead).cast());
    // SAFETY: an array of thirty-two bytes.
    let packed = unsafe { _mm256_loadu_si256(packed.as_ptr().cast()) };
    Pair { values: decode_values(packed), scales: decode_scales(scales) }
}

impl HalfPair<'_> {
    /// Decodes the group. Not inlined: it comes once a row, and the registers are
    /// needed for the pairs.
    #[cold]
    #[target_feature(enable = "avx2,fma")]
    pub(in crate::kernels) fn decode(self) -> Pair {
        // SAFETY: an array of sixteen bytes.
        let packed = unsafe { _mm_loadu_si128(self.packed.as_ptr().cast()) };
        let values = decode_values(_mm256_zextsi128_si256(packed));
        Pair { values, scales: decode_scales([self.scale, SCALE_ONE]) }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn decode_scales(scales: [u8; 2]) -> __m256 {
    let [first, second] = scales.map(|byte| {
        // SAFETY: an array of four floats.
        unsafe { _mm_loadu_ps(SCALE_LANES[usize::from(byte)].as_ptr()) }
    });
    _mm256_set_m128(second, first)
}

/// The 64 values of two packed groups in the order of `mxfp4::ARRANGED`.
///
/// A value is a bfloat16, so two byte shuffles give the high and the low bytes of
/// all low nibbles, and two more those of the high nibbles. Interleaving them
/// gives bfloat16 pairs, which a shift and a mask make floats.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn decode_values(packed: __m256i) -> [__m256; 8] {
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
