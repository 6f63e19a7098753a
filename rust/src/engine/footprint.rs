//! What a model asks of memory, in bytes, before any budget is applied.

use crate::engine::EngineOptions;
use crate::format::catalog::Catalog;
use crate::format::config::ModelConfig;
use crate::io::queue::room_for;
use crate::model::binding::BoundModel;
use crate::model::gated_mla::{POSITIONS_TOGETHER, QUERIES_MAX};
use crate::model::state::ModelState;
use crate::storage::expert_cache::slot_bytes;
use crate::storage::memory_plan::Footprint;
use crate::storage::trunk_stream::TOGETHER_MAX;

/// Python with numpy, tokenizers and rich, and this library.
const INTERPRETER_BYTES: u64 = 110 << 20;

/// A token of the vocabulary in the tokenizer, while it is built.
const TOKEN_BYTES: u64 = 1000;

/// The file that the tokenizer is made from.
const VOCABULARY_FILE: &str = "tiktoken.model";

/// What a thread keeps besides its stack: allocator caches and kernel scratch.
const THREAD_BYTES: u64 = 2 << 20;

/// The footprint of `model` under `options`.
pub fn of(
    catalog: &Catalog,
    model: &BoundModel,
    threads: usize,
    options: &EngineOptions,
) -> Footprint {
    let config = &catalog.config;
    let has_tokenizer = catalog.root.join(VOCABULARY_FILE).exists();
    let tokenizer_bytes = if has_tokenizer { TOKEN_BYTES * config.vocab_size as u64 } else { 0 };
    Footprint {
        process_bytes: INTERPRETER_BYTES + tokenizer_bytes,
        table_bytes: catalog.memory_bytes() as u64,
        vector_bytes: model.vector_bytes as u64,
        state_bytes: ModelState::fixed_bytes(config),
        position_bytes: ModelState::position_bytes(config),
        scratch_bytes: scratch_floats(config, threads, options.positions) * 4,
        token_bytes: token_floats(config, TOGETHER_MAX * model.tile_rows_max) * 4,
        thread_bytes: (threads + options.readers) as u64 * THREAD_BYTES,
        tiles: model.walk.iter().map(|tile| room_for(&[*tile]) as u64).collect(),
        slot_bytes: slot_bytes(&catalog.experts) as u64,
        expert_count: catalog.experts.expert_count() as u64,
        experts_per_token: config.moe.as_ref().map_or(0, |moe| moe.experts_per_token as u64),
    }
}

/// Floats that do not depend on the chunk: logits, those that a session keeps
/// among them, and attention scores.
fn scratch_floats(config: &ModelConfig, threads: usize, positions: usize) -> u64 {
    let positions = positions + POSITIONS_TOGETHER;
    let scores = config.mla.as_ref().map_or(0, |_| QUERIES_MAX * positions * threads);
    (3 * config.vocab_size + scores) as u64
}

/// Floats for each token of a chunk: the residual stream, the larger of the two
/// halves of a layer, and the input of a product in the order that its kernels want;
/// `rows` are multiplied together.
fn token_floats(config: &ModelConfig, rows: usize) -> u64 {
    let hidden = config.hidden_size;
    let blocks = config.residual_block.map_or(0, |block| config.layers.len().div_ceil(block));
    let kda = config.kda.as_ref().map_or(0, |kda| 7 * kda.width() + kda.head_dim + kda.heads);
    let mla = config.mla.as_ref().map_or(0, |mla| {
        let query = mla.heads * (mla.nope_dim + mla.rope_dim);
        let low = mla.query_rank.unwrap_or(0) + mla.latent_dim + mla.rope_dim;
        query + low + 3 * mla.heads * mla.value_dim
    });
    let dense = config.dense_width.map_or(0, |width| 2 * width);
    let moe = config.moe.as_ref().map_or(0, |moe| {
        let width = moe.latent_dim.unwrap_or(hidden);
        let expert = 3 * moe.expert_width + 2 * width;
        moe.experts + (moe.experts_per_token + 2) * width + 2 * moe.shared_width + expert
    });
    let half = kda.max(mla).max(dense).max(moe);
    ((blocks + 6) * hidden + half + widest_input(config) + rows.max(hidden)) as u64
}

/// The most columns that a matrix of the trunk has.
fn widest_input(config: &ModelConfig) -> usize {
    let inputs = [
        Some(config.hidden_size),
        config.kda.as_ref().map(|kda| kda.width()),
        config.mla.as_ref().map(|mla| mla.heads * mla.value_dim),
        config.dense_width,
        config.moe.as_ref().map(|moe| moe.shared_width),
    ];
    inputs.into_iter().flatten().max().unwrap_or(0)
}
