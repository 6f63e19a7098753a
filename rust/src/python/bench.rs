//! What the machine can do, and the kernels beside it.

use pyo3::prelude::*;
use serde_json::json;

use crate::kernels::backend::Backend;
use crate::measure::{self, Effort};

/// Limits, kernels and foreign work as JSON text; `quick` only checks that all runs.
#[pyfunction]
#[pyo3(signature = (*, threads=None, backend="auto", quick=false))]
pub(super) fn bench(
    py: Python<'_>,
    threads: Option<usize>,
    backend: &str,
    quick: bool,
) -> PyResult<String> {
    let backend = Backend::named(backend)?;
    let effort = if quick { Effort::CHECK } else { Effort::FULL };
    let measured = py.detach(|| measure::measure(backend, threads, effort))?;
    Ok(json!(measured).to_string())
}
