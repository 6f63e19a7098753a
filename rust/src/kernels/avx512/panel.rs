//! Several tokens: a panel of rows is decoded once, two rows to a register, and
//! multiplied with all of them, several of both at a time in registers.

use std::arch::x86_64::*;
use std::cell::RefCell;

use crate::kernels::aligned::{CACHE_LINE, LINE_FLOATS};
use crate::kernels::avx2::mxfp4::ask;
use crate::kernels::avx2::plain::{Bf16Row, F32Row, LastGroup};
use crate::kernels::avx512::mxfp4::decode_block;
use crate::kernels::avx512::plain::PlainRows;
use crate::kernels::avx512::{fold, totals};
use crate::kernels::bf16::GROUP;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::{BLOCK_BYTES, BlockRows};
use crate::kernels::scalar::{BLOCK, CHAIN, LANES, SUMMED};

/// Row pairs of a panel: few for few tokens, so that both stay in the first-level
/// cache. The more tokens, the more rows: the tokens are read again for each panel, and
/// many of them only fit the caches further out.
fn panel_pairs(tokens: usize) -> usize {
    (tokens / 4).next_power_of_two().clamp(4, 8)
}

/// Tokens whose parts of a block come soon enough from the second-level cache by
/// themselves. Those of more are asked for so many steps early.
const NEAR_TOKENS: usize = 48;
const STEPS_AHEAD: usize = 8;

/// Steps of a token in a cache line.
const STEPS_OF_LINE: usize = LINE_FLOATS / LANES;

/// One register: eight lanes of each of two rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 2 * LANES]);

impl Line {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn load(&self) -> __m512 {
        // SAFETY: sixteen floats.
        unsafe { _mm512_load_ps(self.0.as_ptr()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn store(&mut self, lanes: __m512) {
        // SAFETY: sixteen floats.
        unsafe { _mm512_store_ps(self.0.as_mut_ptr(), lanes) };
    }
}

/// Four float64 sums of each of two rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Wide([f64; LANES]);

impl Wide {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn load(&self) -> __m512d {
        // SAFETY: eight float64.
        unsafe { _mm512_load_pd(self.0.as_ptr()) }
    }
}

/// Buffers that are kept by each thread between calls.
#[derive(Default)]
struct Scratch {
    /// Decoded weights, `[row pairs, steps]`.
    panel: Vec<Line>,
    /// The scale of each lane, `[row pairs]`; MXFP4 only.
    scales: Vec<Line>,
    /// `[row pairs, tokens]`.
    sums: Vec<Line>,
    /// `[row pairs, tokens]`.
    wide: Vec<Wide>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All rows of `matrix` with all tokens, whose `x` is arranged.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let rows = 2 * panel_pairs(tokens);
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
    let stride = matrix.arranged_columns();
    let split = Split::of(tokens);
    let zero = Line([0.0; 2 * LANES]);
    scratch.panel.resize((row_pairs * CHAIN).max(scratch.panel.len()), zero);
    scratch.scales.resize(row_pairs.max(scratch.scales.len()), zero);
    scratch.sums.clear();
    scratch.sums.resize(row_pairs * tokens, zero);
    // Only for sums that start again.
    scratch.wide.clear();
    if stride > SUMMED * BLOCK {
        scratch.wide.resize(row_pairs * tokens, Wide([0.0; LANES]));
    }
    for first in (0..stride).step_by(BLOCK) {
        let width = BLOCK.min(stride - first);
        let stored = width.min(columns - first);
        let panel = &mut scratch.panel[..];
        let (scales, next) = match matrix.weights() {
            Weights::Bf16(bytes) => {
                decode::<Bf16Row>(bytes, columns, first, stored, panel);
                (None, Some(Next::after(bytes, columns, first / BLOCK)))
            }
            Weights::F32(bytes) => {
                decode::<F32Row>(bytes, columns, first, stored, panel);
                (None, None)
            }
            Weights::Mxfp4 { .. } => {
                decode_mxfp4(matrix, first / BLOCK, panel, &mut scratch.scales);
                (Some(&scratch.scales[..]), None)
            }
        };
        let (panel, x) = (&scratch.panel[..], &x[first..]);
        let block = Block { panel, scales, x, stride, steps: width / LANES, tokens, split, next };
        block.multiply(row_pairs, &mut scratch.sums);
        let end = first + BLOCK;
        if end.is_multiple_of(SUMMED * BLOCK) && end < stride {
            fold_all(&mut scratch.sums, &mut scratch.wide);
        }
    }
    let wide = &scratch.wide[..];
    for (pair, out) in out.chunks_mut(2 * tokens).enumerate() {
        let of_pair = pair * tokens..(pair + 1) * tokens;
        let (sums, wide) = (&scratch.sums[of_pair.clone()], wide.get(of_pair));
        let (first, second) = out.split_at_mut(tokens);
        write_totals(sums, wide, first, second);
    }
}

/// Moves the float32 sums into the float64 ones.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fold_all(sums: &mut [Line], wide: &mut [Wide]) {
    for (sums, wide) in sums.iter_mut().zip(wide) {
        let folded = fold(sums.load(), wide.load());
        // SAFETY: eight float64.
        unsafe { _mm512_store_pd(wide.0.as_mut_ptr(), folded) };
        sums.store(_mm512_setzero_ps());
    }
}

/// Folds the sums of two rows with all tokens, and writes the totals of each row.
/// `second` is empty where the last row is its own companion.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn write_totals(sums: &[Line], wide: Option<&[Wide]>, first: &mut [f32], second: &mut [f32]) {
    let folded = |token: usize| {
        let before = wide.map_or(_mm512_setzero_pd(), |wide| wide[token].load());
        fold(sums[token].load(), before)
    };
    let (fours, rest) = first.as_chunks_mut::<4>();
    let rest_start = fours.len() * 4;
    for (index, first) in fours.iter_mut().enumerate() {
        let token = 4 * index;
        let four = [folded(token), folded(token + 1), folded(token + 2), folded(token + 3)];
        let [one, two] = four_totals(four);
        // SAFETY: four floats.
        unsafe { _mm_storeu_ps(first.as_mut_ptr(), one) };
        if let Some(second) = second.get_mut(token..token + 4) {
            // SAFETY: as above.
            unsafe { _mm_storeu_ps(second.as_mut_ptr(), two) };
        }
    }
    for (index, first) in rest.iter_mut().enumerate() {
        let token = rest_start + index;
        let [one, two] = totals(folded(token));
        *first = one;
        if let Some(second) = second.get_mut(token) {
            *second = two;
        }
    }
}

/// [`totals`] of two rows with four tokens, a register a row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn four_totals([a, b, c, d]: [__m512d; 4]) -> [__m128; 2] {
    // Sums 0 and 1 of both rows of both tokens, and sums 2 and 3.
    let pairs = |a, b| {
        let low = _mm512_shuffle_f64x2::<0x88>(a, b);
        _mm512_add_pd(low, _mm512_shuffle_f64x2::<0xdd>(a, b))
    };
    let (ab, cd) = (pairs(a, b), pairs(c, d));
    let totals = _mm512_add_pd(_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd));
    // Tokens a and c of each row, then b and d.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let totals = _mm256_permutevar8x32_ps(_mm512_cvtpd_ps(totals), order);
    [_mm256_castps256_ps128(totals), _mm256_extractf128_ps::<1>(totals)]
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
    for (rows, panel) in bytes.chunks(2 * row_bytes).zip(panel.chunks_exact_mut(CHAIN)) {
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
        line.store(lanes);
    }
}

/// Decodes block `block` of every row, with the scale of each lane, and asks for the
/// bytes of a later one.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn decode_mxfp4(matrix: Matrix<'_>, block: usize, panel: &mut [Line], scales: &mut [Line]) {
    let stored = BlockRows::of(matrix);
    let panel_bytes = matrix.rows() * matrix.columns() / 2;
    let ahead = later_place(block, stored.whole(), BLOCK_BYTES, panel_bytes) - block * BLOCK_BYTES;
    let places = panel.as_chunks_mut::<CHAIN>().0.iter_mut().zip(scales);
    for (pair, (panel, lane_scales)) in places.take(matrix.rows().div_ceil(2)).enumerate() {
        let (one, two) = (2 * pair, (2 * pair + 1).min(matrix.rows() - 1));
        let scales = if block < stored.whole() {
            let (one, two) = (stored.block(one, block), stored.block(two, block));
            ask(one, ahead);
            ask(two, ahead);
            decode_block([one, two], panel)
        } else {
            decode_block([stored.last(one).stored(), stored.last(two).stored()], panel)
        };
        lane_scales.store(scales);
    }
}

/// How far from its first byte a panel's first row has the block after the next of
/// `block`; behind the last of `blocks`, the first row of the panel that follows has it.
fn later_place(block: usize, blocks: usize, block_bytes: usize, panel_bytes: usize) -> usize {
    let later = block + 2;
    match later.checked_sub(blocks) {
        None => later * block_bytes,
        Some(later) => panel_bytes + later * block_bytes,
    }
}

/// Where a later block of rows of bfloat16 is stored. The steps of the first one or
/// two corners of eight rows ask for its cache lines, two or one a step, because many
/// requests at once would wait for each other.
#[derive(Clone, Copy)]
struct Next {
    start: *const u8,
    row_bytes: usize,
}

impl Next {
    /// Cache lines of a block of a row.
    const LINES: usize = BLOCK * 2 / CACHE_LINE;

    const NONE: Next = Next { start: std::ptr::null(), row_bytes: 0 };

    /// After `block` of a panel of rows.
    fn after(rows: &[u8], columns: usize, block: usize) -> Self {
        let place = later_place(block, columns.div_ceil(BLOCK), BLOCK * 2, rows.len());
        Next { start: rows.as_ptr().wrapping_add(place), row_bytes: columns * 2 }
    }

    /// Of the rows from `row` on.
    fn of(self, row: usize) -> Self {
        Next { start: self.start.wrapping_add(row * self.row_bytes), ..self }
    }

    /// Asks for line `line` of the first `ROWS` rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn ask<const ROWS: usize>(self, line: usize) {
        for row in 0..ROWS {
            let place = self.start.wrapping_add(row * self.row_bytes + line * CACHE_LINE);
            _mm_prefetch::<_MM_HINT_T0>(place.cast());
        }
    }
}

/// How many tokens are multiplied together: at most six, and evenly, because few leave
/// units idle.
#[derive(Clone, Copy)]
struct Split {
    corners: usize,
    /// Of each corner; one more of the first `longer`.
    tokens: usize,
    longer: usize,
}

impl Split {
    fn of(tokens: usize) -> Self {
        let corners = tokens.div_ceil(6);
        Split { corners, tokens: tokens / corners, longer: tokens % corners }
    }
}

/// One block of columns: a decoded panel and the matching part of every token.
struct Block<'a> {
    /// Row pair `r` starts at `r * CHAIN`.
    panel: &'a [Line],
    /// The lanes' scales of each row pair; MXFP4 only.
    scales: Option<&'a [Line]>,
    /// Token `t` starts at `t * stride`.
    x: &'a [f32],
    stride: usize,
    steps: usize,
    tokens: usize,
    split: Split,
    /// Only for bfloat16: the decoder of MXFP4 asks for what comes next, and float32
    /// is what this process has computed.
    next: Option<Next>,
}

impl Block<'_> {
    /// Adds this block to `sums`, `[row pairs, tokens]`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn multiply(&self, row_pairs: usize, sums: &mut [Line]) {
        let Split { corners, tokens, longer } = self.split;
        let asking = corners.min(2);
        let mut token = 0;
        for corner in 0..corners {
            let next = self.next.filter(|_| corner < asking);
            let next = next.map(|next| next.of(corner * 8 / asking));
            let together = tokens + usize::from(corner < longer);
            match together {
                6 => self.corners::<6>(row_pairs, token, next, sums),
                5 => self.corners::<5>(row_pairs, token, next, sums),
                4 => self.corners::<4>(row_pairs, token, next, sums),
                3 => self.corners::<3>(row_pairs, token, next, sums),
                2 => self.corners::<2>(row_pairs, token, next, sums),
                _ => self.corners::<1>(row_pairs, token, next, sums),
            }
            token += together;
        }
    }

    /// All row pairs, four at a time, by `T` tokens, which thus stay in the first-level
    /// cache, asking for the lines of `next`: of eight rows if no other tokens can, else
    /// of four.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn corners<const T: usize>(
        &self,
        row_pairs: usize,
        token: usize,
        next: Option<Next>,
        sums: &mut [Line],
    ) {
        let whole = row_pairs - row_pairs % 4;
        // Later rows find these tokens in the first-level cache.
        let far = T >= 5 && self.tokens > NEAR_TOKENS;
        for row in (0..whole).step_by(4) {
            match next.map(|next| next.of(2 * row)) {
                Some(next) if T == self.tokens => {
                    self.products::<4, T, 2, false>(row, token, next, sums);
                }
                Some(next) => self.products::<4, T, 1, false>(row, token, next, sums),
                None if far && row == 0 => {
                    self.products::<4, T, 0, true>(row, token, Next::NONE, sums);
                }
                None => self.products::<4, T, 0, false>(row, token, Next::NONE, sums),
            }
        }
        for row in whole..row_pairs {
            self.products::<1, T, 0, false>(row, token, Next::NONE, sums);
        }
    }

    /// `R` row pairs by `T` tokens, asking for lines of `ASK` rows of `next` at each
    /// step, and of these tokens' later steps if they are `FAR`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn products<const R: usize, const T: usize, const ASK: usize, const FAR: bool>(
        &self,
        row: usize,
        token: usize,
        next: Next,
        sums: &mut [Line],
    ) {
        assert!((row + R - 1) * CHAIN + self.steps <= self.panel.len());
        assert!((token + T - 1) * self.stride + self.steps * LANES <= self.x.len());
        assert!((row + R - 1) * self.tokens + token + T <= sums.len());
        // SAFETY: the first two assertions.
        let chains = unsafe { self.chains::<R, T, ASK, FAR>(row, token, next) };
        for (r, chains) in chains.into_iter().enumerate() {
            let scales = self.scales.map(|scales| scales[row + r].load());
            for (t, chain) in chains.into_iter().enumerate() {
                // SAFETY: the third assertion.
                let sums = unsafe { sums.get_unchecked_mut((row + r) * self.tokens + token + t) };
                sums.store(match scales {
                    Some(scales) => _mm512_fmadd_ps(scales, chain, sums.load()),
                    None => _mm512_add_ps(sums.load(), chain),
                });
            }
        }
    }

    /// The chains of `R` row pairs by `T` tokens, all in registers.
    ///
    /// # Safety
    /// These rows and tokens must be inside the panel and `x`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn chains<const R: usize, const T: usize, const ASK: usize, const FAR: bool>(
        &self,
        row: usize,
        token: usize,
        next: Next,
    ) -> [[__m512; T]; R] {
        let mut lanes = [[_mm512_setzero_ps(); T]; R];
        for (index, first) in (0..self.steps).step_by(Next::LINES).enumerate() {
            let next = next.of(index * ASK);
            for step in first..self.steps.min(first + Next::LINES) {
                next.ask::<ASK>(step - first);
                let weights: [__m512; R] = std::array::from_fn(|r| {
                    // SAFETY: as the caller vouches.
                    unsafe { self.panel.get_unchecked((row + r) * CHAIN + step) }.load()
                });
                for t in 0..T {
                    let start = (token + t) * self.stride + step * LANES;
                    if FAR && step.is_multiple_of(STEPS_OF_LINE) {
                        let later = self.x.as_ptr().wrapping_add(start + STEPS_AHEAD * LANES);
                        _mm_prefetch::<_MM_HINT_T0>(later.cast());
                    }
                    // SAFETY: as the caller vouches.
                    let x = unsafe { _mm256_loadu_ps(self.x.as_ptr().add(start)) };
                    let x = _mm512_broadcast_f32x8(x);
                    for (lanes, weights) in lanes.iter_mut().zip(weights) {
                        lanes[t] = _mm512_fmadd_ps(weights, x, lanes[t]);
                    }
                }
            }
        }
        lanes
    }
}
