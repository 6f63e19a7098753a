"""What Linux says of the machine and of what this process may have of it."""

import os
import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from k3rs import available_backends

__all__ = ["CpuLimit", "FileSystem", "GroupLimit", "Machine", "find_file_system", "read_machine"]

ROOT = Path("/")

_OCTAL = re.compile(r"\\([0-7]{3})")
_NO_LIMIT_BYTES = 1 << 60
"""The first version of control groups writes "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class GroupLimit:
    """The memory limit of a control group, and what it leaves to this process."""

    limit_bytes: int
    left_bytes: int
    path: str


@dataclass(frozen=True)
class CpuLimit:
    """How much time of how many cores a control group gives to its processes together."""

    cores: float
    path: str


@dataclass(frozen=True)
class Machine:
    """A machine as this process sees it; `None` is what the system does not tell."""

    system: str
    release: str
    architecture: str
    backends: list[str]
    """Instruction sets that the CPU can run, best first."""
    physical_cores: int | None
    logical_cores: int
    usable_cores: int
    """Logical cores on which the process may run."""
    cpu_limit: CpuLimit | None
    """The control group that gives least time."""
    total_bytes: int | None
    available_bytes: int | None
    memory_limit: GroupLimit | None
    """The control group that leaves least."""

    @property
    def usable_bytes(self) -> int | None:
        """Memory that a process of k3rs could have now."""
        found = [self.available_bytes]
        if self.memory_limit is not None:
            found.append(self.memory_limit.left_bytes)
        return min((size for size in found if size is not None), default=None)


@dataclass(frozen=True)
class FileSystem:
    """What a directory lies on."""

    kind: str
    mount_point: str


def read_machine(root: Path = ROOT) -> Machine:
    """The machine by the files below `/proc` and `/sys` of `root`."""
    memory = _read(root / "proc/meminfo")
    logical_cores = os.cpu_count() or 1
    limits = list(_group_limits(root))
    return Machine(
        system=platform.system(),
        release=platform.release(),
        architecture=platform.machine(),
        backends=available_backends(),
        physical_cores=_physical_cores(root),
        logical_cores=logical_cores,
        usable_cores=len(os.sched_getaffinity(0)),
        cpu_limit=min(_cpu_limits(root), key=lambda limit: limit.cores, default=None),
        total_bytes=_kibibytes(memory, "MemTotal:"),
        available_bytes=_kibibytes(memory, "MemAvailable:"),
        memory_limit=min(limits, key=lambda limit: limit.left_bytes, default=None),
    )


def find_file_system(directory: Path, root: Path = ROOT) -> FileSystem | None:
    """The file system of `directory`, by the longest mount point above it.

    A line of `mountinfo` has the mount point in its fifth field, with `\\040` for a space, and
    the type behind a lone `-`.
    """
    place = directory.resolve()
    found: FileSystem | None = None
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 5 or not source:
            continue
        mount_point = _OCTAL.sub(lambda code: chr(int(code[1], 8)), fields[4])
        # Of several mounts at one place the last one is seen.
        covers = place.is_relative_to(mount_point)
        if covers and (found is None or len(mount_point) >= len(found.mount_point)):
            found = FileSystem(source.split()[0], mount_point)
    return found


def _physical_cores(root: Path) -> int | None:
    """Pairs of a package and a core in it; threads of one core share them."""
    cores = set()
    for topology in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/topology"):
        package, core = (_read(topology / name) for name in ("physical_package_id", "core_id"))
        if core:
            cores.add((package, core))
    return len(cores) or None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Groups of this process, and all above them, that can limit what `controller` stands for.

    With each goes whether it is of the first version of control groups.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        place = base / group.lstrip("/")
        for above in (place, *place.parents):
            if not above.is_relative_to(base):
                break
            yield above, bool(controllers)


def _group_limits(root: Path) -> Iterator[GroupLimit]:
    """The memory limits of this process's groups."""
    own_bytes = _kibibytes(_read(root / "proc/self/status"), "VmRSS:") or 0
    for group, is_first in _groups(root, "memory"):
        if is_first:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            names = ("memory.max", "memory.current", "inactive_file")
        limit_bytes = _number(_read(group / names[0]))
        if limit_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
            continue
        # Cached pages of files are given up for whoever needs the memory.
        cached = _field(_read(group / "memory.stat"), names[2])
        used_bytes = (_number(_read(group / names[1])) or 0) - (_number(cached) or 0)
        others_bytes = max(0, used_bytes - own_bytes)
        path = f"/{group.relative_to(root)}"
        yield GroupLimit(limit_bytes, max(0, limit_bytes - others_bytes), path)


def _cpu_limits(root: Path) -> Iterator[CpuLimit]:
    """The limits of time of this process's groups: microseconds in every period of some more.

    No limit is `max` in the second version of control groups and -1 in the first.
    """
    for group, is_first in _groups(root, "cpu"):
        if is_first:
            texts = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        else:
            texts = _read(group / "cpu.max").split()
        numbers = [_number(text) for text in texts]
        if len(numbers) == 2 and numbers[0] and numbers[1]:
            yield CpuLimit(numbers[0] / numbers[1], f"/{group.relative_to(root)}")


def _kibibytes(text: str, name: str) -> int | None:
    value = _number(_field(text, name).removesuffix("kB"))
    return None if value is None else value * 1024


def _field(text: str, name: str) -> str:
    """What follows `name` at the beginning of a line; empty where there is none."""
    for line in text.splitlines():
        first, *rest = line.split()[:3] or [""]
        if first == name:
            return "".join(rest)
    return ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """The content, empty where there is none to read."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
