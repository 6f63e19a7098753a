//! The Python module `k3rs._k3rs`: converts, calls, converts. No logic.

mod bench;
mod engine;
mod errors;
mod file_hash;
mod gil;
mod pack;
mod session;
mod synth;
mod trace;

use pyo3::prelude::*;

/// The compiled core of k3rs; private, use the package.
#[pymodule]
mod _k3rs {
    use super::*;

    #[pymodule_export]
    use super::bench::{bench, measure_device, memory_read_gb_s, write_probe_file};
    #[pymodule_export]
    use super::engine::{Engine, available_backends, inspect, plan, read_session_label};
    #[pymodule_export]
    use super::file_hash::hash_file;
    #[pymodule_export]
    use super::pack::{pack_trunk, verify_trunk};
    #[pymodule_export]
    use super::session::Session;
    #[pymodule_export]
    use super::synth::synthesize;
    #[pymodule_export]
    use super::trace::replay_trace;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
