"""What is read of `/proc` and `/sys` about memory, its limits, cores and file systems."""

from pathlib import Path

import pytest
from doctor_machine import KIB_OF_100_GB, machine_files

import k3rs
from k3rs.doctor.machine import FileSystem, GroupLimit, find_file_system, read_machine

GB = 10**9


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The `/proc` and `/sys` of a machine with 100 GB of free memory."""
    return machine_files(tmp_path / "root", {})


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
