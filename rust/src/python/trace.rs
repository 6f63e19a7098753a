//! Recorded expert requests, replayed.

use std::num::NonZeroUsize;

use numpy::PyReadonlyArray2;
use pyo3::prelude::*;

use crate::error::Error;
use crate::storage::access_trace::AccessTrace;
use crate::storage::trace_replay::{Policy, hits};

/// Slots, name of the policy, and hits from token `first_counted` on, for every
/// cache size and policy. `requests` is `[n, 3]`: token, layer, expert.
#[pyfunction]
pub(super) fn replay_trace(
    py: Python<'_>,
    requests: PyReadonlyArray2<'_, u32>,
    slots: Vec<NonZeroUsize>,
    first_counted: usize,
) -> PyResult<Vec<(usize, &'static str, u64)>> {
    let rows = requests.as_array();
    if rows.ncols() != 3 {
        let problem = format!("expected 3 numbers a request, found {}", rows.ncols());
        return Err(Error::invalid(problem, "they are token, layer and expert").into());
    }
    let trace =
        AccessTrace::from_requests(rows.rows().into_iter().map(|row| [row[0], row[1], row[2]]))?;
    let mut results = Vec::new();
    for slots in slots {
        for policy in Policy::ALL {
            py.check_signals()?;
            let hits = py.detach(|| hits(&trace, policy, slots, first_counted));
            results.push((slots.get(), policy.name(), hits));
        }
    }
    Ok(results)
}
