//! The recurrence of Kimi Delta Attention: one matrix per head, read and
//! written by every token.
//!
//! Source: "Kimi Linear: An Expressive, Efficient Attention Architecture"
//! (arXiv 2510.26692), section 3; the order of decay, read and write is that of
//! the published model code.

use crate::kernels::backend::for_each_backend;
use crate::kernels::scalar::CHAIN;

/// Lanes of one register: the values are handled in strips of this width.
const STRIP: usize = 8;

for_each_backend! {
    /// One token of one head.
    ///
    /// Shapes: `state` `[d, d]` (key, value), all vectors `[d]`. In this order:
    /// the state decays along the key axis; `error = beta * (value - key^T state)`;
    /// `state += key error^T`; `out = query^T state`, after the write.
    ///
    /// Sums over keys are float32 chains of at most 32 steps, folded into
    /// float64, like every sum of products (see `scalar`).
    pub fn delta_rule(
        state: &mut [f32],
        query: &[f32],
        key: &[f32],
        value: &[f32],
        decay: &[f32],
        beta: f32,
        out: &mut [f32],
    ) {
        let width = value.len();
        let strips = width.next_multiple_of(STRIP);
        let mut first = 0;
        while first < strips {
            let count = STRIP.min(width - first);
            let mut seen = [0.0f64; STRIP];
            for start in (0..key.len()).step_by(CHAIN) {
                let mut chain = [0.0f32; STRIP];
                for k in start..key.len().min(start + CHAIN) {
                    let row = &mut state[k * width + first..][..count];
                    for (value, chain) in row.iter_mut().zip(&mut chain) {
                        *value *= decay[k];
                        *chain = key[k].mul_add(*value, *chain);
                    }
                }
                for (seen, chain) in seen.iter_mut().zip(chain) {
                    *seen += f64::from(chain);
                }
            }
            let mut error = [0.0f32; STRIP];
            for (i, error) in error.iter_mut().take(count).enumerate() {
                *error = (f64::from(beta) * (f64::from(value[first + i]) - seen[i])) as f32;
            }
            let mut read = [0.0f64; STRIP];
            for start in (0..key.len()).step_by(CHAIN) {
                let mut chain = [0.0f32; STRIP];
                for k in start..key.len().min(start + CHAIN) {
                    let row = &mut state[k * width + first..][..count];
                    for ((value, error), chain) in row.iter_mut().zip(&error).zip(&mut chain) {
                        *value = key[k].mul_add(*error, *value);
                        *chain = query[k].mul_add(*value, *chain);
                    }
                }
                for (read, chain) in read.iter_mut().zip(chain) {
                    *read += f64::from(chain);
                }
            }
            for (out, read) in out[first..first + count].iter_mut().zip(read) {
                *out = read as f32;
            }
            first += STRIP;
        }
    }
}
