"""What is read of `/proc` and `/sys` about memory, its limits, cores and file systems."""

import os
from pathlib import Path

import pytest
from doctor_machine import KIB_OF_100_GB, Examine, check, machine_files

import k3rs
from k3rs.doctor.machine import CpuLimit, FileSystem, GroupLimit, find_file_system, read_machine

pytest_plugins = ["doctor_fixtures"]

GB = 10**9


def test_memory_is_that_of_the_machine_where_no_group_limits_it(root: Path) -> None:
    machine = read_machine(root)
    assert machine.total_bytes == 2 * KIB_OF_100_GB * 1024
    assert machine.available_bytes == machine.usable_bytes == KIB_OF_100_GB * 1024
    assert machine.memory_limit is None
    assert machine.backends == k3rs.available_backends()


def test_a_group_far_above_the_process_limits_it(root: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": f"{40 * GB}\n",
        "sys/fs/cgroup/a/memory.current": f"{30 * GB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {20 * GB}\n",
        "sys/fs/cgroup/memory.max": f"{90 * GB}\n",
    }
    machine = read_machine(machine_files(root, files))
    # Others have 30 GB without 20 GB of cached pages and the 1,024,000 bytes of this process.
    left_bytes = 30 * GB + 1_024_000
    assert machine.memory_limit == GroupLimit(40 * GB, left_bytes, "/sys/fs/cgroup/a")
    assert machine.usable_bytes == left_bytes


def test_groups_of_the_first_version_limit_too(root: Path) -> None:
    base = "sys/fs/cgroup/memory/jobs"
    files = {
        "proc/self/cgroup": "5:cpu:/elsewhere\n4:cpuset,memory:/jobs/one\n0::/\n",
        f"{base}/memory.limit_in_bytes": f"{3 * GB}\n",
        f"{base}/memory.usage_in_bytes": f"{2 * GB}\n",
        f"{base}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB}\n",
        f"{base}/one/memory.limit_in_bytes": "9223372036854771712\n",
    }
    machine = read_machine(machine_files(root, files))
    assert machine.memory_limit == GroupLimit(3 * GB, 2 * GB + 1_024_000, f"/{base}")


SECOND = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
    "sys/fs/cgroup/a/cpu.max": "75000 50000\n",
    "sys/fs/cgroup/cpu.max": "200000 100000\n",
}
FIRST = {
    "proc/self/cgroup": "5:cpuset:/elsewhere\n4:cpu,cpuacct:/jobs/one\n0::/\n",
    "sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu/jobs/one/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/jobs/one/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize(
    ("files", "path"), [(SECOND, "/sys/fs/cgroup/a"), (FIRST, "/sys/fs/cgroup/cpu/jobs")]
)
def test_a_group_that_gives_less_time_than_the_cores_have_is_a_warning(
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    files: dict[str, str],
    path: str,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    unlimited = examine(None, root)
    assert unlimited.machine.cpu_limit is None
    assert (check(unlimited, "cpu limit").status, check(unlimited, "cpu limit").found) == (
        "ok",
        "none",
    )
    machine_files(root, files)
    limited = examine(None, root)
    assert limited.machine.cpu_limit == CpuLimit(1.5, path)
    assert limited.facts["machine"]["cpu_limit"] == {"cores": 1.5, "path": path}
    found = check(limited, "cpu limit")
    assert (found.status, found.found) == ("warning", f"the time of 1.5 cores ({path})")
    assert "raise its limit" in str(found.advice)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert check(examine(None, root), "cpu limit").status == "ok"


@pytest.mark.parametrize("text", ["", "0 100000", "100000 0", "100000", "many 100000"])
def test_what_is_no_limit_of_time_is_none(root: Path, text: str) -> None:
    machine_files(root, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{text}\n"})
    assert read_machine(root).cpu_limit is None


@pytest.mark.parametrize(("limit", "others"), [(900_000_000, False), (9 * GB, True)])
def test_where_a_group_leaves_too_little_the_machine_is_not_blamed(
    examine: Examine, root: Path, limit: int, others: bool
) -> None:
    files = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": f"{limit}\n",
        "sys/fs/cgroup/a/memory.current": f"{limit - 500_000_000}\n",
    }
    machine_files(root, files)
    report = examine(None, root)
    assert check(report, "memory").status == "ok"
    found = check(report, "memory limit")
    assert found.status == "warning"
    assert "raise its limit" in str(found.advice)
    assert ("end other programs in it" in str(found.advice)) == others
    assert report.estimates == []


def test_threads_of_one_core_count_once(root: Path) -> None:
    cpu = "sys/devices/system/cpu"
    places = {0: ("0", "0"), 1: ("0", "1"), 2: ("0", "0"), 3: ("1", "0")}
    files = {"sys/devices/system/cpu/cpufreq/boost": "1\n"}
    for number, (package, core) in places.items():
        files[f"{cpu}/cpu{number}/topology/physical_package_id"] = f"{package}\n"
        files[f"{cpu}/cpu{number}/topology/core_id"] = f"{core}\n"
    assert read_machine(root).physical_cores is None
    assert read_machine(machine_files(root, files)).physical_cores == 3


def test_the_file_system_is_that_of_the_longest_mount_point(root: Path, tmp_path: Path) -> None:
    (tmp_path / "a disk" / "models").mkdir(parents=True)
    (tmp_path / "a disk too").mkdir()
    place = str(tmp_path).replace(" ", r"\040")
    lines = (
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw",
        rf"2 1 8:2 / {place}/a\040disk rw - btrfs /dev/sdb rw",
        rf"3 1 8:2 / {place}/a\040disk rw shared:2 master:1 - nfs4 there:/ rw",
        "4 1 0:5 / /proc rw - proc proc rw",
    )
    machine_files(root, {"proc/self/mountinfo": "\n".join(lines) + "\n"})
    disk = tmp_path / "a disk"
    # Of two mounts at one place the later one hides the other.
    assert find_file_system(disk / "models", root) == FileSystem("nfs4", str(disk))
    assert find_file_system(tmp_path / "a disk too", root) == FileSystem("ext4", "/")
