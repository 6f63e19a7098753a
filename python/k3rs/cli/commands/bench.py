"""`k3rs bench`: what this machine can do, and how close the kernels come to it."""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from k3rs import _k3rs
from k3rs.cli.console import Console

__all__ = ["run"]

_QUIET_CPU = 0.1
"""Cores of other work above which the figures say little."""


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measures and prints a table that can be pasted, or the facts as JSON."""
    text = _k3rs.bench(threads=arguments.threads, backend=arguments.backend, quick=arguments.quick)
    facts: dict[str, Any] = json.loads(text)
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


def _table(facts: Mapping[str, Any]) -> Iterator[str]:
    """The limits, a row for every kernel, and one for what a token does besides, as Markdown."""
    limits = facts["limits"]
    yield (
        f"{limits['threads']} threads: memory read {limits['read_gb_s']:.1f} GB/s, "
        f"float32 FMA {limits['fma_gflop_s']:.0f} GFLOP/s"
    )
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
