//! The released model in numbers: its config and its image tensors.
//!
//! `released_config.json` says everything that a reader of the model looks at.
//! Keys that generic tooling adds and that change nothing are left out.

use serde_json::Value;

/// Blocks of the image encoder.
const IMAGE_BLOCKS: usize = 27;

/// The `config.json` of the release.
///
/// # Panics
/// Never: the text is a part of this crate.
pub(super) fn config() -> Value {
    serde_json::from_str(include_str!("released_config.json")).expect("the built-in config is JSON")
}

/// Names and shapes of the image projector's tensors, all BF16: a shard of their own.
pub(super) fn image_projector() -> Vec<(String, Vec<usize>)> {
    [("post_norm", &[7168][..]), ("proj.0", &[4096, 4096]), ("proj.2", &[7168, 4096])]
        .map(|(name, shape)| (format!("mm_projector.{name}.weight"), shape.to_vec()))
        .to_vec()
}

/// Names and shapes of the image encoder's tensors, all BF16: the last shard.
pub(super) fn image_encoder() -> Vec<(String, Vec<usize>)> {
    let outer = [
        ("patch_embed.proj", &[1024, 3, 14, 14][..]),
        ("patch_embed.pos_emb", &[64, 64, 1024]),
        ("encoder.final_layernorm", &[1024]),
    ];
    let block = [
        ("wqkv", &[4608, 1024][..]),
        ("wo", &[1024, 1536]),
        ("mlp.fc0", &[4096, 1024]),
        ("mlp.fc1", &[1024, 4096]),
        ("norm0", &[1024]),
        ("norm1", &[1024]),
    ];
    let outer = outer.map(|(name, shape)| (name.to_owned(), shape));
    let blocks = (0..IMAGE_BLOCKS).flat_map(|number| {
        block.map(|(name, shape)| (format!("encoder.blocks.{number}.{name}"), shape))
    });
    outer
        .into_iter()
        .chain(blocks)
        .map(|(name, shape)| (format!("vision_tower.{name}.weight"), shape.to_vec()))
        .collect()
}
