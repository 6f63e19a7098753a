//! Synthetic checkpoints.

use std::path::PathBuf;

use pyo3::prelude::*;
use serde_json::json;

use crate::python::gil;
use crate::synth::{SynthOptions, Synthesis};

/// Writes a synthetic checkpoint into `directory`; see `k3rs.synthesize`.
#[pyfunction]
#[pyo3(signature = (directory, *, config=None, layers=None, experts=None, vocabulary=None,
                    sparse=false, seed=0, progress=None))]
#[allow(clippy::too_many_arguments)]
pub(super) fn synthesize(
    py: Python<'_>,
    directory: PathBuf,
    config: Option<PathBuf>,
    layers: Option<usize>,
    experts: Option<usize>,
    vocabulary: Option<usize>,
    sparse: bool,
    seed: u64,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let options = SynthOptions { config, layers, experts, vocabulary, sparse, seed, threads: None };
    let synthesis = py.detach(|| Synthesis::plan(&directory, &options))?;
    let disk_bytes = gil::run(
        py,
        progress.as_ref(),
        synthesis.steps(),
        |control| synthesis.write(&|| control.step_done()),
        || (),
    )?;
    let mut facts = json!(synthesis.facts());
    facts["disk_bytes"] = json!(disk_bytes);
    Ok(facts.to_string())
}
