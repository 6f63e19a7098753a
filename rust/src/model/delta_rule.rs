//! The recurrence of Kimi Delta Attention: one matrix per head, read and
//! written by every token.
//!
//! Source: "Kimi Linear: An Expressive, Efficient Attention Architecture"
//! (arXiv 2510.26692), section 3; the order of decay, read and write is that of
//! the published model code.

use crate::kernels::backend::for_each_backend;
use crate::kernels::scalar::CHAIN;

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
        let head = Head { query, key, value, decay, beta };
        let mut first = 0;
        while value.len() - first >= 32 {
            first = head.strip::<32>(state, first, out);
        }
        while value.len() - first >= 8 {
            first = head.strip::<8>(state, first, out);
        }
        while first < value.len() {
            first = head.strip::<1>(state, first, out);
        }
    }
}

/// What one token brings to one head.
struct Head<'a> {
    query: &'a [f32],
    key: &'a [f32],
    value: &'a [f32],
    decay: &'a [f32],
    beta: f32,
}

impl Head<'_> {
    /// The values `first..first + W`, which no other strip touches: wide enough
    /// for several chains side by side, narrow enough to stay in registers.
    /// Returns where the next strip starts.
    #[inline(always)]
    fn strip<const W: usize>(&self, state: &mut [f32], first: usize, out: &mut [f32]) -> usize {
        let width = self.value.len();
        let mut seen = [0.0f64; W];
        for start in (0..self.key.len()).step_by(CHAIN) {
            let mut chain = [0.0f32; W];
            for k in start..self.key.len().min(start + CHAIN) {
                let row = strip_of::<W>(state, k * width + first);
                for (value, chain) in row.iter_mut().zip(&mut chain) {
                    *value *= self.decay[k];
                    *chain = self.key[k].mul_add(*value, *chain);
                }
            }
            fold(&chain, &mut seen);
        }
        let mut error = [0.0f32; W];
        for (i, error) in error.iter_mut().enumerate() {
            let missing = f64::from(self.value[first + i]) - seen[i];
            *error = (f64::from(self.beta) * missing) as f32;
        }
        let mut read = [0.0f64; W];
        for start in (0..self.key.len()).step_by(CHAIN) {
            let mut chain = [0.0f32; W];
            for k in start..self.key.len().min(start + CHAIN) {
                let row = strip_of::<W>(state, k * width + first);
                for ((value, error), chain) in row.iter_mut().zip(&error).zip(&mut chain) {
                    *value = self.key[k].mul_add(*error, *value);
                    *chain = self.query[k].mul_add(*value, *chain);
                }
            }
            fold(&chain, &mut read);
        }
        for (out, read) in out[first..first + W].iter_mut().zip(read) {
            *out = read as f32;
        }
        first + W
    }
}

#[inline(always)]
fn strip_of<const W: usize>(state: &mut [f32], start: usize) -> &mut [f32; W] {
    state[start..].first_chunk_mut().expect("a state has a row for each key")
}

#[inline(always)]
fn fold<const W: usize>(chain: &[f32; W], wide: &mut [f64; W]) {
    for (wide, chain) in wide.iter_mut().zip(chain) {
        *wide += f64::from(*chain);
    }
}
