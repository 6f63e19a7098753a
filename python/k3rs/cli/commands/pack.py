"""`k3rs pack`: the trunk of a model for a faster disk."""

import argparse

import k3rs
from k3rs.cli.console import Console
from k3rs.packed_trunk import pack_trunk, verify_trunk
from k3rs.sizes import format_size

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Packs, or checks what was packed, and says what is there."""
    if arguments.check:
        # Opened with the model, so that the trunk of another one is refused.
        with k3rs.Model.open(arguments.model, trunk=arguments.directory):
            pass
        with console.step_progress("checking") as progress:
            verify_trunk(arguments.directory, progress=progress)
        if arguments.json:
            console.facts({"directory": arguments.directory, "intact": True})
        else:
            console.answer("every piece of the trunk has its checksum\n")
        return
    with console.step_progress("packing") as progress:
        facts = pack_trunk(arguments.model, arguments.directory, progress=progress)
    if arguments.json:
        console.facts({"directory": arguments.directory, **facts})
        return
    size, resumed = format_size(facts["file_bytes"]), facts["resumed_bytes"]
    there = f", {format_size(resumed)} of them were there already" if resumed else ""
    console.answer(f"{facts['matrices']} matrices, {size}{there}\n")
    console.note(f"use it with --trunk {arguments.directory}")
