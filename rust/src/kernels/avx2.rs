//! AVX2 and FMA: the contract of `scalar`, eight lanes to a register.
//!
//! One token: stored rows are widened in registers, four rows at a time, each
//! with a chain of its own. Several tokens: a block of rows is decoded once
//! into a panel of floats that stays in the first-level cache and is multiplied
//! with all tokens, four rows by three tokens in registers. Both follow the
//! same chains, so a token's bits do not depend on its company.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::cell::RefCell;

use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::{GROUP, GROUP_BYTES, PAIR, SHUFFLE_TABLES};
use crate::kernels::scalar::{BLOCK, CHAIN, LANES};

/// Rows of the panel that several tokens share.
const PANEL_ROWS: usize = 16;

/// Bytes ahead of the current position that are asked for early.
const PREFETCH_BYTES: usize = 4096;

/// See [`crate::kernels::scalar::dot_rows`], whose bits these are.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert!(x.len() == tokens * matrix.arranged_columns() && out.len() == rows * tokens);
    if tokens > 1 {
        return dot_rows_by_panels(matrix, x, tokens, out);
    }
    if tokens == 0 {
        return;
    }
    match matrix.weights() {
        Weights::Bf16(bytes) => for_row_groups::<Bf16Row>(bytes, columns, x, out),
        Weights::F32(bytes) => for_row_groups::<F32Row>(bytes, columns, x, out),
        Weights::Mxfp4 { .. } => {
            let (fours, rest) = out.as_chunks_mut::<4>();
            let whole = fours.len() * 4;
            for (group, out) in fours.iter_mut().enumerate() {
                dot_mxfp4(matrix.row_range(group * 4..group * 4 + 4), x, out);
            }
            for (row, out) in (whole..).zip(rest) {
                dot_mxfp4(matrix.row_range(row..row + 1), x, std::array::from_mut(out));
            }
        }
    }
}

/// A plain stored form: how to widen eight columns.
trait PlainRow {
    const BYTES: usize;

    /// # Safety
    /// Eight elements must be readable at `pointer`, on a CPU with AVX2.
    unsafe fn load(pointer: *const u8) -> __m256;
}

struct Bf16Row;
struct F32Row;

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

#[target_feature(enable = "avx2,fma")]
fn for_row_groups<Row: PlainRow>(bytes: &[u8], columns: usize, x: &[f32], out: &mut [f32]) {
    let row_bytes = columns * Row::BYTES;
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
            let x = load_tail(&x[column..]);
            for (row, lane) in lanes.iter_mut().enumerate() {
                let start = row * row_bytes + column * Row::BYTES;
                let mut stored = [0; LANES * 4];
                stored[..tail * Row::BYTES]
                    .copy_from_slice(&bytes[start..start + tail * Row::BYTES]);
                // SAFETY: `stored` holds eight elements of the widest form.
                let weights = unsafe { Row::load(stored.as_ptr()) };
                *lane = _mm256_fmadd_ps(weights, x, *lane);
            }
        }
        for (wide, lanes) in wide.iter_mut().zip(lanes) {
            *wide = fold(lanes, *wide);
        }
    }
    *out = wide.map(|wide| total(wide));
}

/// `R` MXFP4 rows with one token, whose `x` is arranged.
#[target_feature(enable = "avx2,fma")]
fn dot_mxfp4<const R: usize>(matrix: Matrix<'_>, x: &[f32], out: &mut [f32; R]) {
    let rows: [Mxfp4Row<'_>; R] = std::array::from_fn(|row| Mxfp4Row::of(matrix, row));
    let pairs = x.as_chunks::<PAIR>().0;
    let mut wide = [_mm256_setzero_pd(); R];
    for (block, pairs) in pairs.chunks(BLOCK / PAIR).enumerate() {
        let mut lanes = [_mm256_setzero_ps(); R];
        for (pair, x) in pairs.iter().enumerate() {
            for (row, lane) in rows.iter().zip(&mut lanes) {
                for (step, weights) in
                    row.pair(block * (BLOCK / PAIR) + pair).into_iter().enumerate()
                {
                    // SAFETY: eight steps of eight places are the 64 of the pair.
                    let x = unsafe { _mm256_loadu_ps(x.as_ptr().add(step * LANES)) };
                    *lane = _mm256_fmadd_ps(weights, x, *lane);
                }
            }
        }
        for (wide, lanes) in wide.iter_mut().zip(lanes) {
            *wide = fold(lanes, *wide);
        }
    }
    *out = wide.map(|wide| total(wide));
}

/// The groups of one packed row.
#[derive(Clone, Copy)]
struct Mxfp4Row<'a> {
    packed: &'a [[u8; GROUP_BYTES]],
    scales: &'a [u8],
}

impl<'a> Mxfp4Row<'a> {
    #[inline]
    fn of(matrix: Matrix<'a>, row: usize) -> Self {
        let Weights::Mxfp4 { packed, scales } = matrix.weights() else { unreachable!() };
        let groups = matrix.columns() / GROUP;
        let packed = &packed.as_chunks::<GROUP_BYTES>().0[row * groups..][..groups];
        Mxfp4Row { packed, scales: &scales[row * groups..][..groups] }
    }

    /// The scaled values of pair `index` in the order of `mxfp4::ARRANGED`; a
    /// group that is missing at the end of the row counts as zeros.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn pair(&self, index: usize) -> [__m256; 8] {
        if let Some(packed) = self.packed.get(2 * index..2 * index + 2) {
            let first = packed.as_ptr();
            _mm_prefetch::<_MM_HINT_T0>(first.wrapping_byte_add(PREFETCH_BYTES).cast());
            // SAFETY: two groups of sixteen bytes, and as many scales as groups.
            let (packed, scales) = unsafe {
                let scales = self.scales.as_ptr().add(2 * index);
                (_mm256_loadu_si256(first.cast()), [*scales, *scales.add(1)])
            };
            return decode_pair(packed, scales);
        }
        // SAFETY: an array of sixteen bytes.
        let last = unsafe { _mm_loadu_si128(self.packed[2 * index].as_ptr().cast()) };
        decode_pair(_mm256_zextsi128_si256(last), [self.scales[2 * index], 0])
    }
}

/// The 64 scaled values of two groups in the order of `mxfp4::ARRANGED`.
///
/// A scaled value is a bfloat16 (see `mxfp4`), so two byte shuffles with the
/// tables of the scale give the high and the low bytes of all low nibbles, and
/// two more those of the high nibbles. Interleaving them gives bfloat16 pairs,
/// which a shift and a mask make floats.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn decode_pair(packed: __m256i, scales: [u8; 2]) -> [__m256; 8] {
    let tables = scales.map(|scale| &SHUFFLE_TABLES.0[usize::from(scale)]);
    let table = |byte: usize| {
        // SAFETY: arrays of sixteen bytes.
        let [first, second] =
            tables.map(|table| unsafe { _mm_load_si128(table[byte].as_ptr().cast()) });
        _mm256_set_m128i(second, first)
    };
    let (high, low) = (table(0), table(1));
    let nibble = _mm256_set1_epi8(0x0f);
    let upper = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    let even = _mm256_and_si256(packed, nibble);
    let odd = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), nibble);
    let [first, second, third, fourth] = {
        let bytes = |codes| (_mm256_shuffle_epi8(low, codes), _mm256_shuffle_epi8(high, codes));
        let ((even_low, even_high), (odd_low, odd_high)) = (bytes(even), bytes(odd));
        [
            _mm256_unpacklo_epi8(even_low, even_high),
            _mm256_unpackhi_epi8(even_low, even_high),
            _mm256_unpacklo_epi8(odd_low, odd_high),
            _mm256_unpackhi_epi8(odd_low, odd_high),
        ]
    };
    let lower_half = |pairs| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs));
    let upper_half = |pairs| _mm256_castsi256_ps(_mm256_and_si256(pairs, upper));
    [
        lower_half(first),
        upper_half(first),
        lower_half(second),
        upper_half(second),
        lower_half(third),
        upper_half(third),
        lower_half(fourth),
        upper_half(fourth),
    ]
}

/// Buffers that several tokens need, kept by each thread between calls.
#[derive(Default)]
struct Scratch {
    /// `[PANEL_ROWS, BLOCK]` decoded weights.
    panel: Vec<f32>,
    /// `[tokens, BLOCK]`, only for a last block that is not whole lanes.
    x: Vec<f32>,
    /// `[PANEL_ROWS, tokens, 4]`.
    wide: Vec<f64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[target_feature(enable = "avx2,fma")]
fn dot_rows_by_panels(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.panel.resize(PANEL_ROWS * BLOCK, 0.0);
        for first in (0..matrix.rows()).step_by(PANEL_ROWS) {
            let last = matrix.rows().min(first + PANEL_ROWS);
            let out = &mut out[first * tokens..last * tokens];
            dot_panel(matrix.row_range(first..last), x, tokens, out, scratch);
        }
    });
}

/// At most [`PANEL_ROWS`] rows with all tokens.
#[target_feature(enable = "avx2,fma")]
fn dot_panel(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32], scratch: &mut Scratch) {
    let (rows, columns) = (matrix.rows(), matrix.arranged_columns());
    scratch.wide.clear();
    scratch.wide.resize(rows * tokens * 4, 0.0);
    for first in (0..columns).step_by(BLOCK) {
        let width = BLOCK.min(columns - first);
        let padded = width.next_multiple_of(LANES);
        for row in 0..rows {
            let panel = &mut scratch.panel[row * BLOCK..(row + 1) * BLOCK];
            decode_row(matrix, row, first, &mut panel[..width]);
            panel[width..padded].fill(0.0);
        }
        let (x, stride) = if width == padded {
            (&x[first..], columns)
        } else {
            scratch.x.resize(tokens * BLOCK, 0.0);
            for token in 0..tokens {
                let copy = &mut scratch.x[token * BLOCK..][..padded];
                copy[..width].copy_from_slice(&x[token * columns + first..][..width]);
                copy[width..].fill(0.0);
            }
            (&scratch.x[..], BLOCK)
        };
        let block = Block { panel: &scratch.panel, x, stride, steps: padded / LANES, tokens };
        block.multiply(rows, &mut scratch.wide);
    }
    for (out, wide) in out.iter_mut().zip(scratch.wide.as_chunks::<4>().0) {
        // SAFETY: an array of four float64.
        *out = total(unsafe { _mm256_loadu_pd(wide.as_ptr()) });
    }
}

/// Widens part of a row, in the order in which products take it.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn decode_row(matrix: Matrix<'_>, row: usize, first: usize, out: &mut [f32]) {
    match matrix.weights() {
        Weights::Mxfp4 { .. } => {
            let row = Mxfp4Row::of(matrix, row);
            for (pair, out) in out.as_chunks_mut::<PAIR>().0.iter_mut().enumerate() {
                for (step, values) in row.pair(first / PAIR + pair).into_iter().enumerate() {
                    // SAFETY: eight steps of eight places are the 64 of the pair.
                    unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(step * LANES), values) };
                }
            }
        }
        Weights::Bf16(_) | Weights::F32(_) => matrix.decode(row, first, out),
    }
}

/// One block of columns: a decoded panel and the matching part of every token.
struct Block<'a> {
    /// `[rows, BLOCK]`.
    panel: &'a [f32],
    /// Token `t` starts at `t * stride`.
    x: &'a [f32],
    stride: usize,
    /// Chain steps: columns of the block, padded, over [`LANES`].
    steps: usize,
    tokens: usize,
}

impl Block<'_> {
    /// Adds this block to `wide`, `[rows, tokens, 4]`.
    #[target_feature(enable = "avx2,fma")]
    fn multiply(&self, rows: usize, wide: &mut [f64]) {
        for token in (0..self.tokens).step_by(3) {
            for row in (0..rows).step_by(4) {
                match (rows - row, self.tokens - token) {
                    (4.., 3..) => self.corner::<4, 3>(row, token, wide),
                    (4.., 2) => self.corner::<4, 2>(row, token, wide),
                    (4.., _) => self.corner::<4, 1>(row, token, wide),
                    (rest, 3..) => {
                        (0..rest).for_each(|i| self.corner::<1, 3>(row + i, token, wide))
                    }
                    (rest, 2) => (0..rest).for_each(|i| self.corner::<1, 2>(row + i, token, wide)),
                    (rest, _) => (0..rest).for_each(|i| self.corner::<1, 1>(row + i, token, wide)),
                }
            }
        }
    }

    /// `R` rows by `T` tokens, their chains all in registers.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn corner<const R: usize, const T: usize>(&self, row: usize, token: usize, wide: &mut [f64]) {
        assert!((row + R) * BLOCK <= self.panel.len() && self.steps <= CHAIN);
        assert!((token + T - 1) * self.stride + self.steps * LANES <= self.x.len());
        assert!(((row + R - 1) * self.tokens + token + T) * 4 <= wide.len());
        let mut lanes = [[_mm256_setzero_ps(); T]; R];
        for step in 0..self.steps {
            let x: [__m256; T] = std::array::from_fn(|t| {
                let start = (token + t) * self.stride + step * LANES;
                // SAFETY: the second assertion.
                unsafe { _mm256_loadu_ps(self.x.as_ptr().add(start)) }
            });
            for (r, lanes) in lanes.iter_mut().enumerate() {
                let start = (row + r) * BLOCK + step * LANES;
                // SAFETY: the first assertion.
                let weights = unsafe { _mm256_loadu_ps(self.panel.as_ptr().add(start)) };
                for (lane, x) in lanes.iter_mut().zip(x) {
                    *lane = _mm256_fmadd_ps(weights, x, *lane);
                }
            }
        }
        for (r, lanes) in lanes.into_iter().enumerate() {
            for (t, lane) in lanes.into_iter().enumerate() {
                let start = ((row + r) * self.tokens + token + t) * 4;
                // SAFETY: the third assertion.
                unsafe {
                    let wide = wide.as_mut_ptr().add(start);
                    _mm256_storeu_pd(wide, fold(lane, _mm256_loadu_pd(wide)));
                }
            }
        }
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
fn total(wide: __m256d) -> f32 {
    let pairs = _mm_add_pd(_mm256_castpd256_pd128(wide), _mm256_extractf128_pd::<1>(wide));
    _mm_cvtsd_f64(_mm_add_sd(pairs, _mm_unpackhi_pd(pairs, pairs))) as f32
}

/// Up to seven values, filled up with zeros.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn load_tail(values: &[f32]) -> __m256 {
    let mut padded = [0.0; LANES];
    padded[..values.len()].copy_from_slice(values);
    // SAFETY: an array of eight floats.
    unsafe { _mm256_loadu_ps(padded.as_ptr()) }
}

/// See [`crate::kernels::scalar::weighted_sum`], whose bits these are.
#[target_feature(enable = "avx2,fma")]
pub(crate) fn weighted_sum(matrix: Matrix<'_>, factors: &[f32], tokens: usize, out: &mut [f32]) {
    let (rows, columns) = (matrix.rows(), matrix.columns());
    assert!(factors.len() == tokens * rows && out.len() == tokens * columns);
    let padded = columns.next_multiple_of(LANES);
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.panel.clear();
        scratch.panel.resize((CHAIN * padded).max(PANEL_ROWS * BLOCK), 0.0);
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
