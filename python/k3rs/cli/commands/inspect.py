"""`k3rs inspect`: what a checkpoint contains."""

import argparse
from collections import Counter
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
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield f"{indent}{name}"
            yield from (f"{indent}  {line}" for line in _rows(value))
        else:
            yield f"{indent}{name:<{width}}  {_shown(name, value)}"


def _rows(items: list[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each kind of item, with the number of its kind."""
    kinds = Counter(
        ", ".join(f"{name} {_shown(name, value)}" for name, value in item.items()) for item in items
    )
    for kind, count in list(kinds.items())[:_LONGEST_LIST]:
        yield kind if count == 1 else f"{count} x {kind}"
    if len(kinds) > _LONGEST_LIST:
        yield f"... ({len(kinds) - _LONGEST_LIST} more)"


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
