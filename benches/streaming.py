"""Decoding from a disk: seconds per token at several budgets, beside what bounds them.

Makes a checkpoint of real, incompressible bytes larger than the budgets, measures the
device the way the engine reads it, and generates at the smallest budget that is accepted,
at half of what everything needs, and fully resident. The bound of a token is the larger of
its bytes over the device's bandwidth and its time fully resident.

    python benches/streaming.py DIRECTORY [--gigabytes 6] [--tokens 6] [--json PATH]

The checkpoint is left in DIRECTORY for the next run. Needs an installed k3rs.
"""

import argparse
import json
import mmap
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import k3rs

READ_BYTES = 8 << 20
READERS = 16


def main() -> None:
    arguments = parse()
    directory = Path(arguments.directory)
    if not (directory / "config.json").exists():
        make(directory, arguments.gigabytes)
    facts = k3rs.inspect(directory)
    size = sum(file["bytes"] for file in facts["files"])
    ids = [3, 4, 5, 6, 7]
    minimum = k3rs.plan(directory, positions=len(ids) + arguments.tokens)["minimum_bytes"]
    everything = minimum + size
    budgets = {
        "smallest": minimum,
        "half": minimum + size // 2,
        "resident": everything + size // 8,
    }
    runs = {}
    bandwidth = device_bandwidth(directory, arguments.seconds)
    for name, budget in budgets.items():
        runs[name] = run(directory, budget, ids, arguments.tokens)
        # Virtual disks vary: the best rate seen between the runs is the limit.
        bandwidth = max(bandwidth, device_bandwidth(directory, arguments.seconds))
    compute = runs["resident"]["seconds_per_token"]
    for name, result in runs.items():
        read = result["bytes_per_token"] / bandwidth
        result["read_seconds"] = read
        result["of_bound"] = result["seconds_per_token"] / max(read, compute)
        print(
            f"{name:<9} {result['budget'] / 1e9:6.2f} GB  {result['seconds_per_token']:.3f} s/token"
            f"  reads {result['bytes_per_token'] / 1e9:.2f} GB/token = {read:.3f} s"
            f"  compute {compute:.3f} s  {result['of_bound']:.2f} of the bound"
            f"  peak {result['peak_rss_bytes'] / 1e9:.2f} GB"
        )
    same = len({result["ids"] for result in runs.values()}) == 1
    print(f"checkpoint {size / 1e9:.2f} GB, device {bandwidth / 1e9:.2f} GB/s, same ids: {same}")
    if arguments.json:
        report = {"checkpoint_bytes": size, "device_bytes_s": bandwidth, "runs": runs}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(0 if same else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory")
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json")
    return parser.parse_args()


def make(directory: Path, gigabytes: float) -> None:
    """True widths, few layers: as many experts a layer as fit into the size."""
    layers = 4
    experts = max(32, int((gigabytes * 1e9 - 6.2e9) / (17.6e6 * (layers - 1))))
    k3rs.synthesize(directory, layers=layers, experts=experts, vocab=16384, seed=1)


def run(directory: Path, budget: int, ids: list[int], tokens: int) -> dict[str, Any]:
    """Each budget in a fresh process, for its own peak memory."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(generate, (directory, budget, ids, tokens))


def generate(directory: Path, budget: int, ids: list[int], tokens: int) -> dict[str, Any]:
    with k3rs.Model.open(directory, memory=budget, positions=len(ids) + tokens) as model:
        steps = model.generate(ids, max_tokens=tokens, stop_ids=())
        produced = [next(steps)]
        # The first step fills what stays resident; only what follows is decoding.
        before = bytes_read(model)
        produced += list(steps)
        seconds = sorted(token.seconds for token in produced[1:])
        return {
            "budget": budget,
            "ids": str([token.id for token in produced]),
            "seconds_per_token": seconds[len(seconds) // 2],
            "bytes_per_token": (bytes_read(model) - before) / len(seconds),
            "pinned_fraction": model.plan["pinned_fraction"],
            "peak_rss_bytes": model.report()["memory"]["peak_rss_bytes"],
        }


def bytes_read(model: k3rs.Model) -> int:
    io = model.report()["io"]
    return int(io["trunk_bytes_read"] + io["expert_bytes_read"])


def device_bandwidth(directory: Path, seconds: float) -> float:
    """Bytes a second of direct reads of a tile's size, as many in flight as the engine has."""
    offsets = spots(directory)
    lock = threading.Lock()
    total = 0
    end = time.perf_counter() + seconds

    def read() -> None:
        nonlocal total
        buffer = mmap.mmap(-1, READ_BYTES)
        while time.perf_counter() < end:
            with lock:
                file, offset = next(offsets)
            count = os.preadv(file, [buffer], offset)
            with lock:
                total += count

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total / (time.perf_counter() - started)


def spots(directory: Path) -> Iterator[tuple[int, int]]:
    files = [
        (os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size)
        for path in sorted(directory.glob("*.safetensors"))
    ]
    while True:
        for file, size in files:
            for offset in range(0, size - READ_BYTES, READ_BYTES):
                yield file, offset


if __name__ == "__main__":
    main()
