//! A checkpoint in facts: what `k3rs inspect` and the report of a run print.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::engine::fingerprint::fingerprint;
use crate::error::Result;
use crate::format::catalog::{Catalog, ShardFile, TensorTally};
use crate::format::dtype::Dtype;
use crate::format::survey::{Part, Survey};
use crate::io::file::Access;
use crate::io::threads::compute_pool;
use crate::model::binding::bind;
use crate::storage::memory_plan::TILE_BYTES;

/// The facts as JSON: `model` (`path`, `layers`, `hidden`, `vocab`,
/// `parameters`), `config` as understood, `unknown_config_keys`, `tensors`
/// (count and bytes by part), `dtypes` and `files` (path and bytes).
pub fn describe(catalog: &Catalog) -> Value {
    let summary = catalog.summary();
    json!({
        "model": {
            "path": catalog.root.to_string_lossy(),
            "layers": catalog.config.layers.len(),
            "hidden": catalog.config.hidden_size,
            "vocab": catalog.config.vocab_size,
            "parameters": catalog.parameter_count(),
        },
        "config": catalog.config,
        "unknown_config_keys": catalog.unknown_config_keys,
        "tensors": {
            "layers": tally(&summary.layers),
            "roots": tally(&summary.roots),
            "experts": tally(&summary.experts),
            "ignored": tally(&summary.ignored),
        },
        "dtypes": dtypes(&summary.dtypes),
        "files": files(&catalog.files),
    })
}

/// What is in `directory`, complete or not, without any weight but the small
/// vectors: the facts of [`describe`], and `complete`, `runnable_layers` (of the
/// first layers), `problem`, `missing`, `unexpected`, `missing_shards`,
/// `broken_shards` and `layers`. Parameters and fingerprint are null unless the
/// model could be run.
///
/// # Errors
/// Those of [`Survey::of`], and [`crate::Error::System`].
pub fn inspect(directory: &Path) -> Result<Value> {
    compute_pool(None)?.install(|| {
        let survey = Survey::of(directory)?;
        let (model, problem) = match open(directory) {
            Ok(facts) => (facts, None),
            Err(error) => {
                let (problem, hint) = (error.to_string(), error.hint());
                let model = json!({"parameters": null, "fingerprint": null});
                (model, Some(json!({"error": problem, "hint": hint})))
            }
        };
        let runnable_layers = match (&problem, survey.first_layers()) {
            (None, layers) => layers,
            (Some(_), 0) => 0,
            (Some(_), layers) => Catalog::open_first(directory, Some(layers)).map_or(0, |_| layers),
        };
        let sum = |part: fn(&crate::format::survey::LayerSurvey) -> Part| {
            survey.layers.iter().map(part).fold(TensorTally::default(), |sum, part| TensorTally {
                count: sum.count + part.found,
                bytes: sum.bytes + part.bytes,
            })
        };
        let roots = TensorTally { count: survey.roots.found, bytes: survey.roots.bytes };
        Ok(json!({
            "model": {
                "path": directory.to_string_lossy(),
                "layers": survey.config.layers.len(),
                "hidden": survey.config.hidden_size,
                "vocab": survey.config.vocab_size,
                "parameters": model["parameters"],
                "fingerprint": model["fingerprint"],
            },
            "complete": problem.is_none(),
            "runnable_layers": runnable_layers,
            "problem": problem,
            "missing": survey.missing,
            "unexpected": survey.unexpected,
            "missing_shards": survey.missing_shards,
            "broken_shards": survey.broken_shards,
            "tensors": {
                "layers": tally(&sum(|layer| layer.trunk)),
                "roots": tally(&roots),
                "experts": tally(&sum(|layer| layer.experts)),
                "ignored": tally(&survey.ignored),
            },
            "roots_demanded": survey.roots.demanded,
            "dtypes": dtypes(&survey.dtypes),
            "layers": survey.layers,
            "config": survey.config,
            "unknown_config_keys": survey.unknown_config_keys,
            "files": files(&survey.files),
        }))
    })
}

/// Parameters and fingerprint of a model that can be run.
fn open(directory: &Path) -> Result<Value> {
    let catalog = Catalog::open(directory)?;
    let files = catalog.open_files(Access::Auto)?;
    let model = bind(&catalog, &files, TILE_BYTES, None)?;
    Ok(json!({
        "parameters": catalog.parameter_count(),
        "fingerprint": fingerprint(&catalog, &files, &model)?,
    }))
}

fn tally(tally: &TensorTally) -> Value {
    json!({"count": tally.count, "bytes": tally.bytes})
}

fn dtypes(dtypes: &[(Dtype, TensorTally)]) -> Map<String, Value> {
    dtypes.iter().map(|(dtype, of)| (dtype.name().to_owned(), tally(of))).collect()
}

fn files(files: &[ShardFile]) -> Vec<Value> {
    let facts =
        |file: &ShardFile| json!({"path": file.path.to_string_lossy(), "bytes": file.length});
    files.iter().map(facts).collect()
}
