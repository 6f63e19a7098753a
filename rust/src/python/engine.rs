//! `Engine`, and what can be asked of a directory without one.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use serde_json::json;

use crate::engine::describe::{describe, inspect as inspect_directory};
use crate::engine::{self, EngineOptions, session_file};
use crate::io::file::Access;
use crate::kernels::backend::Backend;
use crate::python::session::{Loaded, Session};
use crate::storage::memory_plan::{Budget, MemoryPlan};

/// Instruction sets that this CPU can run, best first.
#[pyfunction]
pub(super) fn available_backends() -> Vec<&'static str> {
    Backend::available().into_iter().map(Backend::name).collect()
}

/// Facts about a checkpoint directory as JSON text.
#[pyfunction]
pub(super) fn inspect(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    Ok(py.detach(|| inspect_directory(&path))?.to_string())
}

/// The memory plan as JSON text.
#[pyfunction]
#[pyo3(signature = (path, *, memory_bytes=None, trunk_bytes=None, cache_bytes=None,
                    positions=4096, prefill_chunk=None, threads=None, layers=None))]
#[allow(clippy::too_many_arguments)]
pub(super) fn plan(
    py: Python<'_>,
    path: PathBuf,
    memory_bytes: Option<u64>,
    trunk_bytes: Option<u64>,
    cache_bytes: Option<u64>,
    positions: usize,
    prefill_chunk: Option<usize>,
    threads: Option<usize>,
    layers: Option<usize>,
) -> PyResult<String> {
    let options = EngineOptions {
        budget: budget(memory_bytes, trunk_bytes, cache_bytes),
        positions,
        chunk: prefill_chunk,
        threads,
        layers,
        ..EngineOptions::default()
    };
    let (plan, source) = py.detach(|| engine::plan(&path, &options))?;
    let facts = json!({"minimum_bytes": plan.minimum_bytes, "plan": plan_json(&plan, &source)});
    Ok(facts.to_string())
}

/// What a saved session says of itself, as JSON text.
#[pyfunction]
pub(super) fn read_session_label(py: Python<'_>, path: PathBuf) -> PyResult<String> {
    let (label, positions, ids) = py.detach(|| session_file::read_label(&path))?;
    let facts = json!({
        "fingerprint": label.fingerprint, "positions": positions, "ids": ids, "note": label.note,
    });
    Ok(facts.to_string())
}

/// An open checkpoint.
#[pyclass(frozen, module = "k3rs._k3rs")]
pub(super) struct Engine(Arc<engine::Engine>);

#[pymethods]
impl Engine {
    /// Opens the checkpoint directory at `path`.
    #[staticmethod]
    #[pyo3(signature = (path, *, memory_bytes=None, trunk_bytes=None, cache_bytes=None,
                        positions=4096, prefill_chunk=None, threads=None, backend="auto",
                        direct=None, trunk=None, layers=None))]
    #[allow(clippy::too_many_arguments)]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        memory_bytes: Option<u64>,
        trunk_bytes: Option<u64>,
        cache_bytes: Option<u64>,
        positions: usize,
        prefill_chunk: Option<usize>,
        threads: Option<usize>,
        backend: &str,
        direct: Option<bool>,
        trunk: Option<PathBuf>,
        layers: Option<usize>,
    ) -> PyResult<Engine> {
        let options = EngineOptions {
            budget: budget(memory_bytes, trunk_bytes, cache_bytes),
            positions,
            chunk: prefill_chunk,
            threads,
            backend: Backend::named(backend)?,
            trunk,
            layers,
            access: if direct == Some(false) { Access::Buffered } else { Access::Auto },
            ..EngineOptions::default()
        };
        let engine = py.detach(|| engine::Engine::open(&path, &options))?;
        Ok(Engine(Arc::new(engine)))
    }

    /// An empty session.
    fn session(&self) -> Session {
        Session::new(Arc::clone(&self.0))
    }

    /// The session saved at `path`; see `k3rs.Model.load_session`.
    fn load_session(&self, py: Python<'_>, path: PathBuf) -> PyResult<Loaded> {
        Ok(py.detach(|| Session::load(Arc::clone(&self.0), &path))?)
    }

    /// The model, its config, the options in force and the plan, as JSON text.
    fn describe(&self) -> String {
        let engine = &self.0;
        let mut facts = describe(engine.catalog());
        facts["model"]["fingerprint"] = json!(engine.fingerprint());
        facts["options"] = json!({
            "threads": engine.thread_count(),
            "backend": engine.backend().name(),
            "prefill_chunk": engine.plan().chunk,
        });
        facts["plan"] = plan_json(engine.plan(), engine.budget_source());
        facts.to_string()
    }

    /// What was read and waited for since open, as JSON text.
    fn report(&self, py: Python<'_>) -> String {
        let report = py.detach(|| self.0.report());
        json!(report).to_string()
    }
}

fn budget(memory: Option<u64>, trunk: Option<u64>, cache: Option<u64>) -> Option<Budget> {
    match (trunk, cache) {
        (None, None) => memory.map(Budget::Total),
        (trunk, cache) => {
            Some(Budget::Parts { trunk: trunk.unwrap_or(0), experts: cache.unwrap_or(0) })
        }
    }
}

fn plan_json(plan: &MemoryPlan, source: &str) -> serde_json::Value {
    let mut facts = json!(plan);
    facts["budget_source"] = json!(source);
    facts
}
