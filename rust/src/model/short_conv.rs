//! The short causal convolution before a delta rule: depthwise, SiLU after it.

use crate::kernels::backend::for_each_backend;
use crate::kernels::math::silu;

for_each_backend! {
    /// One token of one head: `out = silu(sum_j kernel[j] * input_(t - (taps - 1) + j))`.
    ///
    /// Shapes: `kernel` `[taps, d]`, `history` `[taps - 1, d]` (oldest first,
    /// zeros before the start; moved on by this call), `input` and `out` `[d]`.
    /// The last tap meets the current token.
    pub fn short_conv(kernel: &[f32], history: &mut [f32], input: &[f32], out: &mut [f32]) {
        let width = input.len();
        let (past, now) = kernel.split_at(kernel.len() - width);
        for i in 0..width {
            let mut sum = 0.0;
            for (tap, kept) in past.chunks_exact(width).zip(history.chunks_exact(width)) {
                sum += f64::from(tap[i]) * f64::from(kept[i]);
            }
            sum += f64::from(now[i]) * f64::from(input[i]);
            out[i] = silu(sum) as f32;
        }
        if !history.is_empty() {
            history.copy_within(width.., 0);
            let newest = history.len() - width;
            history[newest..].copy_from_slice(input);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::backend::Backend;

    #[test]
    fn the_last_tap_meets_the_current_token() {
        let kernel = [0.0, 0.0, 1.0, 10.0, 100.0, 1000.0];
        let mut history = [0.0; 4];
        let silu = |x: f32| x / (1.0 + (-x).exp());
        let mut out = [0.0; 2];
        short_conv(Backend::SCALAR, &kernel, &mut history, &[1.0, 0.01], &mut out);
        assert!((out[0] - silu(100.0)).abs() < 1e-4 && (out[1] - silu(10.0)).abs() < 1e-4);
        short_conv(Backend::SCALAR, &kernel, &mut history, &[0.5, 0.0], &mut out);
        assert!((out[0] - silu(51.0)).abs() < 1e-4 && (out[1] - silu(0.1)).abs() < 1e-4);
        assert_eq!(history, [1.0, 0.01, 0.5, 0.0]);
    }
}
