//! The structure of the released checkpoint, made up from its config as sparse
//! files: the reader has to hold half a million tensors in little memory and
//! open them quickly, and the sizes have to be the published ones to the byte.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use _k3rs::format::catalog::{Catalog, TensorTally};
use _k3rs::format::config::ModelConfig;
use common::{Tensor, layer_tensors, root_tensors, shared, write_shard};
use serde_json::Map;

const SHARDS: usize = 96;
const FILE_BYTES: u64 = 1_560_936_091_448;
const MEMORY_BYTES_MAX: usize = 16_000_000;
const OPEN_TIME_MAX: Duration = Duration::from_secs(1);

fn shard_name(number: usize) -> String {
    format!("model-{number:05}-of-{SHARDS:06}.safetensors")
}

fn projector_tensors() -> Vec<Tensor> {
    [("post_norm", &[7168][..]), ("proj.0", &[4096, 4096]), ("proj.2", &[7168, 4096])]
        .map(|(name, shape)| Tensor::new(format!("mm_projector.{name}.weight"), "BF16", shape))
        .to_vec()
}

fn vision_tensors() -> Vec<Tensor> {
    let mut shapes = vec![
        ("patch_embed.proj".to_owned(), vec![1024, 3, 14, 14]),
        ("patch_embed.pos_emb".to_owned(), vec![64, 64, 1024]),
        ("encoder.final_layernorm".to_owned(), vec![1024]),
    ];
    for block in 0..27 {
        for (name, shape) in [
            ("wqkv", &[4608, 1024][..]),
            ("wo", &[1024, 1536]),
            ("mlp.fc0", &[4096, 1024]),
            ("mlp.fc1", &[1024, 4096]),
            ("norm0", &[1024]),
            ("norm1", &[1024]),
        ] {
            shapes.push((format!("encoder.blocks.{block}.{name}"), shape.to_vec()));
        }
    }
    let tensor = |(name, shape): &(_, Vec<_>)| {
        Tensor::new(format!("vision_tower.{name}.weight"), "BF16", shape)
    };
    shapes.iter().map(tensor).collect()
}

/// Writes the 96 shards and their index.
fn write_release(directory: &Path, config: &ModelConfig) {
    let index = File::create(directory.join("model.safetensors.index.json")).unwrap();
    let mut index = BufWriter::new(index);
    write!(index, "{{\"metadata\": {{\"total_size\": 0}}, \"weight_map\": {{").unwrap();
    let mut separator = "";
    for number in 1..=SHARDS {
        let tensors = match number {
            94 => root_tensors(config),
            95 => projector_tensors(),
            96 => vision_tensors(),
            layer => layer_tensors(config, layer - 1),
        };
        let shard = shard_name(number);
        write_shard(&directory.join(&shard), &tensors, &Map::new());
        for Tensor { name, .. } in tensors {
            write!(index, "{separator}\n  \"{name}\": \"{shard}\"").unwrap();
            separator = ",";
        }
    }
    write!(index, "}}}}").unwrap();
    index.flush().unwrap();
}

#[test]
fn the_release_is_opened_quickly_and_held_in_little_memory() {
    let Some(config_path) = shared("data/k3_config.json") else { return };
    let directory = tempfile::tempdir().unwrap();
    fs::copy(&config_path, directory.path().join("config.json")).unwrap();
    write_release(directory.path(), &ModelConfig::read(&config_path).unwrap().config);

    // Several attempts, so that other work on the machine does not count.
    let mut best = Duration::MAX;
    let mut opened = None;
    for _ in 0..20 {
        let start = Instant::now();
        opened = Some(Catalog::open(directory.path()).unwrap());
        best = best.min(start.elapsed());
        if best < OPEN_TIME_MAX {
            break;
        }
    }
    let catalog = opened.unwrap();
    let held = catalog.memory_bytes();
    let report = format!("opened in {best:?}, {held} bytes held");
    writeln!(std::io::stderr(), "{report}").unwrap();
    assert!(best < OPEN_TIME_MAX && held < MEMORY_BYTES_MAX, "{report}");

    assert_eq!(catalog.files.iter().map(|file| file.length).sum::<u64>(), FILE_BYTES);
    assert_published_sizes(&catalog);
    let summary = catalog.summary();
    assert_eq!(summary.layers.bytes, 108_811_877_376);
    assert_eq!(summary.roots, TensorTally { count: 5, bytes: 4_697_663_488 });
    assert_eq!(summary.experts, TensorTally { count: 494_592, bytes: 1_446_456_066_048 });
    assert_eq!(summary.ignored, TensorTally { count: 168, bytes: 2 * 447_358_976 });
    let counts = [summary.layers.count, summary.roots.count, summary.experts.count, 168];
    assert_eq!(counts.iter().sum::<u64>(), 497_220);
    // Published alignment of the experts: one offset per shard, never a page.
    for (layer, remainder) in [(1, 3088), (3, 976)] {
        for expert in [0, 17, 895] {
            let parts = catalog.experts.parts(layer, expert);
            assert_eq!(parts[0].offset % 4096, remainder);
            assert!(parts.windows(2).all(|pair| pair[0].end() == pair[1].offset));
            assert_eq!(parts[5].end() - parts[0].offset, 17_547_264);
        }
    }
}

fn assert_published_sizes(catalog: &Catalog) {
    let Some(path) = shared("data/k3_shard_sizes.txt") else { return };
    let text = fs::read_to_string(path).unwrap();
    let sizes: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    assert_eq!(sizes.len(), SHARDS);
    for (line, file) in sizes.iter().zip(&catalog.files) {
        let name = file.path.file_name().unwrap().to_str().unwrap();
        assert_eq!(*line, format!("{name} {}", file.length));
    }
}
