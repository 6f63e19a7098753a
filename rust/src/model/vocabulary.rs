//! Both ends of the model: embedding rows in, logits out.

use crate::error::Result;
use crate::format::catalog::TensorEntry;
use crate::format::config::ModelConfig;
use crate::format::dtype::Dtype;
use crate::io::file::WeightFile;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::rms_norm::rms_norm;
use crate::model::attention_residuals::ResidualStream;
use crate::model::pass::{Pass, check_finite};
use crate::model::weights::RootWeights;

/// Reads the embedding row of each id, one by one: `[ids, hidden]`. The matrix
/// is never held.
///
/// # Errors
/// [`crate::Error::Io`] when a row cannot be read,
/// [`crate::Error::NumericalFault`] when it is not finite.
pub fn gather(embedding: &TensorEntry, file: &WeightFile, ids: &[u32]) -> Result<Vec<f32>> {
    let width = embedding.shape[1];
    let row_bytes = width * embedding.dtype.size();
    let mut bytes = vec![0; row_bytes];
    let mut rows = vec![0.0; ids.len() * width];
    for (id, row) in ids.iter().zip(rows.chunks_exact_mut(width)) {
        let offset = embedding.extent.offset + u64::from(*id) * row_bytes as u64;
        file.read_exact(offset, &mut bytes)?;
        let weights = match embedding.dtype {
            Dtype::F32 => Weights::F32(&bytes),
            _ => Weights::Bf16(&bytes),
        };
        Matrix::new(1, width, weights).decode(0, 0, row);
        check_finite(row, || format!("tensor `{}`, row {id}", embedding.name))?;
    }
    Ok(rows)
}

/// Logits after the last token of the chunk, or after every one:
/// `[1 or tokens, vocab]`.
///
/// # Errors
/// [`crate::Error::Io`] when a tile cannot be read,
/// [`crate::Error::NumericalFault`] when a logit is not finite.
pub fn logits(
    config: &ModelConfig,
    roots: &RootWeights,
    stream: &ResidualStream,
    every_position: bool,
    pass: &mut Pass<'_>,
) -> Result<Vec<f32>> {
    let width = config.hidden_size;
    let mut x = stream.gather(pass.backend, roots.output_mix.as_ref(), config.norm_epsilon);
    if !every_position {
        x.drain(..x.len() - width);
    }
    let mut normed = vec![0.0; x.len()];
    for (x, normed) in x.chunks_exact(width).zip(normed.chunks_exact_mut(width)) {
        rms_norm(pass.backend, x, &roots.norm, config.norm_epsilon, normed);
    }
    pass.matmul_of(&roots.lm_head, &normed, normed.len() / width)
}
