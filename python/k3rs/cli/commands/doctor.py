"""`k3rs doctor`: what this machine can run, how fast, and what to type next."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from k3rs.cli.console import Console
from k3rs.cli.paragraphs import one_line, paragraph
from k3rs.doctor import Check, Probe, Report, Status, examine
from k3rs.doctor.estimate import EXPERT_EFFICIENCY, TRUNK_EFFICIENCY, ModelSizes
from k3rs.exceptions import CheckpointError
from k3rs.sizes import format_size, parse_size

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Prints verdicts, estimates and the next command; a failed check is an error."""
    size = arguments.probe_size
    probe = Probe(arguments.seconds, None if size is None else parse_size(size))
    model = None if arguments.model is None else Path(arguments.model)
    if console.is_live:
        console.remark("measuring memory and the disk; this takes some seconds")
    report = examine(model, Path(arguments.directory or "."), probe=probe)
    if arguments.json:
        console.facts(report.facts)
    else:
        console.answer("".join(f"{line}\n" for line in _lines(report)))
    for failure in report.failures:
        advice = None if failure.advice is None else one_line(failure.advice)
        raise CheckpointError(
            f"the check `{failure.name}` failed: {one_line(failure.found)}", advice
        )


def _lines(report: Report) -> Iterator[str]:
    for check in report.checks:
        yield from _verdict(check)
    if report.sizes is not None and report.estimates:
        yield ""
        yield from _table(report, report.sizes)
    yield ""
    if report.recommended is not None:
        yield f"recommended: --preset {report.recommended}"
    elif report.estimates:
        yield "recommended: --memory auto, as no preset fits"
    elif report.sizes is not None:
        yield from paragraph(f"no budget that fits the memory runs {report.sizes.name}")
    for number, command in enumerate(report.next):
        yield f"{'then' if number else 'next'}: {command}"


def _verdict(check: Check) -> Iterator[str]:
    """The verdict, and below it what to do about it."""
    head = f"{check.status:<8} {check.name:<13} "
    below = " " * len(head)
    yield from paragraph(check.found, head, below)
    if check.advice is not None and check.status is not Status.OK:
        yield from paragraph(check.advice, f"{below}-> ", f"{below}   ")


def _table(report: Report, sizes: ModelSizes) -> Iterator[str]:
    """What a token takes with every budget, and what that is computed from."""
    yield from paragraph(f"a token of {sizes.name}, computed:")
    yield _row("budget", "memory", "pinned", "experts hit", "read/token", "s/token", "bound by")
    for entry in report.estimates:
        seconds = entry.seconds_per_token
        yield _row(
            entry.budget,
            format_size(entry.memory_bytes),
            format_size(entry.pinned_bytes),
            f"{entry.hit_rate:.0%}",
            format_size(entry.trunk_read_bytes + entry.expert_read_bytes),
            "unknown" if seconds is None else _seconds(seconds),
            entry.reason or "",
        )
    yield ""
    yield from paragraph(_origin(report, sizes))


def _row(name: str, *cells: str) -> str:
    widths = (9, 9, 13, 12, 10, 10)
    aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"  {name:<12}{''.join(aligned)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"


def _origin(report: Report, sizes: ModelSizes) -> str:
    """Which of the numbers are measured, and which are assumed."""
    experts = format_size(sizes.requests * sizes.expert_bytes)
    disk = (
        "how fast the disk is, is not known"
        if report.device is None or report.device.sparse
        else f"what is not in memory is read at {report.device.tiles_gb_s:.2f} GB/s (trunk) and "
        f"{report.device.experts_gb_s:.2f} GB/s (experts), measured"
    )
    memory_s = report.estimates[0].memory_seconds
    return (
        f"It multiplies {format_size(sizes.trunk_bytes)} of trunk and {experts} of experts: "
        f"{_seconds(memory_s)} s at {report.memory_read_gb_s:.1f} GB/s of memory, measured, "
        f"of which the kernels are assumed to reach {TRUNK_EFFICIENCY:.0%} and "
        f"{EXPERT_EFFICIENCY:.0%}; {disk}. How many experts are hit is assumed from a trace of "
        "the released router."
    )
