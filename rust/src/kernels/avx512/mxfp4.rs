//! MXFP4 rows: decoding two groups of two rows at a time, and the product with
//! few tokens.

use std::arch::x86_64::*;

use crate::kernels::avx2::mxfp4::{HalfPair, Mxfp4Row};
use crate::kernels::avx512::{fold, join, totals};
use crate::kernels::matrix::Matrix;
use crate::kernels::mxfp4::{PAIR, SCALE_NAN, VALUE_BYTES};
use crate::kernels::scalar::{LANES, SCALED};

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// All rows of `matrix` with `tokens` of them, at most four: `x` is `[tokens,
/// columns]`, arranged, `out` `[rows, tokens]`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let x = x.as_chunks::<PAIR>().0;
    if x.is_empty() {
        return out.fill(0.0);
    }
    match tokens {
        1 => dot_row_pairs::<1>(matrix, x, out),
        2 => dot_row_pairs::<2>(matrix, x, out),
        3 => dot_row_pairs::<3>(matrix, x, out),
        _ => dot_row_pairs::<4>(matrix, x, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot_row_pairs<const T: usize>(matrix: Matrix<'_>, x: &[[f32; PAIR]], out: &mut [f32]) {
    let out = out.as_chunks_mut::<T>().0;
    let (fours, rest) = out.as_chunks_mut::<4>();
    let first_rest = fours.len() * 4;
    for (index, out) in fours.iter_mut().enumerate() {
        let row = |row| Mxfp4Row::of(matrix, 4 * index + row);
        let [first, second] = dot_pairs::<2, T>([[row(0), row(1)], [row(2), row(3)]], x);
        for (row, sums) in [first, second].into_iter().enumerate() {
            for (token, [one, two]) in sums.into_iter().enumerate() {
                out[2 * row][token] = one;
                out[2 * row + 1][token] = two;
            }
        }
    }
    for (index, out) in rest.chunks_mut(2).enumerate() {
        // The last row of an odd number is its own companion.
        let row = |row| Mxfp4Row::of(matrix, first_rest + 2 * index + row);
        let [sums] = dot_pairs::<1, T>([[row(0), row(out.len() - 1)]], x);
        for (row, out) in out.iter_mut().enumerate() {
            for (out, sums) in out.iter_mut().zip(sums) {
                *out = sums[row];
            }
        }
    }
}

/// `R` times two rows with `T` tokens, `x` being `[T, pairs]`; the result is
/// `[R, T, 2]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot_pairs<const R: usize, const T: usize>(
    rows: [[Mxfp4Row<'_>; 2]; R],
    x: &[[f32; PAIR]],
) -> [[[f32; 2]; T]; R] {
    let token_pairs = x.len() / T;
    let pairs = rows[0][0].pairs.len();
    assert!(pairs <= token_pairs && rows.as_flattened().iter().all(|row| row.pairs.len() == pairs));
    let packed = rows.map(|rows| rows.map(|row| row.pairs.as_ptr()));
    // The same place of the rows that come next.
    let ahead = PREFETCH_BYTES.max(2 * R * pairs * (PAIR / 2));
    let mut wide = [[_mm512_setzero_pd(); T]; R];
    for block in (0..pairs).step_by(SCALED) {
        let range = block..pairs.min(block + SCALED);
        let zero = _mm512_setzero_ps();
        let mut scales = [Scales { first: zero, second: zero }; R];
        for (scales, [first, second]) in scales.iter_mut().zip(rows) {
            *scales = Scales::decode(&first.scales[range.clone()], &second.scales[range.clone()]);
        }
        let mut sums = [[zero; T]; R];
        for (index, pair) in range.enumerate() {
            for r in 0..R {
                let [first, second] = packed[r];
                // SAFETY: by the assertion each row has this pair.
                let (first, second) = unsafe { (&*first.add(pair), &*second.add(pair)) };
                let values = decode_values(load(first, second, ahead));
                // SAFETY: by the assertion there is a pair of `x` for each of the row.
                let x = unsafe { x.get_unchecked(pair..) };
                add_pair(values, scales[r].of_pair(index), x, token_pairs, &mut sums[r]);
            }
        }
        fold_all(sums, &mut wide);
    }
    if rows[0][0].half.is_some() {
        let mut sums = [[_mm512_setzero_ps(); T]; R];
        for (sums, [first, second]) in sums.iter_mut().zip(rows) {
            if let Some((first, second)) = first.half.zip(second.half) {
                let (values, scales) = decode_halves(first, second);
                add_pair(values, scales, &x[token_pairs - 1..], token_pairs, sums);
            }
        }
        fold_all(sums, &mut wide);
    }
    std::array::from_fn(|r| std::array::from_fn(|t| totals(wide[r][t])))
}

/// `sums += scales * chains(values, x)` for each of `T` tokens, whose pairs are
/// `stride` apart in `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add_pair<const T: usize>(
    values: [__m512; 8],
    scales: __m512,
    x: &[[f32; PAIR]],
    stride: usize,
    sums: &mut [__m512; T],
) {
    debug_assert!((T - 1) * stride < x.len());
    let mut chains = [_mm512_setzero_ps(); T];
    for (step, values) in values.into_iter().enumerate() {
        for (token, chain) in chains.iter_mut().enumerate() {
            // SAFETY: as the callers see to; eight steps of eight places are the
            // 64 of a pair.
            let x = unsafe {
                _mm256_loadu_ps(x.as_ptr().add(token * stride).cast::<f32>().add(step * LANES))
            };
            *chain = _mm512_fmadd_ps(values, _mm512_broadcast_f32x8(x), *chain);
        }
    }
    for (sum, chain) in sums.iter_mut().zip(chains) {
        *sum = _mm512_fmadd_ps(scales, chain, *sum);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fold_all<const R: usize, const T: usize>(sums: [[__m512; T]; R], wide: &mut [[__m512d; T]; R]) {
    for (wide, sums) in wide.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
        *wide = fold(*sums, *wide);
    }
}

/// Two packed groups of each of two rows; asks for the bytes `ahead` of them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn load(first: &[u8; PAIR / 2], second: &[u8; PAIR / 2], ahead: usize) -> __m512i {
    _mm_prefetch::<_MM_HINT_T0>(first.as_ptr().wrapping_add(ahead).cast());
    _mm_prefetch::<_MM_HINT_T0>(second.as_ptr().wrapping_add(ahead).cast());
    // SAFETY: arrays of thirty-two bytes.
    let (first, second) = unsafe {
        (_mm256_loadu_si256(first.as_ptr().cast()), _mm256_loadu_si256(second.as_ptr().cast()))
    };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
}

/// The values of two packed groups of each of two rows, unscaled, in the order of
/// `mxfp4::ARRANGED`: as `avx2::mxfp4` has them. A permutation of 16-bit words
/// would need fewer instructions, but each takes its unit for two cycles.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn decode_values(packed: __m512i) -> [__m512; 8] {
    let [high, low] = VALUE_BYTES.map(|bytes| {
        // SAFETY: an array of sixteen bytes.
        _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
    });
    let nibble = _mm512_set1_epi8(0x0f);
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let even = _mm512_and_si512(packed, nibble);
    let odd = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), nibble);
    let bytes = |codes| [_mm512_shuffle_epi8(low, codes), _mm512_shuffle_epi8(high, codes)];
    let ([even_low, even_high], [odd_low, odd_high]) = (bytes(even), bytes(odd));
    let halves = |pairs| {
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)),
        ]
    };
    let [v0, v2] = halves(_mm512_unpacklo_epi8(even_low, even_high));
    let [v1, v3] = halves(_mm512_unpacklo_epi8(odd_low, odd_high));
    let [v4, v6] = halves(_mm512_unpackhi_epi8(even_low, even_high));
    let [v5, v7] = halves(_mm512_unpackhi_epi8(odd_low, odd_high));
    [v0, v1, v2, v3, v4, v5, v6, v7]
}

/// The scales of up to [`SCALED`] pairs of two rows, sixteen groups each.
#[derive(Clone, Copy)]
pub(super) struct Scales {
    first: __m512,
    second: __m512,
}

/// For each pair of a block, where [`Scales`] has the scale of each lane.
static LANE_GROUPS: [[i32; 16]; SCALED] = lane_groups();

const fn lane_groups() -> [[i32; 16]; SCALED] {
    let mut places = [[0; 16]; SCALED];
    let mut place = 0;
    while place < 16 * SCALED {
        let (pair, lane) = (place / 16, place % 16);
        let (row, group) = (lane / 8, 2 * pair + lane % 8 / 4);
        places[pair][lane] = (16 * row + group) as i32;
        place += 1;
    }
    places
}

impl Scales {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn decode(first: &[[u8; 2]], second: &[[u8; 2]]) -> Self {
        Scales { first: decode_scales(first), second: decode_scales(second) }
    }

    /// The scale of the group of each lane in pair `index` of the block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn of_pair(&self, index: usize) -> __m512 {
        // SAFETY: an array of sixteen words.
        let places = unsafe { _mm512_loadu_si512(LANE_GROUPS[index].as_ptr().cast()) };
        _mm512_permutex2var_ps(self.first, places, self.second)
    }
}

/// `mxfp4::scale` of up to sixteen bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_scales(scales: &[[u8; 2]]) -> __m512 {
    let bytes = &scales.as_flattened()[..scales.len().min(SCALED) * 2];
    let present = ((1u32 << bytes.len()) - 1) as u16;
    // SAFETY: only the bytes of the slice are read.
    let bytes = unsafe { _mm_maskz_loadu_epi8(present, bytes.as_ptr().cast()) };
    let bytes = _mm512_cvtepu8_epi32(bytes);
    // Byte 0 is 2^-127, which is subnormal; the others are an exponent as it is.
    const SMALLEST: i32 = 1 << 22;
    let exponents = _mm512_max_epu32(_mm512_slli_epi32::<23>(bytes), _mm512_set1_epi32(SMALLEST));
    let missing = _mm512_cmpeq_epi32_mask(bytes, _mm512_set1_epi32(i32::from(SCALE_NAN)));
    _mm512_mask_mov_ps(_mm512_castsi512_ps(exponents), missing, _mm512_set1_ps(f32::NAN))
}

/// The values and the scales of a single group of each of two rows. Not inlined:
/// it comes once a row, and the registers are needed for the pairs.
#[cold]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn decode_halves(first: HalfPair<'_>, second: HalfPair<'_>) -> ([__m512; 8], __m512) {
    let (first, second) = (first.decode(), second.decode());
    let values = std::array::from_fn(|step| join(first.values[step], second.values[step]));
    (values, join(first.scales, second.scales))
}
