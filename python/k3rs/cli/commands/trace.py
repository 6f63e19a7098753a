"""`k3rs trace`: what can be learned from the expert requests of a run."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from k3rs.cli.console import Console
from k3rs.trace import read_trace, replay

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Replays the trace and prints the hit rates, policies side by side."""
    facts = replay(read_trace(arguments.trace), arguments.slots, skip=arguments.skip)
    if arguments.json:
        console.facts(facts)
        return
    console.answer("".join(f"{line}\n" for line in _table(facts)))


def _table(facts: Mapping[str, Any]) -> Iterator[str]:
    """What was counted, then a row for every cache size."""
    tokens, counted = facts["tokens"], facts["counted_tokens"]
    yield f"{tokens:,} tokens, {facts['requests']:,} requests for experts"
    first = tokens - counted + 1
    yield "hit rates" + (f" of tokens {first} to {tokens}" if first > 1 else "")
    rates: dict[int, dict[str, float]] = {}
    for result in facts["results"]:
        rates.setdefault(result["slots"], {})[result["policy"]] = result["hit_rate"]
    yield "".join(f"{name:>9}" for name in ("slots", *next(iter(rates.values()))))
    for slots, by_policy in rates.items():
        yield f"{slots:>9,}" + "".join(f"{rate:>9.1%}" for rate in by_policy.values())
