//! Several tokens: a panel of rows is decoded once and multiplied with all of
//! them, four rows by three tokens at a time in registers.

use std::arch::x86_64::*;
use std::cell::RefCell;

use crate::kernels::avx2::mxfp4::{Mxfp4Row, decode_pair};
use crate::kernels::avx2::plain::{Bf16Row, F32Row, LastGroup, PlainRow};
use crate::kernels::avx2::{fold, total};
use crate::kernels::bf16::GROUP;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::PAIR;
use crate::kernels::scalar::{BLOCK, LANES, SCALED};

/// Floats of a panel: sixteen rows of a block, for which the tokens come once from the
/// second-level cache.
const PANEL: usize = 8192;

/// Buffers that are kept by each thread between calls.
#[derive(Default)]
pub(super) struct Scratch {
    /// Decoded weights, `[rows, block]`.
    pub(super) panel: Vec<f32>,
    /// The scale of each lane, `[rows, pairs, 8]`; MXFP4 only.
    scales: Vec<f32>,
    /// `[rows, tokens, 4]`.
    pub(super) wide: Vec<f64>,
}

thread_local! {
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All rows of `matrix` with all tokens, whose `x` is arranged.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    let block = block_columns(matrix);
    SCRATCH.with_borrow_mut(|scratch| {
        for first in (0..matrix.rows()).step_by(PANEL / block) {
            let last = matrix.rows().min(first + PANEL / block);
            let out = &mut out[first * tokens..last * tokens];
            dot_panel(matrix.row_range(first..last), x, tokens, out, scratch);
        }
    });
}

/// Columns of a block, which is folded into float64 at its end.
pub(in crate::kernels) fn block_columns(matrix: Matrix<'_>) -> usize {
    match matrix.weights() {
        Weights::Bf16(_) | Weights::F32(_) => BLOCK,
        Weights::Mxfp4 { .. } => SCALED * PAIR,
    }
}

/// Where the blocks of a row start, and their widths: a single group at the end
/// of an MXFP4 row is a block of its own.
pub(in crate::kernels) fn blocks(matrix: Matrix<'_>) -> impl Iterator<Item = (usize, usize)> {
    let (columns, block) = (matrix.columns(), block_columns(matrix));
    let whole = match matrix.weights() {
        Weights::Bf16(_) | Weights::F32(_) => columns,
        Weights::Mxfp4 { .. } => columns - columns % PAIR,
    };
    let single = (whole < columns).then_some((whole, PAIR));
    (0..whole).step_by(block).map(move |first| (first, block.min(whole - first))).chain(single)
}

/// At most a panel of rows with all tokens.
#[target_feature(enable = "avx2,fma")]
fn dot_panel(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32], scratch: &mut Scratch) {
    let (rows, columns, stride) = (matrix.rows(), matrix.columns(), matrix.arranged_columns());
    let block = block_columns(matrix);
    scratch.panel.resize(PANEL.max(scratch.panel.len()), 0.0);
    scratch.scales.resize(PANEL / PAIR * LANES, 0.0);
    scratch.wide.clear();
    scratch.wide.resize(rows * tokens * 4, 0.0);
    for (first, width) in blocks(matrix) {
        let panel = &mut scratch.panel[..];
        match matrix.weights() {
            Weights::Bf16(bytes) => decode::<Bf16Row>(bytes, columns, first, width, panel),
            Weights::F32(bytes) => decode::<F32Row>(bytes, columns, first, width, panel),
            Weights::Mxfp4 { .. } => decode_mxfp4(matrix, first, width, panel, &mut scratch.scales),
        }
        let scales = match matrix.weights() {
            Weights::Bf16(_) | Weights::F32(_) => None,
            Weights::Mxfp4 { .. } => Some(&scratch.scales[..]),
        };
        let steps = width.next_multiple_of(GROUP) / LANES;
        let (panel, x) = (&scratch.panel[..], &x[first..]);
        let block = Block { panel, width: block, scales, x, stride, steps, tokens };
        block.multiply(rows, &mut scratch.wide);
    }
    for (out, wide) in out.iter_mut().zip(scratch.wide.as_chunks::<4>().0) {
        // SAFETY: an array of four float64.
        *out = total(unsafe { _mm256_loadu_pd(wide.as_ptr()) });
    }
}

/// Widens columns `first..first + width` of every row, filled up with zeros to
/// whole groups, and asks for those of the next block.
#[target_feature(enable = "avx2,fma")]
fn decode<Row: PlainRow>(
    bytes: &[u8],
    columns: usize,
    first: usize,
    width: usize,
    panel: &mut [f32],
) {
    let (whole, rest) = (width / GROUP, width % GROUP);
    let rows = bytes.chunks_exact(columns * Row::BYTES);
    for (row, panel) in rows.zip(panel.chunks_exact_mut(BLOCK)) {
        let row = &row[first * Row::BYTES..][..width * Row::BYTES];
        let groups = panel.as_chunks_mut::<GROUP>().0;
        for (group, out) in groups.iter_mut().take(whole).enumerate() {
            // SAFETY: the row has at least `whole` groups.
            let stored = unsafe { row.as_ptr().add(group * GROUP * Row::BYTES) };
            if (group * GROUP * Row::BYTES).is_multiple_of(64) {
                let next = stored.wrapping_add(BLOCK * Row::BYTES);
                _mm_prefetch::<_MM_HINT_T0>(next.cast());
            }
            // SAFETY: as above.
            unsafe { widen::<Row>(stored, out) };
        }
        if rest > 0 {
            let last = LastGroup::of(&row[(width - rest) * Row::BYTES..]);
            // SAFETY: a whole group.
            unsafe { widen::<Row>(last.as_ptr(), &mut groups[whole]) };
        }
    }
}

/// # Safety
/// A group of stored columns must be readable at `stored`.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn widen<Row: PlainRow>(stored: *const u8, out: &mut [f32; GROUP]) {
    let [first, second] = out.as_chunks_mut().0 else { unreachable!("a group is two registers") };
    // SAFETY: as the caller vouches.
    unsafe {
        store(Row::half::<0>(stored), first);
        store(Row::half::<1>(stored), second);
    }
}

/// Decodes places `first..first + width` of every row, with the scale of each
/// lane for each pair, and asks for those of the next block.
#[target_feature(enable = "avx2,fma")]
fn decode_mxfp4(
    matrix: Matrix<'_>,
    first: usize,
    width: usize,
    panel: &mut [f32],
    scales: &mut [f32],
) {
    let panels = panel.chunks_exact_mut(SCALED * PAIR).zip(scales.chunks_exact_mut(SCALED * LANES));
    for (row, (panel, scales)) in panels.take(matrix.rows()).enumerate() {
        let row = Mxfp4Row::of(matrix, row);
        let first = first / PAIR;
        let end = row.pairs.len().min(first + width / PAIR);
        let whole = row.pairs[first..end].iter().zip(&row.scales[first..end]);
        let whole = whole.map(|(packed, scales)| decode_pair(packed, *scales, SCALED * PAIR / 2));
        let half = row.half.filter(|_| first == row.pairs.len()).map(|half| half.decode());
        let places = panel.as_chunks_mut::<PAIR>().0.iter_mut().zip(scales.as_chunks_mut().0);
        for (pair, (values, scales)) in whole.chain(half).zip(places) {
            store(pair.scales, scales);
            for (lanes, values) in pair.values.into_iter().zip(values.as_chunks_mut().0) {
                store(lanes, values);
            }
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn store(lanes: __m256, place: &mut [f32; LANES]) {
    // SAFETY: an array of eight floats.
    unsafe { _mm256_storeu_ps(place.as_mut_ptr(), lanes) };
}

/// One block of columns: a decoded panel and the matching part of every token.
struct Block<'a> {
    /// Row `r` starts at `r * width`.
    panel: &'a [f32],
    width: usize,
    /// The lanes' scales for each pair of each row; MXFP4 only.
    scales: Option<&'a [f32]>,
    /// Token `t` starts at `t * stride`.
    x: &'a [f32],
    stride: usize,
    /// Columns of the block, padded, over [`LANES`].
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

    /// `R` rows by `T` tokens.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn corner<const R: usize, const T: usize>(&self, row: usize, token: usize, wide: &mut [f64]) {
        assert!((row + R - 1) * self.width + self.steps * LANES <= self.panel.len());
        assert!((token + T - 1) * self.stride + self.steps * LANES <= self.x.len());
        assert!(((row + R - 1) * self.tokens + token + T) * 4 <= wide.len());
        let lanes = match self.scales {
            // SAFETY: the first two assertions.
            None => unsafe { self.chains::<R, T>(row, token, 0, self.steps) },
            Some(scales) => {
                let pairs = self.steps / (PAIR / LANES);
                assert!(((row + R - 1) * SCALED + pairs) * LANES <= scales.len());
                let mut sums = [[_mm256_setzero_ps(); T]; R];
                for pair in 0..pairs {
                    const STEPS: usize = PAIR / LANES;
                    // SAFETY: the first two assertions.
                    let chains = unsafe { self.chains::<R, T>(row, token, pair * STEPS, STEPS) };
                    for (r, (sums, chains)) in sums.iter_mut().zip(chains).enumerate() {
                        let start = ((row + r) * SCALED + pair) * LANES;
                        // SAFETY: the assertion above.
                        let scales = unsafe { _mm256_loadu_ps(scales.as_ptr().add(start)) };
                        for (sum, chain) in sums.iter_mut().zip(chains) {
                            *sum = _mm256_fmadd_ps(scales, chain, *sum);
                        }
                    }
                }
                sums
            }
        };
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

    /// The chains of `R` rows by `T` tokens over `steps` from `first`, all in
    /// registers.
    ///
    /// # Safety
    /// The steps of these rows and tokens must be inside the panel and `x`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn chains<const R: usize, const T: usize>(
        &self,
        row: usize,
        token: usize,
        first: usize,
        steps: usize,
    ) -> [[__m256; T]; R] {
        let mut lanes = [[_mm256_setzero_ps(); T]; R];
        for step in first..first + steps {
            let x: [__m256; T] = std::array::from_fn(|t| {
                let start = (token + t) * self.stride + step * LANES;
                // SAFETY: as the caller vouches.
                unsafe { _mm256_loadu_ps(self.x.as_ptr().add(start)) }
            });
            for (r, lanes) in lanes.iter_mut().enumerate() {
                let start = (row + r) * self.width + step * LANES;
                // SAFETY: as the caller vouches.
                let weights = unsafe { _mm256_loadu_ps(self.panel.as_ptr().add(start)) };
                for (lane, x) in lanes.iter_mut().zip(x) {
                    *lane = _mm256_fmadd_ps(weights, x, *lane);
                }
            }
        }
        lanes
    }
}
