//! Products of a stored matrix with one or many tokens, rows split over threads.
//!
//! A row is never split, so the number of threads cannot change a bit.

use rayon::prelude::*;

use crate::kernels::aligned::LINE_FLOATS;
use crate::kernels::backend::{Backend, Kind};
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::scalar;
#[cfg(target_arch = "x86_64")]
use crate::kernels::{avx2, avx512};

/// Stored bytes that one task multiplies: small enough that a core taken by
/// another process costs its share and no more, large enough to hide the
/// hand-over.
const TASK_BYTES: usize = 256 << 10;

/// Tokens for which a task is that large, and rows of one for more of them: whole panels
/// of all kernels.
const FEW: usize = 8;
const MANY_ROWS: usize = 64;

/// `out[row, token] = dot(matrix[row], x[token])` on this thread.
///
/// `x` is `[tokens, columns]`, `out` `[rows, tokens]`; the order inside a sum is
/// the contract of [`scalar`].
pub fn dot_rows(backend: Backend, matrix: Matrix<'_>, x: &[f32], tokens: usize, out: &mut [f32]) {
    dot_arranged(backend, matrix, &matrix.arranged(x), tokens, out);
}

/// [`dot_rows`] with `x` as [`Matrix::arranged`] returns it.
#[allow(unsafe_code)]
pub fn dot_arranged(
    backend: Backend,
    matrix: Matrix<'_>,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    match backend.kind() {
        Kind::Scalar => scalar::dot_rows(matrix, x, tokens, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a backend of this kind exists only after detection.
        Kind::Avx2 => unsafe { avx2::dot_rows(matrix, x, tokens, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512 => unsafe { avx512::dot_rows(matrix, x, tokens, out) },
    }
}

/// `out[token] = sum over rows of factors[token, row] * matrix[row]` on this
/// thread: `factors` is `[tokens, rows]`, `out` `[tokens, columns]`.
#[allow(unsafe_code)]
pub fn weighted_sum(
    backend: Backend,
    matrix: Matrix<'_>,
    factors: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    match backend.kind() {
        Kind::Scalar => scalar::weighted_sum(matrix, factors, tokens, out),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a backend of this kind exists only after detection.
        Kind::Avx2 => unsafe { avx2::weighted_sum(matrix, factors, tokens, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Kind::Avx512 => unsafe { avx512::weighted_sum(matrix, factors, tokens, out) },
    }
}

/// Rows of a task: so many that it multiplies about [`TASK_BYTES`], and fewer for many
/// tokens, with which a row is more work.
pub fn task_rows(matrix: Matrix<'_>, tokens: usize) -> usize {
    if tokens > FEW {
        return MANY_ROWS;
    }
    let bytes = match matrix.weights() {
        Weights::Mxfp4 { packed, .. } => packed.len(),
        Weights::Bf16(bytes) | Weights::F32(bytes) => bytes.len(),
    };
    let row_bytes = (bytes / matrix.rows().max(1)).max(1);
    (TASK_BYTES / row_bytes).max(1).next_multiple_of(16)
}

/// [`dot_rows`] over the threads of the current rayon pool, for `parts` of one
/// matrix that follow each other.
pub fn matmul_by_rows(
    backend: Backend,
    parts: &[Matrix<'_>],
    x: &[f32],
    tokens: usize,
    mut out: &mut [f32],
) {
    let [first, ..] = parts else { return };
    let x = &first.arranged(x);
    let mut tasks = Vec::new();
    for part in parts {
        let rows = task_rows(*part, tokens);
        for first in (0..part.rows()).step_by(rows) {
            let task = part.row_range(first..part.rows().min(first + rows));
            let (head, rest) = out.split_at_mut(task.rows() * tokens);
            tasks.push((task, head));
            out = rest;
        }
    }
    tasks.into_par_iter().for_each(|(task, out)| dot_arranged(backend, task, x, tokens, out));
}

/// Writes `by_rows`, `[rows, tokens]`, into columns `first..first + rows` of
/// `out`, `[tokens, width]`, over the threads of the current pool.
pub fn scatter_rows(by_rows: &[f32], tokens: usize, out: &mut [f32], width: usize, first: usize) {
    let rows = by_rows.len() / tokens.max(1);
    if tokens == 1 {
        return out[first..first + rows].copy_from_slice(by_rows);
    }
    // So many tokens that a cache line is read once for all of them.
    let together = LINE_FLOATS.min(tokens.div_ceil(rayon::current_num_threads())).max(1);
    out.par_chunks_mut(together * width).enumerate().for_each(|(chunk, out)| {
        for (row, values) in by_rows.chunks_exact(tokens).enumerate() {
            let places = out[first + row..].iter_mut().step_by(width);
            for (out, value) in places.zip(&values[chunk * together..]) {
                *out = *value;
            }
        }
    });
}
