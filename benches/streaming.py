"""Decoding from a disk: seconds per token at several budgets, beside what bounds them.

Makes a checkpoint of real, incompressible bytes, measures the device the way the engine
reads it before, between and after the runs, and generates the same tokens from the smallest
budget that is accepted to fully resident, each budget in a fresh process. Ids and logits
must be the same to the bit everywhere: exit status 1 and the names of the runs otherwise.

The bound of a token is the larger of its bytes over the best bandwidth that was probed and
its time fully resident, which is all compute. One run reads through the page cache, so it
may beat its bound. `peak` is the resident set of the whole process, `slots` those for experts.

    python benches/streaming.py DIRECTORY [--gigabytes 8] [--tokens 6] [--json PATH]

The checkpoint is left in DIRECTORY for the next run. Needs an installed k3rs.
"""

import argparse
import hashlib
import json
import mmap
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import k3rs
from k3rs import _k3rs

READ_BYTES = 8 << 20
READERS = 16
PROMPT = [3, 4, 5, 6, 7]
RESIDENT = "resident"
BITS = ["ids", "prompt_logits", "step_logits"]


class Run(NamedTuple):
    share: float  # of the checkpoint, added to the smallest budget
    direct: bool | None = None
    passes: int = 1


RUNS = {
    "smallest": Run(0),
    "10 %": Run(0.10),
    "25 %": Run(0.25),
    "50 %": Run(0.50),
    "50 % buffered": Run(0.50, direct=False),
    "75 %": Run(0.75),
    "90 %": Run(0.90),
    # More than the files, for rounding up to pages; the first pass reads the experts.
    RESIDENT: Run(1.125, passes=2),
}
HEADER = "run          budget, peak GB pinned   slots hits GB/token read s compute s/token of bound"


def main() -> None:
    arguments = parse()
    directory = Path(arguments.directory)
    if not (directory / "config.json").exists():
        make(directory, arguments.gigabytes)
    paths = sorted(directory.glob("*.safetensors"))
    files = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size) for path in paths]
    size = sum(size for _, size in files)
    minimum = k3rs.plan(directory, positions=len(PROMPT) + arguments.tokens)["minimum_bytes"]
    print(f"checkpoint {size / 1e9:.2f} GB, smallest budget {minimum / 1e9:.2f} GB")
    probes = [probe(files, arguments.seconds)]
    results = {}
    for name, run in RUNS.items():
        budget = minimum + int(run.share * size)
        # A fresh process has its own peak memory.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            results[name] = pool.apply(generate, (directory, run, budget, arguments.tokens))
        probes.append(probe(files, arguments.seconds))
    resident = results[RESIDENT]
    assert resident["pinned_fraction"] == 1, resident
    assert resident["expert_slots"] == resident["experts"], resident
    assert resident["bytes_per_token"] == 0, resident
    print(HEADER)
    for name, result in results.items():
        result["read_seconds"] = result["bytes_per_token"] / max(probes)
        result["compute_seconds"] = resident["seconds_per_token"]
        bound = max(result["read_seconds"], result["compute_seconds"])
        result["of_bound"] = result["seconds_per_token"] / bound
        print(line(name, result))
    differing = differences(results)
    print(f"device: best probe {max(probes) / 1e9:.2f} GB/s, worst {min(probes) / 1e9:.2f} GB/s")
    print(*differing or ["ids and logits: the same bits in all runs"], sep="\n")
    if arguments.json:
        report = {"checkpoint_bytes": size, "probes_bytes_s": probes, "runs": results}
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if differing else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory")
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=6, help="at least 2: the first is not timed")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a probe")
    parser.add_argument("--json")
    return parser.parse_args()


def make(directory: Path, gigabytes: float) -> None:
    """True widths, few layers: as many experts a layer as fit into the size."""
    experts = max(32, int((gigabytes * 1e9 - 6.2e9) / (17.6e6 * 3)))
    k3rs.synthesize(directory, layers=4, experts=experts, vocab=16384, seed=1)


def generate(directory: Path, run: Run, budget: int, tokens: int) -> dict[str, Any]:
    positions = len(PROMPT) + tokens
    engine = _k3rs.Engine.open(
        str(directory), memory_bytes=budget, positions=positions, direct=run.direct
    )
    with k3rs.Model(directory, engine, tokenizer=None) as model:
        for _ in range(run.passes):
            session = model.session()
            # Also fills what stays resident; only what follows the first token is decoding.
            prompt_logits = session.forward(PROMPT[:-1], all_positions=True)
            rows: list[Any] = []
            steps = model.generate(
                PROMPT[-1:], max_tokens=tokens, session=session, stop_ids=(), on_logits=rows.append
            )
            produced = [next(steps)]
            before = counters(model)
            produced += list(steps)
            read, requests, hits = (counters(model) - before).tolist()
        kinds = [layer["feed_forward"] for layer in model.config["layers"]]
        report = model.report()
        return {
            "budget_bytes": budget,
            "peak_rss_bytes": report["memory"]["peak_rss_bytes"],
            "direct": report["io"]["direct"],
            "ids": [token.id for token in produced],
            "prompt_logits": digest([prompt_logits]),
            "step_logits": digest(rows),
            "seconds_per_token": statistics.median(token.seconds for token in produced[1:]),
            "bytes_per_token": read / (tokens - 1),
            "expert_hit_rate": hits / requests,
            "pinned_fraction": model.plan["pinned_fraction"],
            "expert_slots": model.plan["expert_slots"],
            "experts": model.config["moe"]["experts"] * kinds.count("experts"),
        }


def digest(logits: Sequence[Any]) -> str:
    """Of every float32 bit: -0 differs from 0."""
    assert all(row.dtype == np.float32 for row in logits)
    return hashlib.sha256(b"".join(row.tobytes() for row in logits)).hexdigest()


def counters(model: k3rs.Model) -> Any:
    """Bytes read, experts asked for, and those of them that were in memory."""
    io, experts = model.report()["io"], model.report()["experts"]
    read = io["trunk_bytes_read"] + io["expert_bytes_read"]
    return np.array([read, experts["requests"], experts["hits"]])


def line(name: str, result: dict[str, Any]) -> str:
    """A row under `HEADER`."""
    return (
        f"{name:<13}{result['budget_bytes'] / 1e9:6.2f}{result['peak_rss_bytes'] / 1e9:9.2f}"
        f"{result['pinned_fraction']:7.0%}{result['expert_slots']:4d}/{result['experts']}"
        f"{result['expert_hit_rate']:5.0%}{result['bytes_per_token'] / 1e9:9.2f}"
        f"{result['read_seconds']:7.3f}{result['compute_seconds']:8.3f}"
        f"{result['seconds_per_token']:8.3f}{result['of_bound']:9.2f}"
    )


def differences(results: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each run and each of `BITS` that is not as in the resident run."""
    expected = results[RESIDENT]
    return [
        f"{name}: {kind} differ: {result[kind]}, {RESIDENT} has {expected[kind]}"
        for name, result in results.items()
        for kind in BITS
        if result[kind] != expected[kind]
    ]


def probe(files: list[tuple[int, int]], seconds: float) -> float:
    """Bytes a second of direct reads of a tile's size, as many in flight as the engine has."""
    ranges = ((file, range(0, size - READ_BYTES, READ_BYTES)) for file, size in cycle(files))
    spots = ((file, offset) for file, offsets in ranges for offset in offsets)
    lock = threading.Lock()
    total = 0
    started = time.perf_counter()

    def read() -> None:
        nonlocal total
        # Huge pages as in the engine: with small ones some devices give two thirds.
        buffer = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        while time.perf_counter() < started + seconds:
            with lock:
                file, offset = next(spots)
            count = os.preadv(file, [buffer], offset)
            with lock:
                total += count

    threads = [threading.Thread(target=read) for _ in range(READERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bandwidth = total / (time.perf_counter() - started)
    print(f"device probe: {bandwidth / 1e9:.2f} GB/s", flush=True)
    return bandwidth


if __name__ == "__main__":
    main()
