//! Softmax over one row of scores.

use crate::kernels::backend::for_each_backend;
use crate::kernels::math::exp;
use crate::kernels::rms_norm::lane_sum;

for_each_backend! {
    /// Replaces scaled scores by probabilities: `softmax(factor * scores)`.
    ///
    /// Exponentials in float64 relative to the largest score, kept as float32,
    /// summed in float64. A NaN among the scores makes every result NaN.
    pub fn softmax_in_place(scores: &mut [f32], factor: f64) {
        let mut largest = f32::NEG_INFINITY;
        for score in scores.iter() {
            if *score > largest {
                largest = *score;
            }
        }
        let largest = f64::from(largest);
        for score in scores.iter_mut() {
            *score = exp((f64::from(*score) - largest) * factor) as f32;
        }
        let sum = lane_sum(scores.len(), |i| f64::from(scores[i]));
        for score in scores.iter_mut() {
            *score = (f64::from(*score) / sum) as f32;
        }
    }
}
