//! What the engine has cost since it was opened, as values.

use serde::Serialize;

/// Reads and waiting.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IoReport {
    /// Bytes of trunk tiles read from files.
    pub trunk_bytes_read: u64,
    /// Bytes of trunk tiles multiplied, resident ones included.
    pub trunk_bytes_used: u64,
    /// Bytes of experts read from files.
    pub expert_bytes_read: u64,
    /// Seconds in which the computation stood still for a read.
    pub read_wait_s: f64,
    /// Whether all weight files are read past the page cache.
    pub direct: bool,
    /// Why, in words.
    pub why: String,
}

/// The expert cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExpertReport {
    /// Distinct experts that sweeps asked for, layer by layer.
    pub requests: u64,
    /// Of those, found in memory.
    pub hits: u64,
    /// Of those, read.
    pub distinct: u64,
}

/// Memory of the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryReport {
    /// Largest resident size so far, 0 where the system does not tell.
    pub peak_rss_bytes: u64,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// Reads and waiting.
    pub io: IoReport,
    /// The expert cache.
    pub experts: ExpertReport,
    /// Memory of the process.
    pub memory: MemoryReport,
}
