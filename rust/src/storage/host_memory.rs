//! How much memory this process may use: what the machine has left, and every
//! control-group limit above the process.

use std::path::{Path, PathBuf};

/// A limit and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes that this process may still take, its present size included.
    pub bytes: u64,
    /// In words, for the report.
    pub source: String,
}

/// The tightest limit that applies, `None` where the system tells nothing.
pub fn available() -> Option<MemoryLimit> {
    available_below(Path::new("/"))
}

/// [`available`] with another root for `/proc` and `/sys`, for tests.
pub fn available_below(root: &Path) -> Option<MemoryLimit> {
    let machine = read(&root.join("proc/meminfo")).and_then(|text| meminfo_available(&text));
    let machine = machine.map(|bytes| MemoryLimit {
        bytes: bytes.saturating_add(resident_bytes(root)),
        source: "available memory of the machine".into(),
    });
    machine.into_iter().chain(group_limits(root)).min_by_key(|limit| limit.bytes)
}

/// Peak resident size of this process in bytes, 0 where unknown.
pub fn peak_resident_bytes() -> u64 {
    status_field(Path::new("/"), "VmHWM:")
}

fn resident_bytes(root: &Path) -> u64 {
    status_field(root, "VmRSS:")
}

fn status_field(root: &Path, field: &str) -> u64 {
    let status = read(&root.join("proc/self/status")).unwrap_or_default();
    kibibytes_after(&status, field).unwrap_or(0)
}

fn meminfo_available(text: &str) -> Option<u64> {
    kibibytes_after(text, "MemAvailable:")
}

fn kibibytes_after(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Limits of the memory groups of this process and of all groups above them.
fn group_limits(root: &Path) -> Vec<MemoryLimit> {
    let mut limits = Vec::new();
    for line in read(&root.join("proc/self/cgroup")).unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (base, file) = if controllers.is_empty() {
            (root.join("sys/fs/cgroup"), "memory.max")
        } else if controllers.split(',').any(|name| name == "memory") {
            (root.join("sys/fs/cgroup/memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        let group = PathBuf::from(group.trim_start_matches('/'));
        for above in group.ancestors() {
            let path = base.join(above).join(file);
            let bytes = read(&path).and_then(|text| text.trim().parse::<u64>().ok());
            // The first version writes "no limit" as a number near 2^63.
            if let Some(bytes) = bytes.filter(|bytes| *bytes < 1 << 60) {
                limits.push(MemoryLimit { bytes, source: format!("limit in {}", path.display()) });
            }
        }
    }
    limits
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// Physical cores that this process may run on: hyper-threads share the units
/// that the kernels saturate.
pub fn physical_cores() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let siblings = read(Path::new("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"));
    let per_core = siblings.map_or(1, |list| list.trim().split([',', '-']).count().max(1));
    (logical / per_core).max(1)
}
