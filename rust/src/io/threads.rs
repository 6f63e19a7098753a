//! Threads, which the operating system may refuse.

use std::fmt::Display;
use std::path::Path;

use crate::error::{Error, Result};

/// A pool of `threads` compute threads, or of one for each physical core.
///
/// # Errors
/// [`Error::System`] when the system does not start them.
pub fn compute_pool(threads: Option<usize>) -> Result<rayon::ThreadPool> {
    let count = threads.unwrap_or_else(physical_cores).max(1);
    rayon::ThreadPoolBuilder::new()
        .num_threads(count)
        .thread_name(|index| format!("k3rs-{index}"))
        .build()
        .map_err(|error| not_started(&format!("{count} compute threads"), &error))
}

/// The error for threads that could not be started.
pub fn not_started(what: &str, reason: &dyn Display) -> Error {
    Error::System {
        problem: format!("cannot start {what}: {reason}"),
        hint: "raise the limit on the number of processes (ulimit -u), or end some".into(),
    }
}

/// Physical cores that this process may run on: hyper-threads share the units
/// that the kernels saturate.
pub fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let list = Path::new("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    let siblings = std::fs::read_to_string(list).ok();
    let per_core = siblings.map_or(1, |list| list.trim().split([',', '-']).count().max(1));
    (logical / per_core).max(1)
}
