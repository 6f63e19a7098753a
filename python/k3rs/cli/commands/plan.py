"""`k3rs plan`: how a memory budget would be divided, without loading anything."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

import k3rs
from k3rs.cli.arguments import memory_request, model_directory
from k3rs.cli.console import Console
from k3rs.exceptions import MemoryBudgetError
from k3rs.sizes import format_size

__all__ = ["plan_lines", "run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Prints the plan; where it would not fit, what would be the smallest budget."""
    request = memory_request(arguments)
    directory = model_directory(arguments.model)
    positions = arguments.prompt_tokens + arguments.max_tokens
    try:
        facts = k3rs.plan(
            directory,
            request,
            positions=positions,
            threads=arguments.threads,
            layers=arguments.layers,
        )
    except MemoryBudgetError as error:
        if arguments.json:
            console.facts({"plan": None, "minimum_bytes": error.minimum_bytes})
        raise
    if arguments.json:
        console.facts(facts)
        return
    for line in plan_lines(facts["plan"]):
        console.answer(line + "\n")
    console.answer(f"smallest budget  {format_size(facts['minimum_bytes'])}\n")


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """The entries of a memory plan as a table, and their sum."""
    entries = [(entry["name"], entry["bytes"]) for entry in plan["entries"]]
    entries.append(("sum", sum(size for _, size in entries)))
    entries.append(("budget", plan["budget_bytes"]))
    width = max(len(name) for name, _ in entries)
    for name, size in entries:
        yield f"{name:<{width}}  {format_size(size):>8}"
    yield (
        f"{plan['pinned_fraction']:.1%} of the trunk stays resident, "
        f"{plan['expert_slots']} experts are cached"
    )
