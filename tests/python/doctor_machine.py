"""A machine that is not there: the files of `/proc` and `/sys` that tell of it, and more."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import pytest

from k3rs import doctor
from k3rs.device import Device
from k3rs.hub.manifest import MANIFEST_FILE, HashKind, ListedFile, Manifest

KIB_OF_100_GB = 10**11 // 1024
DEVICE = Device("there", 2.0, 1.0, True, "direct reads", False, 10**9)

Examine: TypeAlias = Callable[..., doctor.Report]


def machine_files(root: Path, files: dict[str, str]) -> Path:
    """A root whose machine has 100 GB of free memory and one disk; `files` go on top."""
    usual = {
        "proc/meminfo": f"MemTotal: {2 * KIB_OF_100_GB} kB\nMemAvailable: {KIB_OF_100_GB} kB\n",
        "proc/self/status": "VmRSS:\t 1000 kB\n",
        "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n",
    }
    for path, text in (usual | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root


def check(report: doctor.Report, name: str) -> doctor.Check:
    (found,) = (entry for entry in report.checks if entry.name == name)
    return found


def with_free_bytes(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))


def write_manifest(directory: Path, repo: str | None, files: dict[str, int]) -> None:
    listed = tuple(
        ListedFile(name, size, HashKind.SHA256, "0" * 64) for name, size in files.items()
    )
    Manifest(repo, None if repo is None else "1" * 40, listed).write(directory / MANIFEST_FILE)
