//! The gated activation of every MLP.
//!
//! SiTU: `beta * tanh(gate / beta) * sigmoid(gate) * (linear * tanh(up / linear))`.
//! The sigmoid takes the uncapped gate.

use crate::kernels::backend::for_each_backend;
use crate::kernels::math::{sigmoid, silu, tanh};

for_each_backend! {
    /// SiTU-GLU, `gate[i] = situ(gate[i], up[i])`; `linear_beta` of `None`
    /// leaves the up branch uncapped. Float64 inside, rounded once.
    pub fn situ_glu(gate: &mut [f32], up: &[f32], beta: f32, linear_beta: Option<f32>) {
        let beta = f64::from(beta);
        match linear_beta.map(f64::from) {
            Some(linear) => {
                for (gate, up) in gate.iter_mut().zip(up) {
                    let g = f64::from(*gate);
                    let up = linear * tanh(f64::from(*up) / linear);
                    *gate = (beta * tanh(g / beta) * sigmoid(g) * up) as f32;
                }
            }
            None => {
                for (gate, up) in gate.iter_mut().zip(up) {
                    let g = f64::from(*gate);
                    *gate = (beta * tanh(g / beta) * sigmoid(g) * f64::from(*up)) as f32;
                }
            }
        }
    }
}

for_each_backend! {
    /// SwiGLU, `gate[i] = silu(gate[i]) * up[i]`.
    pub fn silu_glu(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = (silu(f64::from(*gate)) * f64::from(*up)) as f32;
        }
    }
}

for_each_backend! {
    /// `x[i] *= sigmoid(gate[i])`: the output gate of both attentions.
    pub fn sigmoid_gate(x: &mut [f32], gate: &[f32]) {
        for (x, gate) in x.iter_mut().zip(gate) {
            *x = (f64::from(*x) * sigmoid(f64::from(*gate))) as f32;
        }
    }
}
