//! Several tokens: a panel of rows is decoded once, two rows to a register, and
//! multiplied with all of them, several of both at a time in registers.

use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

use crate::kernels::avx2::mxfp4::Mxfp4Row;
use crate::kernels::avx2::panel::{block_columns, blocks};
use crate::kernels::avx2::plain::{Bf16Row, F32Row, LastGroup};
use crate::kernels::avx512::mxfp4::{Scales, decode_halves, decode_values, load};
use crate::kernels::avx512::plain::PlainRows;
use crate::kernels::avx512::{fold, totals};
use crate::kernels::bf16::GROUP;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::PAIR;
use crate::kernels::scalar::{BLOCK, LANES, SCALED};

/// Registers of a panel: for few tokens eight rows of a block, which with the tokens
/// beside them stay in the first-level cache. The more tokens, the more rows: the
/// tokens are read again for each panel, and many of them only fit the caches further out.
fn panel_lines(tokens: usize) -> usize {
    (16 * tokens).next_power_of_two().clamp(256, 2048)
}

/// Bytes that a CPU fetches at once.
const CACHE_LINE: usize = 64;

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
    /// `[row pairs, tokens]`.
    wide: Vec<Wide>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All rows of `matrix` with all tokens, whose `x` is arranged.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let rows = panel_lines(tokens) / (block_columns(matrix) / LANES) * 2;
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
    let (row_pairs, columns) = (matrix.rows().div_ceil(2), matrix.columns());
    let (width, stride) = (block_columns(matrix), matrix.arranged_columns());
    let lines = panel_lines(tokens).max(scratch.panel.len());
    scratch.panel.resize(lines, Line([0.0; 2 * LANES]));
    scratch.scales.resize(lines / PAIR_STEPS, Line([0.0; 2 * LANES]));
    scratch.wide.clear();
    scratch.wide.resize(row_pairs * tokens, Wide([0.0; LANES]));
    for (first, block) in blocks(matrix) {
        let steps = block.next_multiple_of(GROUP) / LANES;
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
        let (panel, x) = (&scratch.panel[..], &x[first..]);
        let next = match matrix.weights() {
            Weights::Bf16(bytes) => Some(Next::after(&bytes[(first + block) * 2..], columns)),
            Weights::F32(_) | Weights::Mxfp4 { .. } => None,
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
/// whole groups. The last row of an odd number is its own companion.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode<Row: PlainRows>(
    bytes: &[u8],
    columns: usize,
    first: usize,
    width: usize,
    panel: &mut [Line],
) {
    let (whole, rest) = (width / GROUP, width % GROUP);
    let row_bytes = columns * Row::BYTES;
    for (rows, panel) in bytes.chunks(2 * row_bytes).zip(panel.chunks_exact_mut(BLOCK / LANES)) {
        let rows = [&rows[..row_bytes], &rows[rows.len() - row_bytes..]]
            .map(|row| &row[first * Row::BYTES..][..width * Row::BYTES]);
        let groups = panel.as_chunks_mut::<{ GROUP / LANES }>().0;
        for (group, out) in groups.iter_mut().take(whole).enumerate() {
            let start = group * GROUP * Row::BYTES;
            // SAFETY: the rows have at least `whole` groups.
            let [first, second] = rows.map(|row| unsafe { row.as_ptr().add(start) });
            // SAFETY: as above.
            store_group(unsafe { Row::widen(first, second) }, out);
        }
        if rest > 0 {
            let [first, second] =
                rows.map(|row| LastGroup::of(&row[(width - rest) * Row::BYTES..]));
            // SAFETY: whole groups.
            let widened = unsafe { Row::widen(first.as_ptr(), second.as_ptr()) };
            store_group(widened, &mut groups[whole]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn store_group(widened: [__m512; GROUP / LANES], out: &mut [Line; GROUP / LANES]) {
    for (lanes, line) in widened.into_iter().zip(out) {
        store(lanes, line);
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

/// Where the next block of rows of bfloat16 is stored. Each step of the first one or
/// two corners of eight rows asks for two or one of its cache lines, because many
/// requests at once would wait for each other.
#[derive(Clone, Copy)]
struct Next {
    start: *const u8,
    row_bytes: usize,
    first_line: usize,
}

impl Next {
    /// Cache lines of a block of a row.
    const LINES: usize = BLOCK * 2 / CACHE_LINE;

    const NONE: Next = Next { start: std::ptr::null(), row_bytes: 0, first_line: 0 };

    /// Of the rows whose next block begins with `bytes`.
    fn after(bytes: &[u8], columns: usize) -> Self {
        Next { start: bytes.as_ptr(), row_bytes: columns * 2, first_line: 0 }
    }

    /// Of the eight rows from `row` on, without the first lines.
    fn of(self, row: usize, first_line: usize) -> Self {
        Next { start: self.start.wrapping_add(row * self.row_bytes), first_line, ..self }
    }

    /// Asks for `COUNT` lines; those of another step for others.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn ask<const COUNT: usize>(self, step: usize) {
        for line in 0..COUNT {
            let line = self.first_line + step * COUNT + line;
            let place = line / Next::LINES * self.row_bytes + line % Next::LINES * CACHE_LINE;
            _mm_prefetch::<_MM_HINT_T0>(self.start.wrapping_add(place).cast());
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
    /// Only for bfloat16: the decoder of MXFP4 asks for what comes next, and float32
    /// is what this process has computed.
    next: Option<Next>,
}

impl Block<'_> {
    /// Adds this block to `wide`, `[row pairs, tokens]`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(&self, row_pairs: usize, wide: &mut [Wide]) {
        let most = if self.scales.is_none() { 6 } else { 4 };
        let corners = self.tokens.div_ceil(most);
        let asking = corners.min(2);
        for row in (0..row_pairs).step_by(4) {
            let rows = row..row_pairs.min(row + 4);
            let mut token = 0;
            for corner in 0..corners {
                // Evenly, because few tokens leave units idle.
                let together = (self.tokens - token).div_ceil(corners - corner);
                let next = self.next.filter(|_| corner < asking);
                let next = next.map(|next| next.of(2 * row, corner * 8 * Next::LINES / asking));
                match together {
                    6 => self.corner::<6>(rows.clone(), token, next, wide),
                    5 => self.corner::<5>(rows.clone(), token, next, wide),
                    4 => self.corner::<4>(rows.clone(), token, next, wide),
                    3 => self.corner::<3>(rows.clone(), token, next, wide),
                    2 => self.corner::<2>(rows.clone(), token, next, wide),
                    _ => self.corner::<1>(rows.clone(), token, next, wide),
                }
                token += together;
            }
        }
    }

    /// Up to four row pairs by `T` tokens, asking for the lines of `next`: all of them
    /// if no other corner of these rows can, else one half.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn corner<const T: usize>(
        &self,
        rows: Range<usize>,
        token: usize,
        next: Option<Next>,
        wide: &mut [Wide],
    ) {
        match next {
            _ if rows.len() < 4 => {
                rows.for_each(|row| self.products::<1, T, 0>(row, token, Next::NONE, wide));
            }
            Some(next) if T == self.tokens => {
                self.products::<4, T, 2>(rows.start, token, next, wide);
            }
            Some(next) => self.products::<4, T, 1>(rows.start, token, next, wide),
            None => self.products::<4, T, 0>(rows.start, token, Next::NONE, wide),
        }
    }

    /// `R` row pairs by `T` tokens, asking for `ASK` lines of `next` at each step.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn products<const R: usize, const T: usize, const ASK: usize>(
        &self,
        row: usize,
        token: usize,
        next: Next,
        wide: &mut [Wide],
    ) {
        assert!((row + R - 1) * self.width + self.steps <= self.panel.len());
        assert!((token + T - 1) * self.stride + self.steps * LANES <= self.x.len());
        assert!((row + R - 1) * self.tokens + token + T <= wide.len());
        let lanes = match self.scales {
            // SAFETY: the first two assertions.
            None => unsafe { self.chains::<R, T, ASK>(row, token, 0..self.steps, next) },
            Some(scales) => {
                let pairs = self.steps / PAIR_STEPS;
                assert!((row + R - 1) * SCALED + pairs <= scales.len());
                let mut sums = [[_mm512_setzero_ps(); T]; R];
                for pair in 0..pairs {
                    let steps = pair * PAIR_STEPS..(pair + 1) * PAIR_STEPS;
                    // SAFETY: the first two assertions.
                    let chains = unsafe { self.chains::<R, T, ASK>(row, token, steps, next) };
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

    /// The chains of `R` row pairs by `T` tokens over `steps`, all in registers.
    ///
    /// # Safety
    /// The steps of these rows and tokens must be inside the panel and `x`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn chains<const R: usize, const T: usize, const ASK: usize>(
        &self,
        row: usize,
        token: usize,
        steps: Range<usize>,
        next: Next,
    ) -> [[__m512; T]; R] {
        let mut lanes = [[_mm512_setzero_ps(); T]; R];
        for step in steps {
            next.ask::<ASK>(step);
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
