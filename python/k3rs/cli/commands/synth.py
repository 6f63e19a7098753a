"""`k3rs synth`: a checkpoint of the released layout without the released weights."""

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

import k3rs
from k3rs.cli.console import Console
from k3rs.sizes import format_size

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Writes the checkpoint, then says what it is and what to do with it."""
    with console.step_progress("writing") as progress:
        facts = k3rs.synthesize(
            arguments.directory,
            config=arguments.config,
            layers=arguments.layers,
            experts=arguments.experts,
            vocab=arguments.vocab,
            sparse=arguments.sparse,
            seed=arguments.seed,
            progress=progress,
        )
    if facts["unknown_config_keys"]:
        names = ", ".join(facts["unknown_config_keys"])
        console.note(f"note: config keys without effect: {names}")
    if arguments.json:
        console.facts(facts)
        return
    console.answer("".join(f"{line}\n" for line in _lines(facts)))
    console.answer(f"next: k3rs generate {shlex.quote(arguments.directory)} --ids 3,4,5,6,7 -n 2\n")


def _lines(facts: Mapping[str, Any]) -> list[str]:
    weights = "holes (zeros)" if facts["sparse"] else f"random, seed {facts['seed']}"
    size, disk_size = format_size(facts["file_bytes"]), format_size(facts["disk_bytes"])
    vocabulary = f"a vocabulary of {facts['vocabulary']:,}"
    return [
        f"{facts['layers']} layers, {facts['experts']} experts a layer, {vocabulary}",
        f"{facts['tensors']:,} tensors in {facts['shards']} shards",
        f"{facts['file_bytes']:,} bytes ({size}), {disk_size} on disk",
        f"weights: {weights}",
    ]
