//! One chunk of tokens on its way through the model: what computes, what
//! streams, and the product of a streamed matrix with the chunk.

use crate::error::{Error, Result};
use crate::format::dtype::Dtype;
use crate::kernels::backend::Backend;
use crate::kernels::matmul::{matmul_by_rows, scatter_rows};
use crate::kernels::matrix::{Matrix, Weights};
use crate::model::weights::StreamedMatrix;
use crate::storage::expert_cache::ExpertCache;
use crate::storage::trunk_stream::TrunkStream;

/// Everything that a part of the model needs besides weights and state.
pub struct Pass<'a> {
    /// Instruction set.
    pub backend: Backend,
    /// The trunk, in walk order.
    pub trunk: &'a mut TrunkStream,
    /// The routed experts.
    pub experts: &'a mut ExpertCache,
    /// Tokens of the chunk.
    pub tokens: usize,
}

impl Pass<'_> {
    /// `x W^T` for every token: `x` is `[tokens, columns]`, the result
    /// `[tokens, rows]`.
    ///
    /// # Errors
    /// [`Error::Io`] when a tile cannot be read, [`Error::NumericalFault`] with
    /// the matrix's name when the result is not finite: a saturating function
    /// behind it would hide an infinity.
    pub fn matmul(&mut self, matrix: &StreamedMatrix, x: &[f32]) -> Result<Vec<f32>> {
        self.matmul_of(matrix, x, self.tokens)
    }

    /// [`Pass::matmul`] for another number of vectors than the chunk's tokens.
    ///
    /// # Errors
    /// As [`Pass::matmul`].
    pub fn matmul_of(
        &mut self,
        matrix: &StreamedMatrix,
        x: &[f32],
        vectors: usize,
    ) -> Result<Vec<f32>> {
        let backend = self.backend;
        let mut out = vec![0.0; vectors * matrix.rows];
        let mut by_rows = Vec::new();
        self.for_tiles(matrix, |first, tiles| {
            let rows: usize = tiles.iter().map(Matrix::rows).sum();
            if vectors == 1 {
                matmul_by_rows(backend, tiles, x, 1, &mut out[first..first + rows]);
            } else {
                by_rows.resize(rows * vectors, 0.0);
                matmul_by_rows(backend, tiles, x, vectors, &mut by_rows);
                scatter_rows(&by_rows, vectors, &mut out, matrix.rows, first);
            }
        })?;
        check_finite(&out, || format!("the product with tensor `{}`", matrix.name))?;
        Ok(out)
    }

    /// Calls `use_tiles` with the first row and the views of tiles that follow
    /// each other, until all have been used in order.
    ///
    /// # Errors
    /// [`Error::Io`] when a tile cannot be read.
    pub fn for_tiles(
        &mut self,
        matrix: &StreamedMatrix,
        mut use_tiles: impl FnMut(usize, &[Matrix<'_>]),
    ) -> Result<()> {
        self.trunk.visit(matrix.tiles.clone(), |first, tiles| {
            let first = first - matrix.tiles.start;
            let views = tiles.iter().enumerate().map(|(index, bytes)| {
                let weights = match matrix.dtype {
                    Dtype::F32 => Weights::F32(bytes),
                    _ => Weights::Bf16(bytes),
                };
                Matrix::new(matrix.rows_of(first + index).len(), matrix.columns, weights)
            });
            use_tiles(matrix.rows_of(first).start, &views.collect::<Vec<_>>());
        })
    }
}

/// Refuses NaN and infinity, so that no token is ever made from them.
///
/// # Errors
/// [`Error::NumericalFault`] that names `location`.
pub fn check_finite(values: &[f32], location: impl FnOnce() -> String) -> Result<()> {
    match values.iter().find(|value| !value.is_finite()) {
        None => Ok(()),
        Some(value) => Err(Error::NumericalFault {
            what: if value.is_nan() { "NaN".into() } else { "infinity".into() },
            location: location(),
        }),
    }
}
