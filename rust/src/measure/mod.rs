//! What this machine can do, and how close the kernels come to it.
//!
//! Speed is only meaningful beside a limit that was measured in the same run:
//! a product with one token cannot be faster than reading its weights, one with
//! many tokens not faster than the multipliers.

pub mod device;
pub mod kernels;
pub mod limits;
pub mod small_work;

use std::time::Instant;

use serde::Serialize;

use crate::error::Result;
use crate::kernels::backend::Backend;
pub use kernels::KernelSpeed;
pub use limits::Limits;
pub use small_work::SmallWork;

/// How much to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Bytes of the pool that weights are taken from; far more than the caches
    /// hold, so that they come from memory as they do in a real token.
    pub pool_bytes: usize,
    /// Repetitions, of which the median counts.
    pub repetitions: usize,
}

impl Effort {
    /// Enough for figures that can be relied on.
    pub const FULL: Effort = Effort { pool_bytes: 2 << 30, repetitions: 15 };
    /// Enough to see that everything runs.
    pub const CHECK: Effort = Effort { pool_bytes: 8 << 20, repetitions: 1 };
}

/// Limits and kernels of one run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measurement {
    /// The machine.
    pub limits: Limits,
    /// The kernels beside it.
    pub kernels: Vec<KernelSpeed>,
    /// What a decoded token does beside them.
    pub small_work: Vec<SmallWork>,
    /// How many times slower a product is beside a thread that is always busy.
    pub busy_thread_slowdown: f64,
    /// Cores that other work kept busy meanwhile, `None` where the system does
    /// not tell. Above 0.1 the figures say little.
    pub foreign_cpu: Option<f64>,
}

/// Measures limits and kernels with `threads` threads, or one a core.
///
/// # Errors
/// When the pool cannot be mapped or the threads not started.
pub fn measure(backend: Backend, threads: Option<usize>, effort: Effort) -> Result<Measurement> {
    let watch = limits::ForeignWork::start();
    let bench = kernels::Bench::new(backend, threads, effort)?;
    let limits = bench.limits();
    let kernels = bench.kernels();
    let small_work = bench.small_work(&limits);
    let foreign_cpu = watch.busy_cores();
    let busy_thread_slowdown = bench.slowdown_beside_a_busy_thread();
    Ok(Measurement { limits, kernels, small_work, busy_thread_slowdown, foreign_cpu })
}

/// Bytes read from memory in a second with one thread a core, in units of 10^9.
///
/// # Errors
/// As [`measure`].
pub fn memory_read_gb_s() -> Result<f64> {
    let effort = Effort { pool_bytes: 512 << 20, repetitions: 5 };
    Ok(kernels::Bench::new(Backend::available()[0], None, effort)?.limits().read_gb_s)
}

/// Seconds of `work`, the median of `repetitions` runs after one to warm up.
fn median_seconds(repetitions: usize, mut work: impl FnMut()) -> f64 {
    work();
    median((0..repetitions.max(1)).map(|_| seconds_of(&mut work)))
}

/// Seconds of one run of `work`.
fn seconds_of(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64()
}

/// The upper median of `values`, of which there must be some.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
