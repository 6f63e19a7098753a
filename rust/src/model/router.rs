//! Which experts a token wakes, and with what weight.
//!
//! The correction bias steers the choice only; the weights are the unbiased
//! scores. Equal values go to the lower expert id, which the published code
//! leaves open.

use crate::format::config::{MoeConfig, RouterActivation};
use crate::kernels::math::{exp, sigmoid};

/// The experts of one token in ascending order.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Expert ids.
    pub experts: Vec<usize>,
    /// Weight of each expert's output.
    pub weights: Vec<f32>,
}

/// Routes one token from its router logits `[experts]`.
pub fn route(config: &MoeConfig, logits: &[f32], bias: &[f32]) -> Route {
    let scores = activate(config.router_activation, logits);
    let mut selection: Vec<f64> =
        scores.iter().zip(bias).map(|(score, bias)| score + f64::from(*bias)).collect();
    if config.groups > config.groups_kept && config.groups > 1 {
        drop_weak_groups(config, &mut selection);
    }
    let mut experts: Vec<usize> = (0..selection.len()).collect();
    // A stable sort keeps the lower id first among equals.
    experts.sort_by(|a, b| selection[*b].total_cmp(&selection[*a]));
    experts.truncate(config.experts_per_token);
    let sum: f64 = experts.iter().map(|expert| scores[*expert]).sum();
    experts.sort_unstable();
    let divisor =
        if config.renormalize && config.experts_per_token > 1 { sum + 1e-20 } else { 1.0 };
    let factor = f64::from(config.scaling_factor) / divisor;
    let weights = experts.iter().map(|expert| (scores[*expert] * factor) as f32).collect();
    Route { experts, weights }
}

fn activate(activation: RouterActivation, logits: &[f32]) -> Vec<f64> {
    let logits = logits.iter().copied().map(f64::from);
    match activation {
        RouterActivation::Sigmoid => logits.map(sigmoid).collect(),
        RouterActivation::Softmax => {
            let largest = logits.clone().fold(f64::NEG_INFINITY, f64::max);
            let powers: Vec<f64> = logits.map(|logit| exp(logit - largest)).collect();
            let sum: f64 = powers.iter().sum();
            powers.into_iter().map(|power| power / sum).collect()
        }
    }
}

/// Group-limited routing: a group is worth the sum of its two largest values;
/// all but the best groups are out.
fn drop_weak_groups(config: &MoeConfig, selection: &mut [f64]) {
    let size = selection.len() / config.groups;
    let worth: Vec<f64> = selection
        .chunks_exact(size)
        .map(|group| {
            let mut group = group.to_vec();
            group.sort_by(|a, b| b.total_cmp(a));
            group.iter().take(2).sum()
        })
        .collect();
    let mut order: Vec<usize> = (0..worth.len()).collect();
    order.sort_by(|a, b| worth[*b].total_cmp(&worth[*a]));
    for group in &order[config.groups_kept..] {
        selection[group * size..(group + 1) * size].fill(f64::NEG_INFINITY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(experts: usize, per_token: usize) -> MoeConfig {
        MoeConfig {
            experts,
            experts_per_token: per_token,
            expert_width: 32,
            shared_width: 0,
            latent_dim: None,
            latent_norm: false,
            renormalize: true,
            scaling_factor: 1.0,
            router_activation: RouterActivation::Sigmoid,
            groups: 1,
            groups_kept: 1,
        }
    }

    #[test]
    fn the_bias_chooses_but_does_not_weigh() {
        let route = route(&config(3, 2), &[0.0, 0.0, 2.0], &[0.0, 5.0, 0.0]);
        assert_eq!(route.experts, [1, 2]);
        let high = 1.0 / (1.0 + (-2.0f64).exp());
        let expected = [0.5 / (0.5 + high), high / (0.5 + high)];
        for (weight, expected) in route.weights.iter().zip(expected) {
            assert!((f64::from(*weight) - expected).abs() < 1e-7);
        }
    }

    #[test]
    fn equal_values_go_to_the_lower_id() {
        let route = route(&config(6, 3), &[1.0; 6], &[0.0; 6]);
        assert_eq!(route.experts, [0, 1, 2]);
    }

    #[test]
    fn weak_groups_are_out() {
        let mut config = config(6, 2);
        (config.groups, config.groups_kept) = (3, 1);
        // The largest value is in the first group, the best pair in the last.
        let route = route(&config, &[3.0, -9.0, 0.0, 0.0, 2.0, 2.0], &[0.0; 6]);
        assert_eq!(route.experts, [4, 5]);
    }
}
