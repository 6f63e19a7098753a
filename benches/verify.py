"""Hashing a checkpoint: bytes a second, beside what the device and the cores deliver.

Writes files of random bytes, and hashes them as `k3rs verify` does, several times; before and
after each time the device is measured the way the engine reads it. SHA-256 of memory on all
cores is measured, too: where cores are few and the device is fast, that is the bound.

    python benches/verify.py DIRECTORY [--gigabytes 8] [--passes 5]

The files are left in DIRECTORY for the next run. Needs an installed k3rs.
"""

import argparse
import hashlib
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from k3rs import _k3rs
from k3rs.hub.file_hashing import Target, hash_files
from k3rs.hub.file_progress import FileProgress
from k3rs.hub.hash_record import HashRecord, Purpose
from k3rs.hub.manifest import HashKind

FILES = 4
PROBE_S = 2.0
MEMORY_BYTES = 256 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--passes", type=int, default=5)
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    size_bytes = int(arguments.gigabytes * 1e9 / FILES)
    paths = [directory / f"random {number}" for number in range(FILES)]
    for path in paths:
        if not path.exists() or path.stat().st_size != size_bytes:
            path.unlink(missing_ok=True)
            _k3rs.write_probe_file(str(path), size_bytes)
    wanted = [(path.name, size_bytes, HashKind.SHA256) for path in paths]
    memory = of_memory()
    print(f"{os.cpu_count()} cores hash {memory / 1e9:.2f} GB/s of memory")
    shares = []
    before = device(paths)
    for _ in range(arguments.passes):
        hashed = of_files(directory, wanted)
        after = device(paths)
        shares.append(hashed / statistics.mean([before, after]))
        print(
            f"hashed {hashed / 1e9:.2f} GB/s, device before and after {before / 1e9:.2f} and "
            f"{after / 1e9:.2f} GB/s: {shares[-1]:.2f} of it"
        )
        before = after
    print(f"median {statistics.median(shares):.2f} of the device")


def of_memory() -> float:
    """Bytes a second, of all cores."""
    block = b"k3rs" * (MEMORY_BYTES // 4)
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        started = time.perf_counter()
        list(pool.map(hashlib.sha256, [block] * cores))
        return cores * MEMORY_BYTES / (time.perf_counter() - started)


def of_files(directory: Path, wanted: list[Target]) -> float:
    """Bytes a second."""
    record = HashRecord(Purpose.MANIFEST, directory)
    record.delete()
    started = time.perf_counter()
    count = hash_files(directory, wanted, record=record, progress=FileProgress(), found=keep)
    seconds = time.perf_counter() - started
    record.delete()
    return count / seconds


def keep(path: str, outcome: Any) -> None:
    if not isinstance(outcome, str):
        raise outcome


def device(paths: list[Path]) -> float:
    """Bytes a second of reads of a tile's size."""
    measured = json.loads(_k3rs.measure_device([str(path) for path in paths], PROBE_S))
    return float(measured["tiles_gb_s"]) * 1e9


if __name__ == "__main__":
    main()
