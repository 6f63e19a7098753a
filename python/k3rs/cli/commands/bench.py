"""`k3rs bench`: what this machine can do, and how close the kernels come to it."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3rs import _k3rs
from k3rs.checkpoint import require_directory
from k3rs.cli.console import Console
from k3rs.device import interruptible, measure_directory, measure_shards
from k3rs.exceptions import K3Error

__all__ = ["run"]

_QUIET_CPU = 0.1
"""Cores of other work above which the figures say little."""

_FULL_S, _QUICK_S = 1.0, 0.1
"""Seconds for each kind of read from the device."""

_QUICK_BYTES = 16 * 10**6


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measures and prints a table that can be pasted, or the facts as JSON."""
    text = interruptible(
        lambda: _k3rs.bench(
            threads=arguments.threads, backend=arguments.backend, quick=arguments.quick
        )
    )
    facts: dict[str, Any] = json.loads(text)
    facts["limits"].update(_device(arguments))
    if arguments.json:
        console.facts(facts)
        return
    console.answer("".join(f"{line}\n" for line in _table(facts)))
    foreign = facts["foreign_cpu"]
    if foreign is not None and foreign > _QUIET_CPU:
        console.note(
            f"other work kept {foreign:.1f} cores busy meanwhile: the figures are too low, and "
            "their ratios uncertain"
        )


def _device(arguments: argparse.Namespace) -> dict[str, Any]:
    """The device below a model or a directory, or why it could not be measured."""
    seconds = _QUICK_S if arguments.quick else _FULL_S
    try:
        if arguments.model is not None:
            device = measure_shards(require_directory(arguments.model), seconds=seconds)
        else:
            size_bytes = _QUICK_BYTES if arguments.quick else None
            place = Path(arguments.directory or ".")
            device = measure_directory(place, probe_bytes=size_bytes, seconds=seconds)
    except K3Error as error:
        return {"device": None, "device_why": str(error)}
    return {"device": asdict(device), "device_why": None}


def _table(facts: Mapping[str, Any]) -> Iterator[str]:
    """The limits, a row for every kernel, and one for what a token does besides, as Markdown."""
    limits = facts["limits"]
    yield (
        f"{limits['threads']} threads: memory read {limits['read_gb_s']:.1f} GB/s, "
        f"float32 FMA {limits['fma_gflop_s']:.0f} GFLOP/s"
    )
    yield from _device_lines(limits)
    yield ""
    yield "| kernel | tokens | weights GB/s | GFLOP/s | of read | of FMA |"
    yield "|---|---|---|---|---|---|"
    for kernel in facts["kernels"]:
        yield (
            f"| {kernel['name']} | {kernel['tokens']} | {kernel['weights_gb_s']:.2f} "
            f"| {kernel['gflop_s']:.1f} | {kernel['of_read']:.2f} | {kernel['of_fma']:.2f} |"
        )
    yield ""
    yield "| other work of a token of the release | ms | of a token from memory |"
    yield "|---|---|---|"
    for work in facts["small_work"]:
        yield f"| {work['name']} | {work['ms_per_token']:.1f} | {work['of_token']:.1%} |"
    yield ""
    yield f"beside a thread that is always busy: {facts['busy_thread_slowdown']:.2f} times slower"


def _device_lines(limits: Mapping[str, Any]) -> Iterator[str]:
    """The device beside the memory, which is the faster of the two."""
    device = limits["device"]
    if device is None:
        yield f"device not measured: {limits['device_why']}"
        return
    yield ""
    manner = "direct" if device["direct"] else "buffered"
    yield f"| device, {manner} reads | GB/s | of memory read |"
    yield "|---|---|---|"
    for name in ("tiles", "experts"):
        speed = device[f"{name}_gb_s"]
        yield f"| {name} | {speed:.2f} | {speed / limits['read_gb_s']:.3f} |"
    if device["sparse"]:
        yield ""
        yield "the files are mostly holes: the device is not what was measured"
