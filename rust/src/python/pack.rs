//! Packed trunks.

use std::path::PathBuf;

use pyo3::prelude::*;
use serde_json::json;

use crate::engine::Control;
use crate::engine::pack::Packing;
use crate::python::gil;

/// Writes the trunk of `model` into `directory`; see `k3rs.pack_trunk`.
#[pyfunction]
#[pyo3(signature = (model, directory, *, progress=None))]
pub(super) fn pack_trunk(
    py: Python<'_>,
    model: PathBuf,
    directory: PathBuf,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<String> {
    let packing = py.detach(|| Packing::plan(&model, &directory))?;
    let pieces = packing.pieces() as usize;
    let write = |control: &Control| packing.write(&|| control.step_done());
    let facts = gil::run(py, progress.as_ref(), pieces, write, || ())?;
    Ok(json!(facts).to_string())
}

/// Compares the trunk in `directory` with its model; see `k3rs.verify_trunk`.
#[pyfunction]
#[pyo3(signature = (model, directory, *, progress=None))]
pub(super) fn verify_trunk(
    py: Python<'_>,
    model: PathBuf,
    directory: PathBuf,
    progress: Option<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let packing = py.detach(|| Packing::plan(&model, &directory))?;
    let pieces = packing.pieces() as usize;
    let check = |control: &Control| packing.verify(&|| control.step_done());
    gil::run(py, progress.as_ref(), pieces, check, || ())
}
