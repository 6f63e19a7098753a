"""`k3rs inspect`: what a checkpoint contains."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import k3rs
from k3rs.cli.console import Console
from k3rs.sizes import format_size

__all__ = ["run"]

_LONGEST_LIST = 12


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Prints the facts about the checkpoint, from its config and headers alone."""
    facts = k3rs.inspect(arguments.model)
    if arguments.json:
        console.facts(facts)
        return
    console.answer("".join(f"{line}\n" for line in _lines(facts, "")))


def _lines(facts: Mapping[str, Any], indent: str) -> Iterator[str]:
    """`facts` as an outline, one fact a line."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name:<{width}}  {_shown(name, value)}"


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int) and name.endswith("bytes"):
        return f"{value:,} ({format_size(value)})"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        shown = ", ".join(str(item) for item in value[:_LONGEST_LIST])
        left_out = len(value) - _LONGEST_LIST
        return shown + (f", ... ({left_out} more)" if left_out > 0 else "") if value else "none"
    return str(value)
