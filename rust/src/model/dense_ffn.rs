//! A gated MLP for every token: the dense layers and the shared experts.

use rayon::prelude::*;

use crate::error::Result;
use crate::format::config::Activation;
use crate::kernels::backend::Backend;
use crate::kernels::situ_glu::{silu_glu, situ_glu};
use crate::model::pass::Pass;
use crate::model::weights::MlpWeights;

/// Elements of the activation that one task computes.
const TASK_ELEMENTS: usize = 2048;

/// `down(activation(gate x, up x))`: `x` and the result are `[tokens, hidden]`.
///
/// # Errors
/// [`crate::Error::Io`] when a tile cannot be read.
pub fn forward(
    activation: Activation,
    weights: &MlpWeights,
    x: &[f32],
    pass: &mut Pass<'_>,
) -> Result<Vec<f32>> {
    let mut gate = pass.matmul(&weights.gate, x)?;
    let up = pass.matmul(&weights.up, x)?;
    let backend = pass.backend;
    gate.par_chunks_mut(TASK_ELEMENTS)
        .zip(up.par_chunks(TASK_ELEMENTS))
        .for_each(|(gate, up)| activate(backend, activation, gate, up));
    pass.matmul(&weights.down, &gate)
}

/// `gate = activation(gate, up)`, element by element.
pub fn activate(backend: Backend, activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Situ { beta, linear_beta } => situ_glu(backend, gate, up, beta, linear_beta),
        Activation::Silu => silu_glu(backend, gate, up),
    }
}
