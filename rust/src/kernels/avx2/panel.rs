//! Several tokens: a panel of rows is decoded once and multiplied with all of
//! them, four rows by three tokens at a time in registers.

use std::arch::x86_64::*;
use std::cell::RefCell;

use crate::kernels::aligned::CACHE_LINE;
use crate::kernels::avx2::mxfp4::{ask, decode_block};
use crate::kernels::avx2::plain::{Bf16Row, F32Row, LastGroup, PlainRow};
use crate::kernels::avx2::{fold, total};
use crate::kernels::bf16::GROUP;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::mxfp4::{BLOCK_BYTES, BlockRows};
use crate::kernels::scalar::{BLOCK, LANES, SUMMED};

/// Rows of a panel, which fills the first-level cache: the tokens come once from the
/// second-level cache for all of them.
const PANEL_ROWS: usize = 32;

/// Buffers that are kept by each thread between calls.
#[derive(Default)]
pub(super) struct Scratch {
    /// Decoded weights, `[rows, block]`.
    pub(super) panel: Vec<f32>,
    /// The scale of each lane, `[rows, 8]`; MXFP4 only.
    scales: Vec<f32>,
    /// `[rows, tokens, 8]`.
    pub(super) sums: Vec<f32>,
    /// `[rows, tokens, 4]`.
    pub(super) wide: Vec<f64>,
}

thread_local! {
    pub(super) static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// All rows of `matrix` with all tokens, whose `x` is arranged.
#[target_feature(enable = "avx2,fma")]
pub(super) fn dot_rows(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    SCRATCH.with_borrow_mut(|scratch| {
        for first in (0..matrix.rows()).step_by(PANEL_ROWS) {
            let last = matrix.rows().min(first + PANEL_ROWS);
            let out = &mut out[first * tokens..last * tokens];
            dot_panel(matrix.row_range(first..last), x, tokens, out, scratch);
        }
    });
}

/// At most a panel of rows with all tokens.
#[target_feature(enable = "avx2,fma")]
fn dot_panel(matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32], scratch: &mut Scratch) {
    let (rows, columns, stride) = (matrix.rows(), matrix.columns(), matrix.arranged_columns());
    scratch.panel.resize((PANEL_ROWS * BLOCK).max(scratch.panel.len()), 0.0);
    scratch.scales.resize(PANEL_ROWS * LANES, 0.0);
    scratch.sums.clear();
    scratch.sums.resize(rows * tokens * LANES, 0.0);
    scratch.wide.clear();
    scratch.wide.resize(rows * tokens * 4, 0.0);
    for first in (0..stride).step_by(BLOCK) {
        let width = BLOCK.min(stride - first);
        let panel = &mut scratch.panel[..];
        let stored = width.min(columns - first);
        let scales = match matrix.weights() {
            Weights::Bf16(bytes) => {
                decode::<Bf16Row>(bytes, columns, first, stored, panel);
                None
            }
            Weights::F32(bytes) => {
                decode::<F32Row>(bytes, columns, first, stored, panel);
                None
            }
            Weights::Mxfp4 { .. } => {
                decode_mxfp4(matrix, first / BLOCK, panel, &mut scratch.scales);
                Some(&scratch.scales[..])
            }
        };
        let (panel, x) = (&scratch.panel[..], &x[first..]);
        let block = Block { panel, scales, x, stride, steps: width / LANES, tokens };
        block.multiply(rows, &mut scratch.sums);
        let end = first + BLOCK;
        if end.is_multiple_of(SUMMED * BLOCK) || end >= stride {
            fold_all(&mut scratch.sums, &mut scratch.wide);
        }
    }
    for (out, wide) in out.iter_mut().zip(scratch.wide.as_chunks::<4>().0) {
        // SAFETY: an array of four float64.
        *out = total(unsafe { _mm256_loadu_pd(wide.as_ptr()) });
    }
}

/// Moves the float32 sums into the float64 ones.
#[target_feature(enable = "avx2,fma")]
fn fold_all(sums: &mut [f32], wide: &mut [f64]) {
    for (sums, wide) in sums.as_chunks::<LANES>().0.iter().zip(wide.as_chunks_mut::<4>().0) {
        // SAFETY: arrays of eight floats and of four float64.
        unsafe {
            let folded = fold(_mm256_loadu_ps(sums.as_ptr()), _mm256_loadu_pd(wide.as_ptr()));
            _mm256_storeu_pd(wide.as_mut_ptr(), folded);
        }
    }
    sums.fill(0.0);
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
            if (group * GROUP * Row::BYTES).is_multiple_of(CACHE_LINE) {
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

/// Decodes block `block` of every row, with the scale of each lane, and asks for the
/// bytes of a later one.
#[target_feature(enable = "avx2,fma")]
fn decode_mxfp4(matrix: Matrix<'_>, block: usize, panel: &mut [f32], scales: &mut [f32]) {
    let rows = BlockRows::of(matrix);
    let places = panel.as_chunks_mut::<BLOCK>().0.iter_mut().zip(scales.as_chunks_mut().0);
    for (row, (values, lane_scales)) in places.take(matrix.rows()).enumerate() {
        let scales = if block < rows.whole() {
            let stored = rows.block(row, block);
            ask(stored, 2 * BLOCK_BYTES);
            decode_block(stored, values)
        } else {
            decode_block(rows.last(row).stored(), values)
        };
        store(scales, lane_scales);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn store(lanes: __m256, place: &mut [f32; LANES]) {
    // SAFETY: an array of eight floats.
    unsafe { _mm256_storeu_ps(place.as_mut_ptr(), lanes) };
}

/// One block of columns: a decoded panel and the matching part of every token.
struct Block<'a> {
    /// Row `r` starts at `r * BLOCK`.
    panel: &'a [f32],
    /// The lanes' scales of each row; MXFP4 only.
    scales: Option<&'a [f32]>,
    /// Token `t` starts at `t * stride`.
    x: &'a [f32],
    stride: usize,
    /// Places of the block over [`LANES`].
    steps: usize,
    tokens: usize,
}

impl Block<'_> {
    /// Adds this block to `sums`, `[rows, tokens, 8]`.
    #[target_feature(enable = "avx2,fma")]
    fn multiply(&self, rows: usize, sums: &mut [f32]) {
        for token in (0..self.tokens).step_by(3) {
            for row in (0..rows).step_by(4) {
                match (rows - row, self.tokens - token) {
                    (4.., 3..) => self.corner::<4, 3>(row, token, sums),
                    (4.., 2) => self.corner::<4, 2>(row, token, sums),
                    (4.., _) => self.corner::<4, 1>(row, token, sums),
                    (rest, 3..) => {
                        (0..rest).for_each(|i| self.corner::<1, 3>(row + i, token, sums))
                    }
                    (rest, 2) => (0..rest).for_each(|i| self.corner::<1, 2>(row + i, token, sums)),
                    (rest, _) => (0..rest).for_each(|i| self.corner::<1, 1>(row + i, token, sums)),
                }
            }
        }
    }

    /// `R` rows by `T` tokens.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn corner<const R: usize, const T: usize>(&self, row: usize, token: usize, sums: &mut [f32]) {
        assert!((row + R - 1) * BLOCK + self.steps * LANES <= self.panel.len());
        assert!((token + T - 1) * self.stride + self.steps * LANES <= self.x.len());
        assert!(((row + R - 1) * self.tokens + token + T) * LANES <= sums.len());
        // SAFETY: the first two assertions.
        let chains = unsafe { self.chains::<R, T>(row, token) };
        for (r, chains) in chains.into_iter().enumerate() {
            let scales = self.scales.map(|scales| {
                let scales = &scales[(row + r) * LANES..][..LANES];
                // SAFETY: eight floats.
                unsafe { _mm256_loadu_ps(scales.as_ptr()) }
            });
            for (t, chain) in chains.into_iter().enumerate() {
                let start = ((row + r) * self.tokens + token + t) * LANES;
                // SAFETY: the third assertion.
                unsafe {
                    let sums = sums.as_mut_ptr().add(start);
                    let sum = _mm256_loadu_ps(sums);
                    let sum = match scales {
                        Some(scales) => _mm256_fmadd_ps(scales, chain, sum),
                        None => _mm256_add_ps(sum, chain),
                    };
                    _mm256_storeu_ps(sums, sum);
                }
            }
        }
    }

    /// The chains of `R` rows by `T` tokens, all in registers.
    ///
    /// # Safety
    /// These rows and tokens must be inside the panel and `x`.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn chains<const R: usize, const T: usize>(
        &self,
        row: usize,
        token: usize,
    ) -> [[__m256; T]; R] {
        let mut lanes = [[_mm256_setzero_ps(); T]; R];
        for step in 0..self.steps {
            let x: [__m256; T] = std::array::from_fn(|t| {
                let start = (token + t) * self.stride + step * LANES;
                // SAFETY: as the caller vouches.
                unsafe { _mm256_loadu_ps(self.x.as_ptr().add(start)) }
            });
            for (r, lanes) in lanes.iter_mut().enumerate() {
                let start = (row + r) * BLOCK + step * LANES;
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
