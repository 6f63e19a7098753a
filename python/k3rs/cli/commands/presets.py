"""`k3rs presets`: the named memory budgets."""

import argparse
from dataclasses import asdict

import k3rs
from k3rs.cli.console import Console
from k3rs.sizes import format_size

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Prints every preset with its budget."""
    if arguments.json:
        console.facts({"presets": [asdict(preset) for preset in k3rs.PRESETS]})
        return
    for preset in k3rs.PRESETS:
        size = format_size(preset.memory_bytes)
        console.answer(f"{preset.name:<12} {size:>8}  {preset.description}\n")
