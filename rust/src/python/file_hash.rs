//! Hashes of whole files.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::io::file_hash::{self, Algorithm};

/// The hash of a file in hexadecimal digits, or `None` if `advanced`, which is told
/// how many more bytes were hashed, does not say to go on. Several threads may call it.
#[pyfunction]
pub(super) fn hash_file(
    py: Python<'_>,
    path: PathBuf,
    algorithm: &str,
    advanced: Py<PyAny>,
) -> PyResult<Option<String>> {
    let algorithm = Algorithm::named(algorithm)?;
    let mut refused = None;
    let outcome = py.detach(|| {
        file_hash::hash_file(&path, algorithm, |count| {
            Python::attach(|py| advanced.call1(py, (count,))?.extract(py)).unwrap_or_else(|error| {
                refused = Some(error);
                false
            })
        })
    });
    match refused {
        Some(error) => Err(error),
        None => Ok(outcome?),
    }
}
