//! What the machine can do, and the kernels beside it.

use std::path::PathBuf;

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

/// Bytes read from memory in a second, in units of 10^9.
#[pyfunction]
pub(super) fn memory_read_gb_s(py: Python<'_>) -> PyResult<f64> {
    Ok(py.detach(measure::memory_read_gb_s)?)
}

/// What the device below the files at `paths` delivers, as JSON text; `seconds`
/// for each kind of read.
#[pyfunction]
pub(super) fn measure_device(
    py: Python<'_>,
    paths: Vec<PathBuf>,
    seconds: f64,
) -> PyResult<String> {
    let device = py.detach(|| measure::device::measure(&paths, seconds))?;
    Ok(json!(device).to_string())
}

/// Writes `size_bytes` random bytes to a new file, to measure a device by.
#[pyfunction]
pub(super) fn write_probe_file(py: Python<'_>, path: PathBuf, size_bytes: u64) -> PyResult<()> {
    Ok(py.detach(|| measure::device::write_probe(&path, size_bytes))?)
}
