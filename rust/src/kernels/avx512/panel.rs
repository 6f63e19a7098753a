//! Several tokens: a panel of rows is decoded once, two rows to a register, and
//! multiplied with all of them, several of both at a time in registers.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use crate::kernels::avx2::mxfp4::Mxfp4Row;
use crate::kernels::avx2::panel::{block_columns, blocks};
use crate::kernels::avx2::plain::{Bf16Row, F32Row, PlainRow, load_rest};
use crate::kernels::avx512::mxfp4::{Scales, decode_halves, decode_values, load};
use crate::kernels::avx512::{fold, join, totals};
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::PAIR;
use crate::kernels::scalar::{BLOCK, LANES, SCALED};

/// Registers of a panel: with the tokens beside it, it stays in the first-level
/// cache.
const PANEL: usize = 256;

/// Steps of a pair.
const PAIR_STEPS: usize = PAIR / LANES;

/// One register: eight lanes of each of two rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 2 * LANES]);

/// Four float64 sums of each of two rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Wide([f64; LANES]);

/// Buffers that are kept by each thread between calls.
#[derive(Default)]
struct Scratch {
    /// Decoded weights, `[row pairs, steps]`.
    panel: Vec<Line>,
    /// The scale of each lane, `[row pairs, pairs]`; MXFP4 only.
    scales: Vec<Line>,
    /// `[tokens, block]`, only for a last block that is not whole lanes.
    x: Vec<f32>,
    /// `[row pairs, tokens]`.
    wide: Vec<Wide>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All rows of `matrix` with all tokens, whose `x` is arranged.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let rows = PANEL / (block_columns(matrix) / LANES) * 2;
    SCRATCH.with_borrow_mut(|scratch| {
        for first in (0..matrix.rows()).step_by(rows) {
            let last = matrix.rows().min(first + rows);
            let out = &mut out[first * tokens..last * tokens];
            dot_panel(matrix.row_range(first..last), x, tokens, out, scratch);
        }
    });
}

/// At most a panel of rows with all tokens.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn dot_panel(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32], scratch: &mut Scratch) {
    let (row_pairs, columns) = (matrix.rows().div_ceil(2), matrix.arranged_columns());
    let width = block_columns(matrix);
    scratch.panel.resize(PANEL, Line([0.0; 2 * LANES]));
    scratch.scales.resize(PANEL / PAIR_STEPS, Line([0.0; 2 * LANES]));
    scratch.wide.clear();
    scratch.wide.resize(row_pairs * tokens, Wide([0.0; LANES]));
    for (first, block) in blocks(matrix) {
        let steps = block.div_ceil(LANES);
        let panel = &mut scratch.panel[..];
        let scales = match matrix.weights() {
            Weights::Bf16(bytes) => {
                decode::<Bf16Row>(bytes, columns, first, block, panel);
                None
            }
            Weights::F32(bytes) => {
                decode::<F32Row>(bytes, columns, first, block, panel);
                None
            }
            Weights::Mxfp4 { .. } => {
                decode_mxfp4(matrix, first, block, panel, &mut scratch.scales);
                Some(&scratch.scales[..])
            }
        };
        let (x, stride) = if block.is_multiple_of(LANES) {
            (&x[first..], columns)
        } else {
            let padded = steps * LANES;
            scratch.x.resize(tokens * width, 0.0);
            for token in 0..tokens {
                let copy = &mut scratch.x[token * width..][..padded];
                copy[..block].copy_from_slice(&x[token * columns + first..][..block]);
                copy[block..].fill(0.0);
            }
            (&scratch.x[..], width)
        };
        let panel = &scratch.panel[..];
        let after = first + block;
        let next = match matrix.weights() {
            Weights::Bf16(bytes) => Some(Next::of::<Bf16Row>(bytes, columns, after)),
            Weights::F32(bytes) => Some(Next::of::<F32Row>(bytes, columns, after)),
            Weights::Mxfp4 { .. } => None,
        };
        let width = width / LANES;
        let block = Block { panel, width, scales, x, stride, steps, tokens, next };
        block.multiply(row_pairs, &mut scratch.wide);
    }
    for (out, wide) in out.chunks_mut(2 * tokens).zip(scratch.wide.chunks_exact(tokens)) {
        for (token, wide) in wide.iter().enumerate() {
            // SAFETY: eight float64.
            let totals = totals(unsafe { _mm512_load_pd(wide.0.as_ptr()) });
            for (row, total) in totals.into_iter().enumerate() {
                if let Some(out) = out.get_mut(row * tokens + token) {
                    *out = total;
                }
            }
        }
    }
}

/// Widens columns `first..first + width` of every row, filled up with zeros to
/// whole lanes. The last row of an odd number is its own companion.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode<Row: PlainRow>(
    bytes: &[u8],
    columns: usize,
    first: usize,
    width: usize,
    panel: &mut [Line],
) {
    let (whole, rest) = (width / LANES, width % LANES);
    let row_bytes = columns * Row::BYTES;
    let part = |row: &'_ [u8]| row[first * Row::BYTES..][..width * Row::BYTES].as_ptr();
    for (rows, panel) in bytes.chunks(2 * row_bytes).zip(panel.chunks_exact_mut(BLOCK / LANES)) {
        let rows = [&rows[..row_bytes], &rows[rows.len() - row_bytes..]];
        let starts = rows.map(part);
        for (step, line) in panel.iter_mut().take(whole).enumerate() {
            let [first, second] = starts.map(|start| {
                // SAFETY: the row has at least `whole` times eight columns.
                let stored = unsafe { start.add(step * LANES * Row::BYTES) };
                // SAFETY: as above.
                unsafe { Row::load(stored) }
            });
            store(join(first, second), line);
        }
        if rest > 0 {
            let tail = (first + width - rest) * Row::BYTES..(first + width) * Row::BYTES;
            let [first, second] = rows.map(|row| load_rest::<Row>(&row[tail.clone()]));
            store(join(first, second), &mut panel[whole]);
        }
    }
}

/// Decodes places `first..first + width` of every row, with the scale of each
/// lane for each pair, and asks for those of the next block.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_mxfp4(
    matrix: Matrix<'_>,
    first: usize,
    width: usize,
    panel: &mut [Line],
    scales: &mut [Line],
) {
    let panels = panel.chunks_exact_mut(SCALED * PAIR_STEPS).zip(scales.chunks_exact_mut(SCALED));
    for (pair, (panel, lane_scales)) in panels.take(matrix.rows().div_ceil(2)).enumerate() {
        let rows = [2 * pair, (2 * pair + 1).min(matrix.rows() - 1)];
        let [one, two] = rows.map(|row| Mxfp4Row::of(matrix, row));
        let first = first / PAIR;
        let places = panel.as_chunks_mut::<PAIR_STEPS>().0.iter_mut().zip(lane_scales);
        if let Some((half_one, half_two)) =
            one.half.zip(two.half).filter(|_| first == one.pairs.len())
        {
            let decoded = decode_halves(half_one, half_two);
            places.take(1).for_each(|place| store_pair(decoded, place));
            continue;
        }
        let range = first..one.pairs.len().min(first + width / PAIR);
        let scales = Scales::decode(&one.scales[range.clone()], &two.scales[range.clone()]);
        let packed = one.pairs[range.clone()].iter().zip(&two.pairs[range]);
        for (index, ((one, two), place)) in packed.zip(places).enumerate() {
            let values = decode_values(load(one, two, SCALED * PAIR / 2));
            store_pair((values, scales.of_pair(index)), place);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store_pair(
    decoded: ([__m512; PAIR_STEPS], __m512),
    place: (&mut [Line; PAIR_STEPS], &mut Line),
) {
    store(decoded.1, place.1);
    for (values, line) in decoded.0.into_iter().zip(place.0) {
        store(values, line);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store(lanes: __m512, line: &mut Line) {
    // SAFETY: sixteen floats.
    unsafe { _mm512_store_ps(line.0.as_mut_ptr(), lanes) };
}

/// The stored rows from the next block on.
#[derive(Clone, Copy)]
struct Next<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    block_bytes: usize,
}

impl<'a> Next<'a> {
    fn of<Row: PlainRow>(bytes: &'a [u8], columns: usize, first: usize) -> Self {
        let bytes = &bytes[first * Row::BYTES..];
        Next { bytes, row_bytes: columns * Row::BYTES, block_bytes: BLOCK * Row::BYTES }
    }

    /// Asks for the next block of `rows`. Comes between products, because the
    /// requests of all rows at once would wait for each other; and not into the
    /// first level, which panel and tokens fill.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn ask(self, rows: Range<usize>) {
        for row in rows {
            for line in (0..self.block_bytes).step_by(64) {
                let place = self.bytes.as_ptr().wrapping_add(row * self.row_bytes + line);
                _mm_prefetch::<_MM_HINT_T1>(place.cast());
            }
        }
    }
}

/// One block of columns: a decoded panel and the matching part of every token.
struct Block<'a> {
    /// Row pair `r` starts at `r * width`.
    panel: &'a [Line],
    width: usize,
    /// The lanes' scales for each pair of each row pair; MXFP4 only.
    scales: Option<&'a [Line]>,
    /// Token `t` starts at `t * stride`.
    x: &'a [f32],
    stride: usize,
    steps: usize,
    tokens: usize,
    /// Not for MXFP4, whose decoder asks for what comes next.
    next: Option<Next<'a>>,
}

impl Block<'_> {
    /// Adds this block to `wide`, `[row pairs, tokens]`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(&self, row_pairs: usize, wide: &mut [Wide]) {
        let most = if self.scales.is_none() { 6 } else { 4 };
        let mut token = 0;
        while token < self.tokens {
            // Evenly, because few tokens leave units idle.
            let left = self.tokens - token;
            let together = left.div_ceil(left.div_ceil(most));
            match together {
                6 => self.corners::<6>(row_pairs, token, wide),
                5 => self.corners::<5>(row_pairs, token, wide),
                4 => self.corners::<4>(row_pairs, token, wide),
                3 => self.corners::<3>(row_pairs, token, wide),
                2 => self.corners::<2>(row_pairs, token, wide),
                _ => self.corners::<1>(row_pairs, token, wide),
            }
            token += together;
        }
    }

    /// All row pairs by `T` tokens.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn corners<const T: usize>(&self, row_pairs: usize, token: usize, wide: &mut [Wide]) {
        let fours = row_pairs / 4 * 4;
        for row in (0..fours).step_by(4) {
            if let Some(next) = self.next.filter(|_| token == 0) {
                next.ask(2 * row..2 * row + 8);
            }
            self.corner::<4, T>(row, token, wide);
        }
        for row in fours..row_pairs {
            self.corner::<1, T>(row, token, wide);
        }
    }

    /// `R` row pairs by `T` tokens.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn corner<const R: usize, const T: usize>(&self, row: usize, token: usize, wide: &mut [Wide]) {
        assert!((row + R - 1) * self.width + self.steps <= self.panel.len());
        assert!((token + T - 1) * self.stride + self.steps * LANES <= self.x.len());
        assert!((row + R - 1) * self.tokens + token + T <= wide.len());
        let lanes = match self.scales {
            // SAFETY: the first two assertions.
            None => unsafe { self.chains::<R, T>(row, token, 0, self.steps) },
            Some(scales) => {
                let pairs = self.steps / PAIR_STEPS;
                assert!((row + R - 1) * SCALED + pairs <= scales.len());
                let mut sums = [[_mm512_setzero_ps(); T]; R];
                for pair in 0..pairs {
                    // SAFETY: the first two assertions.
                    let chains =
                        unsafe { self.chains::<R, T>(row, token, pair * PAIR_STEPS, PAIR_STEPS) };
                    for (r, (sums, chains)) in sums.iter_mut().zip(chains).enumerate() {
                        // SAFETY: the assertion above.
                        let scales = unsafe { scales.get_unchecked((row + r) * SCALED + pair) };
                        // SAFETY: sixteen floats.
                        let scales = unsafe { _mm512_load_ps(scales.0.as_ptr()) };
                        for (sum, chain) in sums.iter_mut().zip(chains) {
                            *sum = _mm512_fmadd_ps(scales, chain, *sum);
                        }
                    }
                }
                sums
            }
        };
        for (r, lanes) in lanes.into_iter().enumerate() {
            for (t, lanes) in lanes.into_iter().enumerate() {
                // SAFETY: the third assertion, and a line is eight float64.
                unsafe {
                    let wide = wide.get_unchecked_mut((row + r) * self.tokens + token + t);
                    let wide = wide.0.as_mut_ptr();
                    _mm512_store_pd(wide, fold(lanes, _mm512_load_pd(wide)));
                }
            }
        }
    }

    /// The chains of `R` row pairs by `T` tokens over `steps` from `first`, all
    /// in registers.
    ///
    /// # Safety
    /// The steps of these rows and tokens must be inside the panel and `x`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn chains<const R: usize, const T: usize>(
        &self,
        row: usize,
        token: usize,
        first: usize,
        steps: usize,
    ) -> [[__m512; T]; R] {
        let mut lanes = [[_mm512_setzero_ps(); T]; R];
        for step in first..first + steps {
            let weights: [__m512; R] = std::array::from_fn(|r| {
                // SAFETY: as the caller vouches; a line is sixteen floats.
                unsafe {
                    let line = self.panel.get_unchecked((row + r) * self.width + step);
                    _mm512_load_ps(line.0.as_ptr())
                }
            });
            for t in 0..T {
                let start = (token + t) * self.stride + step * LANES;
                // SAFETY: as the caller vouches.
                let x = unsafe { _mm256_loadu_ps(self.x.as_ptr().add(start)) };
                let x = _mm512_broadcast_f32x8(x);
                for (lanes, weights) in lanes.iter_mut().zip(weights) {
                    lanes[t] = _mm512_fmadd_ps(weights, x, lanes[t]);
                }
            }
        }
        lanes
    }
}
