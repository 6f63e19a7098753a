//! Root-mean-square norm: `gain * x / sqrt(mean(x^2) + epsilon)`.

use crate::kernels::backend::for_each_backend;

/// Independent float64 sums of a reduction over a vector.
const LANES: usize = 8;

/// Sum over `i` of `f(i)`: element `i` goes to lane `i % 8`, in order, and the
/// lanes are added pairwise. One order for every reduction of small vectors.
#[inline(always)]
pub(crate) fn lane_sum(length: usize, f: impl Fn(usize) -> f64) -> f64 {
    let mut lanes = [0.0; LANES];
    let whole = length - length % LANES;
    let mut first = 0;
    while first < whole {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum += f(first + lane);
        }
        first += LANES;
    }
    for index in whole..length {
        lanes[index - whole] += f(index);
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// `1 / sqrt(mean(x^2) + epsilon)` in float64.
#[inline(always)]
pub(crate) fn inverse_rms(x: &[f32], epsilon: f32) -> f64 {
    let squares = lane_sum(x.len(), |i| f64::from(x[i]) * f64::from(x[i]));
    1.0 / (squares / x.len() as f64 + f64::from(epsilon)).sqrt()
}

for_each_backend! {
    /// `out = gain * x / sqrt(mean(x^2) + epsilon)` for one vector; all three
    /// slices have its length. Computed in float64, rounded once.
    pub fn rms_norm(x: &[f32], gain: &[f32], epsilon: f32, out: &mut [f32]) {
        let scale = inverse_rms(x, epsilon);
        for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
            *out = (f64::from(*x) * scale * f64::from(*gain)) as f32;
        }
    }
}

for_each_backend! {
    /// [`rms_norm`] in place.
    pub fn rms_norm_in_place(x: &mut [f32], gain: &[f32], epsilon: f32) {
        let scale = inverse_rms(x, epsilon);
        for (x, gain) in x.iter_mut().zip(gain) {
            *x = (f64::from(*x) * scale * f64::from(*gain)) as f32;
        }
    }
}
