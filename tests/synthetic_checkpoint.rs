//! Made-up checkpoints with random weights: the same bytes from the same seed,
//! well-behaved through the depth of the release, and refused where they would
//! not be a model.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use _k3rs::Error;
use _k3rs::engine::{Control, Engine, EngineOptions, Logits, Session, SweepOutput, Wanted};
use _k3rs::format::catalog::Catalog;
use _k3rs::format::config::{AttentionKind, ModelConfig};
use _k3rs::storage::memory_plan::Budget;
use _k3rs::synth::{SynthOptions, Synthesis};
use common::{shared, tiny_config};
use serde_json::{Value, json};

const RELEASED_LAYERS: u64 = 93;

/// Writes a config file of small widths and the released depth.
fn deep_config(directory: &Path) -> PathBuf {
    let mut config = tiny_config();
    let text = &mut config["text_config"];
    let (full, kda): (Vec<u64>, Vec<u64>) =
        (1..=RELEASED_LAYERS).partition(|layer| layer % 4 == 0 || *layer == RELEASED_LAYERS);
    text["num_hidden_layers"] = json!(RELEASED_LAYERS);
    text["linear_attn_config"]["full_attn_layers"] = json!(full);
    text["linear_attn_config"]["kda_layers"] = json!(kda);
    text["attn_res_block_size"] = json!(12);
    write_config(directory, &config)
}

fn write_config(directory: &Path, config: &Value) -> PathBuf {
    let path = directory.join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    path
}

fn synthesize(directory: &Path, options: &SynthOptions) -> _k3rs::Result<Synthesis> {
    let synthesis = Synthesis::plan(directory, options)?;
    synthesis.write(&|| Ok(()))?;
    Ok(synthesis)
}

fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(path).unwrap())
        })
        .collect()
}

fn root_mean_square(values: &[f32]) -> f64 {
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    (squares / values.len() as f64).sqrt()
}

fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap() as u32
}

#[test]
fn the_seed_alone_decides_on_the_bytes() {
    let place = tempfile::tempdir().unwrap();
    let config = Some(write_config(place.path(), &tiny_config()));
    let made = |name: &str, seed, threads| {
        let directory = place.path().join(name);
        // Embedding and output matrix are several pieces of work long.
        let vocabulary = Some(70_000);
        let options = SynthOptions {
            config: config.clone(),
            seed,
            threads,
            vocabulary,
            ..Default::default()
        };
        synthesize(&directory, &options).unwrap();
        contents(&directory)
    };
    let first = made("first", 5, Some(1));
    assert_eq!(first.len(), 4 + 1 + 2, "{:?}", first.keys());
    assert!(first == made("more threads", 5, Some(3)), "the bytes depend on the threads");
    let other = made("other seed", 6, None);
    let differing: Vec<&String> =
        first.keys().filter(|name| first[*name] != other[*name]).collect();
    assert!(differing.iter().all(|name| name.ends_with(".safetensors")), "{differing:?}");
    assert_eq!(differing.len(), 5);
}

#[test]
fn random_weights_carry_a_text_through_the_depth_of_the_release() {
    let place = tempfile::tempdir().unwrap();
    let config = Some(deep_config(place.path()));
    let options = SynthOptions { config, vocabulary: Some(512), ..SynthOptions::default() };
    let directory = place.path().join("model");
    synthesize(&directory, &options).unwrap();
    let options = EngineOptions {
        budget: Some(Budget::Total(1_000_000_000)),
        positions: 64,
        ..EngineOptions::default()
    };
    let mut session = Session::new(Arc::new(Engine::open(&directory, &options).unwrap()));

    let wanted = Wanted { logits: Logits::Last, hidden: true, routes: true };
    let mut ids = vec![3, 4, 5, 6, 7];
    let mut generated: Vec<u32> = Vec::new();
    let mut chosen = BTreeSet::new();
    for _ in 0..16 {
        let SweepOutput { logits, hidden, routes } =
            session.forward(&ids, wanted, &Control::default()).unwrap();
        assert!(logits.iter().all(|logit| logit.is_finite()));
        let spread = root_mean_square(&logits);
        assert!((1.0..12.0).contains(&spread), "logits have rms {spread}");
        for (layer, hidden) in hidden.iter().enumerate() {
            let size = root_mean_square(hidden);
            assert!((0.2..30.0).contains(&size), "after layer {layer} rms is {size}");
        }
        chosen.extend(routes[50].iter().flat_map(|route| route.experts.clone()));
        ids = vec![argmax(&logits)];
        generated.extend(&ids);
    }
    let distinct: BTreeSet<_> = generated.iter().collect();
    assert!(distinct.len() >= 4, "{generated:?}");
    assert!(chosen.len() >= 6, "only experts {chosen:?} are ever chosen");
}

#[test]
fn a_smaller_release_keeps_the_kinds_of_its_layers_and_moves_its_special_ids() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("small");
    let options = SynthOptions {
        layers: Some(5),
        experts: Some(16),
        vocabulary: Some(320),
        sparse: true,
        ..SynthOptions::default()
    };
    let facts = synthesize(&directory, &options).unwrap().facts().clone();
    let catalog = Catalog::open(&directory).unwrap();
    let kinds: Vec<bool> =
        catalog.config.layers.iter().map(|kind| kind.attention == AttentionKind::Mla).collect();
    assert_eq!(kinds, [false, false, false, true, false]);
    assert_eq!(catalog.config.bos_token_id, Some(64));
    assert_eq!(catalog.config.eos_token_ids, [66]);
    assert_eq!(catalog.config.pad_token_id, Some(319));
    let config: Value =
        serde_json::from_slice(&fs::read(directory.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["media_placeholder_token_id"], json!(85));
    assert_eq!(config["text_config"]["bos_token_id"], json!(64));
    let summary = catalog.summary();
    assert_eq!(summary.experts.count, 4 * 16 * 6);
    assert_eq!((facts.shards, facts.tensors), (8, 23 + 28 * 3 + 22 + 4 * 16 * 6 + 5 + 168));
    assert_eq!(facts.file_bytes, catalog.files.iter().map(|file| file.length).sum::<u64>());
}

#[test]
fn the_built_in_config_says_what_the_released_one_says() {
    let Some(path) = shared("data/k3_config.json") else { return };
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("release");
    // The experts have no part in what is compared.
    let options = SynthOptions { sparse: true, experts: Some(16), ..SynthOptions::default() };
    synthesize(&directory, &options).unwrap();
    let mut ours = ModelConfig::read(&directory.join("config.json")).unwrap();
    ours.config.moe.as_mut().unwrap().experts = 896;
    let released = ModelConfig::read(&path).unwrap();
    assert_eq!(ours.config, released.config);
    assert!(ours.unknown_keys.is_empty());
    let json = |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
    let (ours, released) = (json(&directory.join("config.json")), json(&path));
    for key in ["vision_config", "media_placeholder_token_id", "architectures"] {
        assert_eq!(ours[key], released[key], "{key}");
    }
    assert_eq!(
        ours["text_config"]["quantization_config"],
        released["text_config"]["quantization_config"]
    );
}

#[test]
fn a_flat_config_gives_names_without_prefix_and_no_image_tensors() {
    let place = tempfile::tempdir().unwrap();
    let config = Some(write_config(place.path(), &tiny_config()["text_config"]));
    let directory = place.path().join("flat");
    synthesize(&directory, &SynthOptions { config, sparse: true, ..Default::default() }).unwrap();
    let catalog = Catalog::open(&directory).unwrap();
    assert_eq!(catalog.tensor("lm_head.weight").unwrap().name, "lm_head.weight");
    assert_eq!(catalog.ignored.count, 0);
}

#[test]
fn what_would_not_be_a_model_is_refused_before_anything_is_written() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("model");
    for (options, words) in [
        (SynthOptions { experts: Some(15), ..Default::default() }, "at least 16 experts, found 15"),
        (SynthOptions { layers: Some(0), ..Default::default() }, "from 1 to 93, found 0"),
        (SynthOptions { layers: Some(94), ..Default::default() }, "from 1 to 93, found 94"),
        (SynthOptions { vocabulary: Some(319), ..Default::default() }, "at least 320 ids"),
    ] {
        let error = Synthesis::plan(&directory, &options).err().unwrap();
        assert!(matches!(error, Error::InvalidInput { .. }), "{error:?}");
        assert!(error.to_string().contains(words) && error.hint().is_some(), "{error}");
    }
    let too_many = SynthOptions { vocabulary: Some(1 << 21), ..Default::default() };
    let error = Synthesis::plan(&directory, &too_many).err().unwrap();
    assert!(error.to_string().contains("`text_config.vocab_size` must be"), "{error}");
    assert!(!directory.exists());
}

#[test]
fn nothing_is_overwritten() {
    let place = tempfile::tempdir().unwrap();
    fs::write(place.path().join("letter"), "dear").unwrap();
    for path in [place.path().to_owned(), place.path().join("letter")] {
        let error = Synthesis::plan(&path, &SynthOptions::default()).err().unwrap();
        assert!(error.to_string().contains("expected a new or an empty directory"), "{error}");
    }
    assert_eq!(contents(place.path()).len(), 1);
}

#[test]
fn weights_that_the_disk_has_no_room_for_are_refused_with_what_is_missing() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("model");
    let synthesis = Synthesis::plan(&directory, &SynthOptions::default()).unwrap();
    if rustix::fs::statvfs(place.path()).unwrap().f_bavail > 1_600_000_000_000 / 4096 {
        return;
    }
    let error = synthesis.write(&|| Ok(())).err().unwrap();
    assert!(error.to_string().contains("bytes of free space, found"), "{error}");
    assert!(error.to_string().contains("are missing"), "{error}");
    assert!(!directory.exists());
}

#[test]
fn a_cancelled_synthesis_leaves_nothing_behind() {
    let place = tempfile::tempdir().unwrap();
    let config = Some(write_config(place.path(), &tiny_config()));
    for (name, is_new) in [("new", true), ("empty", false)] {
        let directory = place.path().join(name);
        if !is_new {
            fs::create_dir(&directory).unwrap();
        }
        let options = SynthOptions { config: config.clone(), ..Default::default() };
        let synthesis = Synthesis::plan(&directory, &options).unwrap();
        let steps = AtomicUsize::new(0);
        let cancel_at_third = || match steps.fetch_add(1, Ordering::Relaxed) {
            2 => Err(Error::Cancelled { layer: 2 }),
            _ => Ok(()),
        };
        let error = synthesis.write(&cancel_at_third).err().unwrap();
        assert!(matches!(error, Error::Cancelled { .. }));
        assert_eq!(directory.exists(), !is_new);
        if !is_new {
            assert!(contents(&directory).is_empty());
        }
        steps.store(3, Ordering::Relaxed);
        synthesis.write(&cancel_at_third).unwrap();
        assert_eq!(steps.load(Ordering::Relaxed), 3 + synthesis.steps());
        Catalog::open(&directory).unwrap();
    }
}
