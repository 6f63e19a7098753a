//! A checkpoint in facts: what `k3rs inspect` and the report of a run print.

use serde_json::{Value, json};

use crate::format::catalog::{Catalog, TensorTally};
use crate::format::dtype::Dtype;

/// The facts as JSON: `model` (`path`, `layers`, `hidden`, `vocab`,
/// `parameters`), `config` as understood, `unknown_config_keys`, `tensors`
/// (count and bytes by part), `dtypes` and `files` (path and bytes).
pub fn describe(catalog: &Catalog) -> Value {
    let summary = catalog.summary();
    let tally = |tally: TensorTally| json!({"count": tally.count, "bytes": tally.bytes});
    let dtypes = summary.dtypes.iter().map(|(dtype, of)| (dtype_name(*dtype), tally(*of)));
    let files: Vec<Value> = catalog
        .files
        .iter()
        .map(|file| json!({"path": file.path.to_string_lossy(), "bytes": file.length}))
        .collect();
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
            "layers": tally(summary.layers),
            "roots": tally(summary.roots),
            "experts": tally(summary.experts),
            "ignored": tally(summary.ignored),
        },
        "dtypes": dtypes.collect::<serde_json::Map<_, _>>(),
        "files": files,
    })
}

fn dtype_name(dtype: Dtype) -> String {
    match dtype {
        Dtype::Bf16 => "BF16".into(),
        Dtype::F32 => "F32".into(),
        Dtype::U8 => "U8".into(),
    }
}
