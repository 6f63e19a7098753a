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
        let mut by_rows = vec![0.0; if vectors == 1 { 0 } else { matrix.tile_rows * vectors }];
        self.for_each_tile(matrix, |first, tile| {
            if vectors == 1 {
                let out = &mut out[first..first + tile.rows()];
                matmul_by_rows(backend, tile, x, 1, out);
            } else {
                let by_rows = &mut by_rows[..tile.rows() * vectors];
                matmul_by_rows(backend, tile, x, vectors, by_rows);
                scatter_rows(by_rows, vectors, &mut out, matrix.rows, first);
            }
        })?;
        check_finite(&out, || format!("the product with tensor `{}`", matrix.name))?;
        Ok(out)
    }

    /// Calls `use_tile` with the first row and the view of each tile, in order.
    ///
    /// # Errors
    /// [`Error::Io`] when a tile cannot be read.
    pub fn for_each_tile(
        &mut self,
        matrix: &StreamedMatrix,
        mut use_tile: impl FnMut(usize, Matrix<'_>),
    ) -> Result<()> {
        for (index, tile) in matrix.tiles.clone().enumerate() {
            let rows = matrix.rows_of(index);
            self.trunk.visit(tile, |bytes| {
                let weights = match matrix.dtype {
                    Dtype::F32 => Weights::F32(bytes),
                    _ => Weights::Bf16(bytes),
                };
                use_tile(rows.start, Matrix::new(rows.len(), matrix.columns, weights));
            })?;
        }
        Ok(())
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
