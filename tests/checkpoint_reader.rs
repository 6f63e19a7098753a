//! A checkpoint directory is opened in every form in which it is published,
//! and refused, with file and tensor, in every form in which it is broken.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;

use _k3rs::Error;
use _k3rs::format::catalog::{Catalog, ExpertPart, TensorTally};
use _k3rs::format::dtype::Dtype;
use _k3rs::format::tensor_names::{self, LM_HEAD, PREFIX};
use _k3rs::io::extent::FileId;
use common::{Checkpoint, Tensor, shared, tiny_config, write_json, write_raw, write_shard};
use serde_json::{Map, Value, json};

const INDEX: &str = "model.safetensors.index.json";

/// The parts of a checkpoint error, with the hint at the end.
fn refusal(directory: &Path) -> String {
    let error = Catalog::open(directory).map(|_| ()).expect_err("a checkpoint to be refused");
    assert!(matches!(error, Error::Checkpoint { .. }), "{error:?}");
    format!("{error}\nhint: {}", error.hint().unwrap())
}

fn assert_refused(directory: &Path, words: &[&str]) {
    let text = refusal(directory);
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

/// Without the prefix of the text model.
fn plain(tensor: &mut Tensor) {
    if let Some(name) = tensor.name.strip_prefix(PREFIX) {
        tensor.name = name.to_owned();
    }
}

fn edit_index(directory: &Path, change: impl FnOnce(&mut Map<String, Value>)) {
    let path = directory.join(INDEX);
    let mut index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(index["weight_map"].as_object_mut().unwrap());
    write_json(&path, &index);
}

#[test]
fn tiny_checkpoint_is_catalogued() {
    let directory = Checkpoint::tiny().written();
    let catalog = Catalog::open(directory.path()).unwrap();
    assert_eq!(catalog.root, directory.path());
    assert_eq!(catalog.config.layers.len(), 4);
    assert_eq!(catalog.files.len(), 6);
    let head = catalog.tensor(LM_HEAD).unwrap();
    assert_eq!(head.name, "language_model.lm_head.weight");
    assert_eq!((head.dtype, head.shape.as_slice()), (Dtype::Bf16, &[64, 64][..]));
    assert_eq!((head.extent.file, head.extent.length), (FileId(4), 64 * 64 * 2));
    let taps = catalog.find("model.layers.1.self_attn.q_conv1d.weight").unwrap();
    assert_eq!((taps.dtype, taps.shape.as_slice()), (Dtype::F32, &[24, 1, 4][..]));
    assert!(catalog.find("model.layers.9.input_layernorm.weight").is_none());
    let error = catalog.tensor("model.no.such").unwrap_err().to_string();
    assert!(error.contains("`language_model.model.no.such`"), "{error}");
    // F16 [4, 3] and BF16 [8, 8] of the image part.
    assert_eq!(catalog.ignored, TensorTally { count: 2, bytes: 24 + 128 });
}

#[test]
fn summary_adds_up() {
    let checkpoint = Checkpoint::tiny();
    let catalog = Catalog::open(checkpoint.written().path()).unwrap();
    let summary = catalog.summary();
    // Per expert: 2 x [32, 48], [96, 16] packed, 2 x [32, 3], [96, 1] scales.
    assert_eq!(summary.experts, TensorTally { count: 3 * 12 * 6, bytes: 36 * 4896 });
    assert_eq!(summary.roots, TensorTally { count: 5, bytes: 2 * (2 * 64 * 64 + 3 * 64) });
    let text: Vec<&Tensor> = checkpoint.shards[..5].iter().flat_map(|shard| &shard.1).collect();
    let bytes: u64 = text.iter().map(|tensor| tensor.byte_count()).sum();
    let parts = [summary.layers, summary.roots, summary.experts];
    assert_eq!(parts.iter().map(|part| part.count).sum::<u64>(), text.len() as u64);
    assert_eq!(parts.iter().map(|part| part.bytes).sum::<u64>(), bytes);
    let f32 = text.iter().filter(|tensor| tensor.dtype == "F32");
    let f32_tally = summary.dtypes.iter().find(|(dtype, _)| *dtype == Dtype::F32).unwrap().1;
    assert_eq!(f32_tally.bytes, f32.map(|tensor| tensor.byte_count()).sum::<u64>());
    assert_eq!(summary.dtypes.iter().map(|(_, tally)| tally.bytes).sum::<u64>(), bytes);
    let values = |tensor: &&Tensor| match tensor.name.rsplit_once('.').unwrap().1 {
        "weight_packed" => 2 * tensor.shape.iter().product::<usize>() as u64,
        "weight_scale" => 0,
        _ => tensor.shape.iter().product::<usize>() as u64,
    };
    assert_eq!(catalog.parameter_count(), text.iter().map(values).sum::<u64>());
}

/// The spans of every text tensor, also of the experts, against the crate that
/// defines the format.
#[test]
fn spans_agree_with_the_safetensors_crate() {
    let checkpoint = Checkpoint::tiny();
    let directory = checkpoint.written();
    let catalog = Catalog::open(directory.path()).unwrap();
    for (number, (shard, tensors)) in checkpoint.shards[..5].iter().enumerate() {
        let bytes = fs::read(directory.path().join(shard)).unwrap();
        let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        for tensor in tensors {
            let (begin, end) = metadata.info(&tensor.name).unwrap().data_offsets;
            let name = tensor.name.strip_prefix(PREFIX).unwrap();
            let extent = match tensor_names::parse_expert(name) {
                Some((layer, expert, part)) => {
                    assert_eq!(catalog.expert_tensor_name(layer, expert, part), tensor.name);
                    catalog.experts.parts(layer, expert)[part as usize]
                }
                None => catalog.tensor(name).unwrap().extent,
            };
            assert_eq!(extent.file, FileId(number as u16));
            assert_eq!(extent.offset, (8 + header + begin) as u64, "{name}");
            assert_eq!(extent.length, (end - begin) as u64, "{name}");
        }
    }
}

#[test]
fn shared_checkpoints_are_opened() {
    for (name, experts) in [("tiny-a", 12 * 16), ("tiny-b", 8 * 12), ("tiny-e", 4 * 5)] {
        let Some(path) = shared(&format!("oracle/{name}/model")) else { return };
        let catalog = Catalog::open(&path).unwrap();
        assert_eq!(catalog.experts.expert_count(), experts, "{name}");
        assert_eq!(catalog.unknown_config_keys, Vec::<String>::new());
    }
}

#[test]
fn all_published_forms_give_the_same_text_model() {
    let reference = Catalog::open(Checkpoint::tiny().written().path()).unwrap();
    let names = |catalog: &Catalog| -> Vec<String> {
        let strip = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
        catalog.trunk().iter().map(|entry| strip(&entry.name)).collect()
    };
    let mut forms = vec![("plain names", Checkpoint::tiny().map(plain))];
    let mut one_file = Checkpoint::tiny();
    let all = one_file.shards.iter().flat_map(|shard| shard.1.clone()).collect();
    one_file.shards = vec![("model.safetensors".to_owned(), all)];
    forms.push(("one file", one_file));
    let nested_images = Checkpoint::tiny().map(|tensor| {
        plain(tensor);
        if tensor_names::is_vision(&tensor.name) {
            tensor.name = format!("model.{}", tensor.name);
        }
    });
    forms.push(("plain names, image part under model.", nested_images));
    let mut stray = Checkpoint::tiny();
    stray.shards[0].1.push(Tensor::new("anything.else", "I64", &[]));
    let stray_expert = tensor_names::expert(1, 0, ExpertPart::GateScale);
    stray.shards[0].1.push(Tensor::new(stray_expert, "U8", &[32, 3]));
    forms.push(("tensors without prefix beside prefixed ones", stray));
    let f32_trunk = Checkpoint::tiny().map(|tensor| {
        if tensor.dtype == "BF16" {
            tensor.dtype = "F32".to_owned();
        }
    });
    forms.push(("a float32 trunk", f32_trunk));
    for (what, form) in forms {
        for with_index in [true, false] {
            let directory = tempfile::tempdir().unwrap();
            form.write_without_index(directory.path());
            if with_index {
                write_json(&directory.path().join(INDEX), &form.index());
            }
            let catalog = Catalog::open(directory.path()).unwrap();
            assert_eq!(names(&catalog), names(&reference), "{what}, index: {with_index}");
            assert_eq!(catalog.parameter_count(), reference.parameter_count(), "{what}");
        }
    }
}

#[test]
fn all_forms_of_the_model_are_opened() {
    let cases = [
        ("/text_config/linear_attn_config/use_full_rank_gate", json!(false)),
        ("/text_config/q_lora_rank", Value::Null),
        ("/text_config/mla_use_output_gate", json!(false)),
        ("/text_config/latent_moe_use_norm", json!(false)),
        ("/text_config/attn_res_block_size", Value::Null),
        ("/text_config/moe_layer_freq", json!(2)),
        ("/text_config/linear_attn_config/short_conv_kernel_size", json!(3)),
        ("/text_config/routed_expert_hidden_size", Value::Null),
        ("/text_config/num_shared_experts", Value::Null),
        ("/text_config/num_experts", Value::Null),
    ];
    for (pointer, value) in cases {
        let mut config = tiny_config();
        *config.pointer_mut(pointer).unwrap() = value;
        let directory = Checkpoint::of(&config).written();
        Catalog::open(directory.path()).unwrap();
        // The same weights are not those of the unchanged config.
        write_json(&directory.path().join("config.json"), &tiny_config());
        refusal(directory.path());
    }
    let mut tied = tiny_config();
    tied["tie_word_embeddings"] = json!(true);
    tied["text_config"]["tie_word_embeddings"] = json!(true);
    let directory = Checkpoint::of(&tied).written();
    assert!(Catalog::open(directory.path()).unwrap().find(LM_HEAD).is_none());
}

#[test]
fn a_log_needs_one_value_per_head() {
    // Three heads of width 8: the release pads to the width.
    for (length, accepted) in [(3, true), (8, true), (40, true), (2, false), (0, false)] {
        let mut checkpoint = Checkpoint::tiny();
        checkpoint.tensor("layers.1.self_attn.A_log").shape = vec![length];
        let directory = checkpoint.written();
        match Catalog::open(directory.path()) {
            Ok(catalog) => {
                assert!(accepted, "{length}");
                let entry = catalog.tensor("model.layers.1.self_attn.A_log").unwrap();
                assert_eq!(entry.shape, [length]);
            }
            Err(_) => {
                assert!(!accepted, "{length}");
                assert_refused(directory.path(), &["1.self_attn.A_log`", "at least 3 values"]);
            }
        }
    }
    let mut checkpoint = Checkpoint::tiny();
    checkpoint.tensor("layers.1.self_attn.A_log").shape = vec![8, 1];
    assert_refused(checkpoint.written().path(), &["1.self_attn.A_log`", "[8, 1]"]);
}

#[test]
fn symlinked_snapshots_are_followed() {
    let blobs = Checkpoint::tiny().written();
    let snapshot = tempfile::tempdir().unwrap();
    for (number, entry) in fs::read_dir(blobs.path()).unwrap().enumerate() {
        let entry = entry.unwrap();
        let blob = blobs.path().join(format!("{number:064x}"));
        fs::rename(entry.path(), &blob).unwrap();
        std::os::unix::fs::symlink(&blob, snapshot.path().join(entry.file_name())).unwrap();
    }
    Catalog::open(snapshot.path()).unwrap();
    let shard = fs::canonicalize(snapshot.path().join("model-00002-of-000006.safetensors"));
    fs::remove_file(shard.unwrap()).unwrap();
    assert_refused(snapshot.path(), &["model-00002-of-000006.safetensors", "dangling symlink"]);
}

#[test]
fn directory_names_may_be_unusual() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("K3 模型 – ünïcode");
    Checkpoint::tiny().write(&directory);
    Catalog::open(&directory).unwrap();
    let mut slash = directory.clone().into_os_string();
    slash.push("/");
    Catalog::open(Path::new(&slash)).unwrap();
    let here = std::env::current_dir().unwrap();
    let up: std::path::PathBuf = here.components().skip(1).map(|_| "..").collect();
    let relative = up.join(directory.strip_prefix("/").unwrap());
    assert!(relative.is_relative());
    let catalog = Catalog::open(&relative).unwrap();
    assert_eq!(catalog.root, relative);
}

#[test]
fn directories_without_a_model_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let absent = directory.path().join("absent");
    let error = Catalog::open(&absent).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if *path == absent), "{error:?}");
    assert_refused(directory.path(), &["config.json", "none"]);
    write_json(&directory.path().join("config.json"), &tiny_config());
    assert_refused(directory.path(), &["*.safetensors", "none"]);
    assert_refused(&directory.path().join("config.json"), &["a model directory", "a file"]);
    fs::write(directory.path().join("config.json"), "{").unwrap();
    let error = Catalog::open(directory.path()).unwrap_err();
    assert!(matches!(error, Error::Config { .. }), "{error:?}");
}

#[test]
fn all_missing_shards_are_named() {
    for with_index in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::tiny();
        checkpoint.write_without_index(directory.path());
        if with_index {
            write_json(&directory.path().join(INDEX), &checkpoint.index());
        }
        for number in [2, 4, 6] {
            let name = format!("model-{number:05}-of-000006.safetensors");
            fs::remove_file(directory.path().join(name)).unwrap();
        }
        let text = refusal(directory.path());
        assert!(text.contains("3 missing"), "{text}");
        for (number, missing) in [(1, false), (2, true), (3, false), (4, true), (6, true)] {
            let name = format!("model-{number:05}-of-000006.safetensors");
            assert_eq!(text.contains(&name), missing, "{name}: {text}");
        }
    }
}

#[test]
fn truncated_shards_are_found_at_open() {
    let directory = Checkpoint::tiny().written();
    let shard = |number| directory.path().join(format!("model-{number:05}-of-000006.safetensors"));
    let truncate = |number, length: u64| {
        fs::File::options().write(true).open(shard(number)).unwrap().set_len(length).unwrap();
    };
    let length = fs::metadata(shard(2)).unwrap().len();
    truncate(2, length - 1);
    let last = "experts.9.w3.weight_scale`";
    let (whole, found) = (format!("{length} bytes"), format!("{} bytes", length - 1));
    assert_refused(directory.path(), &["model-00002", last, &whole, &found, "incomplete"]);
    truncate(5, 100);
    truncate(6, 5);
    let others = "also broken: ";
    assert_refused(directory.path(), &["model-00002", others, "model-00005", "model-00006"]);
    truncate(2, length);
    assert_refused(directory.path(), &["model-00005", "a header of", "100 bytes"]);
    truncate(2, length + 1);
    assert_refused(directory.path(), &["model-00002", &format!("{} bytes", length + 1)]);
}

#[test]
fn a_misspelt_name_is_pointed_out() {
    let mut checkpoint = Checkpoint::tiny();
    checkpoint.tensor("layers.2.self_attn.kv_b_proj.weight").name =
        "language_model.model.layers.2.self_attn.kv_b_porj.weight".to_owned();
    let directory = checkpoint.written();
    assert_refused(
        directory.path(),
        &[
            "tensor `language_model.model.layers.2.self_attn.kv_b_proj.weight`",
            "`language_model.model.layers.2.self_attn.kv_b_porj.weight` in",
            "model-00003-of-000006.safetensors",
            "misspelt",
        ],
    );
}

#[test]
fn missing_tensors_are_listed_and_counted() {
    let mut checkpoint = Checkpoint::tiny();
    checkpoint.remove("layers.3.self_attn.o_proj.weight");
    checkpoint.remove("layers.1.block_sparse_moe.experts.7.w2.weight_scale");
    checkpoint.remove("layers.3.block_sparse_moe.experts.11.w3.weight_packed");
    let text = refusal(checkpoint.written().path());
    for name in [
        "3 missing",
        "layers.3.self_attn.o_proj.weight`",
        "layers.1.block_sparse_moe.experts.7.w2.weight_scale`",
        "layers.3.block_sparse_moe.experts.11.w3.weight_packed`",
    ] {
        assert!(text.contains(name), "{text}");
    }
    let mut checkpoint = Checkpoint::tiny();
    for (_, tensors) in &mut checkpoint.shards {
        tensors.retain(|tensor| !tensor.name.contains(".experts."));
    }
    let text = refusal(checkpoint.written().path());
    assert!(text.contains("216 missing") && text.contains("and 208 more"), "{text}");
    assert!(text.contains("layers.1.block_sparse_moe.experts.0.w1.weight_packed`"), "{text}");
}

#[test]
fn unexpected_text_tensors_are_refused() {
    for (name, form) in [
        ("language_model.model.layers.0.self_attn.new.weight", Checkpoint::tiny()),
        ("language_model.model.layers.1.block_sparse_moe.experts.12.w1.weight_scale", {
            Checkpoint::tiny()
        }),
        ("language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_scale", {
            Checkpoint::tiny()
        }),
        ("audio_tower.weight", Checkpoint::tiny().map(plain)),
    ] {
        let mut checkpoint = form;
        checkpoint.shards[0].1.push(Tensor::new(name, "U8", &[32, 3]));
        assert_refused(checkpoint.written().path(), &["model-00001", &format!("`{name}`")]);
    }
}

#[test]
fn wrong_shapes_and_types_are_refused() {
    let cases = [
        ("layers.1.self_attn.q_proj.weight", "BF16", vec![64, 24], "shape [24, 64]"),
        ("layers.1.self_attn.q_proj.weight", "F16", vec![24, 64], "BF16 or F32"),
        ("layers.1.self_attn.q_proj.weight", "U8", vec![24, 64], "BF16 or F32"),
        ("layers.1.self_attn.q_conv1d.weight", "F32", vec![24, 4], "shape [24, 1, 4]"),
        ("model.norm.weight", "BF16", vec![1, 64], "shape [64]"),
        ("layers.1.block_sparse_moe.experts.3.w2.weight_packed", "I8", vec![96, 16], "U8"),
        ("layers.1.block_sparse_moe.experts.3.w2.weight_scale", "U8", vec![96, 2], "[96, 1]"),
    ];
    for (suffix, dtype, shape, expected) in cases {
        let mut checkpoint = Checkpoint::tiny();
        let tensor = checkpoint.tensor(suffix);
        (tensor.dtype, tensor.shape) = (dtype.to_owned(), shape.clone());
        let found = format!("{dtype} with shape {shape:?}");
        let name = format!("{suffix}`");
        assert_refused(checkpoint.written().path(), &[".safetensors", &name, expected, &found]);
    }
}

#[test]
fn duplicates_across_shards_are_refused() {
    for suffix in [
        "layers.1.self_attn.q_proj.weight",
        "experts.3.w2.weight_packed",
        "mm_projector.proj.0.weight",
    ] {
        let mut checkpoint = Checkpoint::tiny();
        let copy = checkpoint.tensor(suffix).clone();
        checkpoint.shards[3].1.push(copy.clone());
        let directory = tempfile::tempdir().unwrap();
        checkpoint.write_without_index(directory.path());
        assert_refused(directory.path(), &[&copy.name, "no other shard", ".safetensors"]);
    }
}

#[test]
fn index_and_shards_must_agree() {
    let shard = "model-00002-of-000006.safetensors";
    let name = "language_model.model.layers.1.self_attn.A_log";
    let directory = Checkpoint::tiny().written();
    edit_index(directory.path(), |map| {
        map.insert("extra.weight".to_owned(), json!(shard));
    });
    assert_refused(directory.path(), &[INDEX, shard, "the shard lacks `extra.weight`"]);
    let directory = Checkpoint::tiny().written();
    edit_index(directory.path(), |map| drop(map.shift_remove(name)));
    assert_refused(directory.path(), &[INDEX, shard, &format!("the index lacks `{name}`")]);
    edit_index(directory.path(), |map| {
        map.insert(name.replace("A_log", "a_log"), json!(shard));
    });
    assert_refused(directory.path(), &["the shard lacks `", "a_log`; the index lacks `", "A_log`"]);
    let directory = Checkpoint::tiny().written();
    let path = directory.path().join(INDEX);
    let text = fs::read_to_string(&path).unwrap();
    let entry = format!("\"{name}\":\"{shard}\"");
    fs::write(&path, text.replace(&entry, &format!("{entry},{entry}"))).unwrap();
    assert_refused(directory.path(), &[&format!("the index repeats `{name}`")]);
}

#[test]
fn files_beside_the_index_are_left_alone() {
    let directory = Checkpoint::tiny().written();
    write_raw(&directory.path().join("consolidated.safetensors"), b"no header", 0);
    Catalog::open(directory.path()).unwrap();
}

#[test]
fn broken_indexes_are_refused() {
    let directory = Checkpoint::tiny().written();
    for (text, found) in [
        ("{\"weight_map\": ", "line 1"),
        ("[]", "invalid type"),
        ("{\"metadata\": {}}", "missing field `weight_map`"),
        ("{\"weight_map\": {\"a\": 1}}", "expected a string"),
        ("{\"weight_map\": {}} {}", "trailing characters"),
        ("{\"weight_map\": {\"a\": \"../a.safetensors\"}}", "`../a.safetensors`"),
        ("{\"weight_map\": {\"a\": \"/a.safetensors\"}}", "`/a.safetensors`"),
        ("{\"weight_map\": {}}", "none"),
    ] {
        fs::write(directory.path().join(INDEX), text).unwrap();
        assert_refused(directory.path(), &[found]);
    }
}

#[test]
fn headers_of_any_alignment_and_with_metadata_are_read() {
    let checkpoint = Checkpoint::tiny();
    let directory = checkpoint.written();
    for (number, metadata) in [json!({}), json!({"format": "pt"}), Value::Null].iter().enumerate() {
        let (name, tensors) = &checkpoint.shards[number];
        let first = Map::from_iter([("__metadata__".to_owned(), metadata.clone())]);
        let (text, data_bytes) = common::header(tensors, &first);
        let odd = format!("{}{}", text.trim_end(), " ".repeat(1 + text.trim_end().len() % 2));
        assert_eq!(odd.len() % 2, 1);
        write_raw(&directory.path().join(name), odd.as_bytes(), data_bytes);
    }
    let catalog = Catalog::open(directory.path()).unwrap();
    let head = catalog.tensor("model.layers.1.self_attn.A_log").unwrap();
    assert_eq!(head.extent.offset % 2, 1);
    let mut image = checkpoint.shards[5].1.clone();
    image.push(Tensor::new("vision_tower.empty", "BF16", &[0, 7]));
    write_shard(&directory.path().join(&checkpoint.shards[5].0), &image, &Map::new());
    edit_index(directory.path(), |map| {
        map.insert("vision_tower.empty".to_owned(), json!(checkpoint.shards[5].0));
    });
    assert_eq!(Catalog::open(directory.path()).unwrap().ignored.count, 3);
}
