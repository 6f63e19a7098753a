//! How much memory this process may use: what the machine has left, and every
//! control-group limit above the process.

use std::path::{Path, PathBuf};

/// A limit and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimit {
    /// Bytes that a plan may divide.
    pub bytes: u64,
    /// In words, for the report.
    pub source: String,
}

/// The tightest limit that applies, `None` where the system tells nothing.
///
/// `planned` is what a plan will count for the process as it is. That much of
/// its present size is available to the plan; the rest, such as another model,
/// is not. Memory that others have only planned is not seen.
pub fn available(planned: u64) -> Option<MemoryLimit> {
    available_below(Path::new("/"), planned)
}

/// [`available`] with another root for `/proc` and `/sys`, for tests.
pub fn available_below(root: &Path, planned: u64) -> Option<MemoryLimit> {
    let own = resident_bytes(root).min(planned);
    let machine = read(&root.join("proc/meminfo")).and_then(|text| meminfo_available(&text));
    let machine = machine.map(|bytes| MemoryLimit {
        bytes: bytes.saturating_add(own),
        source: "available memory of the machine".into(),
    });
    machine.into_iter().chain(group_limits(root, own)).min_by_key(|limit| limit.bytes)
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

/// What is left of the limits of this process's memory groups and of all groups
/// above them, with `own` bytes of this process. Cached file pages count as free:
/// the kernel gives them up.
fn group_limits(root: &Path, own: u64) -> Vec<MemoryLimit> {
    let mut limits = Vec::new();
    for line in read(&root.join("proc/self/cgroup")).unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let Some(version) = GroupVersion::of(controllers) else { continue };
        let base = root.join(version.mount);
        for above in PathBuf::from(group.trim_start_matches('/')).ancestors() {
            let directory = base.join(above);
            let Some(limit) = number(&directory.join(version.limit)) else { continue };
            // The first version writes "no limit" as a number near 2^63.
            if limit >= 1 << 60 {
                continue;
            }
            let used = number(&directory.join(version.usage)).unwrap_or(0);
            let cached = file_pages(&directory.join("memory.stat"), version.cached);
            let others = used.saturating_sub(cached).saturating_sub(own);
            limits.push(MemoryLimit {
                bytes: limit.saturating_sub(others),
                source: format!("limit of {limit} bytes in {}", directory.display()),
            });
        }
    }
    limits
}

/// Where a version of control groups keeps its numbers.
struct GroupVersion {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    cached: &'static str,
}

impl GroupVersion {
    /// The version that a line of `/proc/self/cgroup` belongs to, if it is one
    /// about memory.
    fn of(controllers: &str) -> Option<GroupVersion> {
        if controllers.is_empty() {
            return Some(GroupVersion {
                mount: "sys/fs/cgroup",
                limit: "memory.max",
                usage: "memory.current",
                cached: "inactive_file",
            });
        }
        controllers.split(',').any(|name| name == "memory").then_some(GroupVersion {
            mount: "sys/fs/cgroup/memory",
            limit: "memory.limit_in_bytes",
            usage: "memory.usage_in_bytes",
            cached: "total_inactive_file",
        })
    }
}

fn number(path: &Path) -> Option<u64> {
    read(path)?.trim().parse().ok()
}

fn file_pages(stat: &Path, field: &str) -> u64 {
    let stat = read(stat).unwrap_or_default();
    let value = stat.lines().find_map(|line| line.strip_prefix(field)?.trim().parse().ok());
    value.unwrap_or(0)
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("directory");
        std::fs::write(path, text).expect("file");
    }

    fn machine(available_kib: u64, groups: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("directory");
        let meminfo = format!("MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n");
        write(root.path(), "proc/meminfo", &meminfo);
        write(root.path(), "proc/self/status", "VmRSS:\t  1024 kB\n");
        write(root.path(), "proc/self/cgroup", groups);
        root
    }

    #[test]
    fn without_groups_the_machine_decides() {
        let root = machine(2 << 20, "");
        let limit = available_below(root.path(), GIB).expect("a limit");
        assert_eq!(limit.bytes, 2 * GIB + (1 << 20));
        let limit = available_below(root.path(), 1000).expect("a limit");
        assert_eq!(limit.bytes, 2 * GIB + 1000);
    }

    #[test]
    fn a_limit_far_above_the_process_counts() {
        let root = machine(64 << 20, "0::/a/b\n");
        write(root.path(), "sys/fs/cgroup/a/b/memory.max", "max\n");
        write(root.path(), "sys/fs/cgroup/a/memory.max", "4294967296\n");
        write(root.path(), "sys/fs/cgroup/a/memory.current", "3221225472\n");
        let stat = "anon 1\ninactive_file 1073741824\n";
        write(root.path(), "sys/fs/cgroup/a/memory.stat", stat);
        let limit = available_below(root.path(), GIB).expect("a limit");
        // 4 GiB, of which others hold 3 - 1 (cached) GiB less this process.
        assert_eq!(limit.bytes, 2 * GIB + (1 << 20));
        assert!(limit.source.contains("/a"), "{}", limit.source);
    }

    #[test]
    fn the_first_version_of_groups_is_read_too() {
        let root = machine(64 << 20, "9:cpu:/x\n4:memory:/jobs/one\n");
        let base = "sys/fs/cgroup/memory/jobs";
        write(root.path(), &format!("{base}/memory.limit_in_bytes"), "2000000000\n");
        write(root.path(), &format!("{base}/one/memory.limit_in_bytes"), "9223372036854771712\n");
        assert_eq!(available_below(root.path(), GIB).expect("a limit").bytes, 2_000_000_000);
    }
}
