//! What one decoded token of the released size does beside its products with
//! stored weights: each kind of small work for all layers, one after the other.

use rayon::prelude::*;
use serde::Serialize;

use crate::format::config::{MlaConfig, MoeConfig, RouterActivation};
use crate::kernels::backend::Backend;
use crate::kernels::matrix::{Matrix, Weights};
use crate::kernels::rms_norm::{rms_norm, rms_norm_in_place};
use crate::kernels::situ_glu::{sigmoid_gate, situ_glu};
use crate::kernels::softmax::softmax_in_place;
use crate::measure::{Effort, median_seconds};
use crate::model::attention_residuals::ResidualStream;
use crate::model::delta_rule::delta_rule;
use crate::model::gated_mla::Attention;
use crate::model::kda::{decay_factors, unit_norm};
use crate::model::mla_cache::MlaCache;
use crate::model::router::route;
use crate::model::short_conv::short_conv;
use crate::model::weights::MixWeights;

/// Bytes of weights that one token of the release multiplies.
const TOKEN_BYTES: f64 = 134.6e9;

/// Facts of the release.
const HIDDEN: usize = 7168;
const KDA_LAYERS: usize = 69;
const MLA_LAYERS: usize = 24;
const LAYERS: usize = KDA_LAYERS + MLA_LAYERS;
const HEADS: usize = 96;
const HEAD_DIM: usize = 128;
const CONV_TAPS: usize = 4;
const BLOCK_LAYERS: usize = 12;
const EXPERTS: usize = 896;
const EXPERTS_PER_TOKEN: usize = 16;
const EXPERT_WIDTH: usize = 3072;
const SHARED_WIDTH: usize = 2 * EXPERT_WIDTH;
const DENSE_WIDTH: usize = 33_792;
const GATE_LOWER_BOUND: f32 = -5.0;
const EPSILON: f32 = 1e-5;

/// Tokens before the one that is measured.
const POSITIONS: usize = 4096;

const MLA: MlaConfig = MlaConfig {
    heads: HEADS,
    query_rank: Some(1536),
    latent_dim: 512,
    nope_dim: 128,
    rope_dim: 64,
    value_dim: 128,
    output_gate: true,
};

const MOE: MoeConfig = MoeConfig {
    experts: EXPERTS,
    experts_per_token: EXPERTS_PER_TOKEN,
    expert_width: EXPERT_WIDTH,
    shared_width: SHARED_WIDTH,
    latent_dim: Some(3584),
    latent_norm: true,
    renormalize: true,
    scaling_factor: 1.0,
    router_activation: RouterActivation::Sigmoid,
    groups: 1,
    groups_kept: 1,
};

/// One kind of small work.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SmallWork {
    /// What it is, and for how many layers.
    pub name: String,
    /// Milliseconds of one decoded token.
    pub ms_per_token: f64,
    /// Share of a token that is bound by reading its weights from memory.
    pub of_token: f64,
}

/// Measures each on the threads of the current pool; `read_gb_s` is what they
/// read from memory in a second.
pub(super) fn measure(backend: Backend, effort: Effort, read_gb_s: f64) -> Vec<SmallWork> {
    let token_seconds = TOKEN_BYTES / (read_gb_s * 1e9);
    // A check run does one layer of each kind.
    let layers = |count: usize| if effort == Effort::CHECK { 1 } else { count };
    let mut measured = Vec::new();
    let mut add = |name: String, work: &mut dyn FnMut()| {
        let seconds = median_seconds(effort.repetitions, work);
        let of_token = seconds / token_seconds;
        measured.push(SmallWork { name, ms_per_token: seconds * 1e3, of_token });
    };

    let x = wave(DENSE_WIDTH, 0.37);
    let vector = &x[..HEAD_DIM];
    let kda = layers(KDA_LAYERS);
    let mut states = vec![0.0f32; kda * HEADS * HEAD_DIM * HEAD_DIM];
    add(format!("KDA delta rule, {kda} layers"), &mut || {
        let heads = states.par_chunks_mut(HEAD_DIM * HEAD_DIM);
        heads.with_min_len(4).for_each_init(
            || vec![0.0; HEAD_DIM],
            |out, state| delta_rule(backend, state, vector, vector, vector, vector, 0.5, out),
        );
    });
    drop(states);

    let kernel = &x[..CONV_TAPS * HEAD_DIM];
    let mut history = vec![0.0f32; kda * HEADS * 3 * (CONV_TAPS - 1) * HEAD_DIM];
    add(format!("KDA short convolution, {kda} layers"), &mut || {
        let channels = history.par_chunks_mut((CONV_TAPS - 1) * HEAD_DIM);
        channels.with_min_len(64).for_each_init(
            || vec![0.0; HEAD_DIM],
            |out, history| short_conv(backend, kernel, history, vector, out),
        );
    });
    add(format!("KDA norms, decay and gate, {kda} layers"), &mut || {
        (0..kda * HEADS).into_par_iter().with_min_len(64).for_each(|_| {
            let mut values: [f32; HEAD_DIM] = std::array::from_fn(|i| vector[i]);
            unit_norm(backend, &mut values, 0.1);
            unit_norm(backend, &mut values, 1.0);
            let mut decay = [0.0; HEAD_DIM];
            decay_factors(backend, vector, &values, 0.7, Some(GATE_LOWER_BOUND), &mut decay);
            rms_norm_in_place(backend, &mut values, &decay, EPSILON);
            sigmoid_gate(backend, &mut values, vector);
            std::hint::black_box(&values);
        });
    });

    let mla = layers(MLA_LAYERS);
    let positions = if effort == Effort::CHECK { 16 } else { POSITIONS };
    let width = MLA.latent_dim + MLA.rope_dim;
    let caches: Vec<MlaCache> = (0..mla)
        .map(|_| {
            let mut cache = MlaCache::new(width);
            cache.append(&wave(positions * width, 0.11));
            cache
        })
        .collect();
    let query = wave(HEADS * (MLA.nope_dim + MLA.rope_dim), 0.21);
    let rows = HEADS * (MLA.nope_dim + MLA.value_dim);
    // The value halves of ordinary floats are ordinary bfloat16 numbers.
    let expansion = bytemuck::cast_slice::<f32, u8>(&wave(rows * MLA.latent_dim / 2, 0.3)).to_vec();
    let tile = Matrix::new(rows, MLA.latent_dim, Weights::Bf16(&expansion));
    let mut out = vec![0.0; HEADS * MLA.value_dim];
    add(format!("latent attention at {positions} positions, {mla} layers"), &mut || {
        for cache in &caches {
            let attention = Attention { config: &MLA, cache, query: &query, tokens: 1, backend };
            attention.heads(0, &[tile], &mut out);
        }
    });
    drop(caches);
    let mut scores = wave(HEADS * positions, 0.5);
    add(format!("softmax over {positions} positions, {mla} layers"), &mut || {
        for _ in 0..mla {
            let heads = scores.par_chunks_mut(positions);
            heads.for_each(|scores| softmax_in_place(backend, scores, 0.07));
        }
    });

    let all = layers(LAYERS);
    let hidden = &x[..HIDDEN];
    let mut out = vec![0.0; HIDDEN];
    add(format!("RMS norms of the residual stream, {all} layers"), &mut || {
        (0..2 * all).for_each(|_| rms_norm(backend, hidden, hidden, EPSILON, &mut out));
    });
    let mix = MixWeights { norm: hidden.to_vec(), projection: hidden.to_vec() };
    add(format!("attention residuals, {all} layers"), &mut || {
        let mut stream = ResidualStream::new(hidden.to_vec(), HIDDEN, Some(BLOCK_LAYERS));
        for layer in 0..all {
            let attended = stream.gather(backend, Some(&mix), EPSILON);
            stream.begin_layer(layer);
            stream.add(attended);
            let transformed = stream.gather(backend, Some(&mix), EPSILON);
            stream.add(transformed);
        }
    });
    let (logits, bias) = (&x[..EXPERTS], &x[EXPERTS..2 * EXPERTS]);
    let moe = layers(LAYERS - 1);
    add(format!("router, {moe} layers"), &mut || {
        (0..moe).for_each(|_| drop(std::hint::black_box(route(&MOE, logits, bias))));
    });
    let gated = DENSE_WIDTH + moe * (EXPERTS_PER_TOKEN * EXPERT_WIDTH + SHARED_WIDTH);
    let mut gate = wave(gated, 0.17);
    add(format!("SiTU, {moe} layers"), &mut || {
        gate.par_chunks_mut(EXPERT_WIDTH / 2).for_each(|gate| {
            let up = &x[..gate.len()];
            situ_glu(backend, gate, up, 4.0, Some(25.0));
        });
    });
    measured
}

/// Numbers of both signs and of different sizes, `count` of them.
fn wave(count: usize, step: f32) -> Vec<f32> {
    (0..count).map(|k| (k as f32 * step).sin()).collect()
}
