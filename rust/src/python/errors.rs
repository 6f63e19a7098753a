//! Errors become exceptions of `k3rs.exceptions`, in one match.

use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::{PyErr, import_exception};

use crate::error::Error;

import_exception!(k3rs.exceptions, CheckpointError);
import_exception!(k3rs.exceptions, ConfigError);
import_exception!(k3rs.exceptions, InputError);
import_exception!(k3rs.exceptions, K3Error);
import_exception!(k3rs.exceptions, MemoryBudgetError);
import_exception!(k3rs.exceptions, NumericalFault);
import_exception!(k3rs.exceptions, ReadError);
import_exception!(k3rs.exceptions, SessionError);
import_exception!(k3rs.exceptions, SessionFileError);

impl From<Error> for PyErr {
    fn from(error: Error) -> PyErr {
        let (message, hint) = (error.to_string(), error.hint());
        match error {
            Error::Io { .. } => ReadError::new_err((message, hint)),
            Error::Checkpoint { .. } => CheckpointError::new_err((message, hint)),
            Error::Config { .. } => ConfigError::new_err((message, hint)),
            Error::MemoryBudget { budget_bytes, minimum_bytes, .. } => {
                MemoryBudgetError::new_err((message, hint, budget_bytes, minimum_bytes))
            }
            Error::NumericalFault { .. } => NumericalFault::new_err((message, hint)),
            Error::InvalidInput { .. } => InputError::new_err((message, hint)),
            Error::System { .. } => K3Error::new_err((message, hint)),
            Error::SessionFile { .. } => SessionFileError::new_err((message, hint)),
            Error::SessionAborted => SessionError::new_err((message, hint)),
            Error::Cancelled { .. } => PyKeyboardInterrupt::new_err(()),
        }
    }
}
