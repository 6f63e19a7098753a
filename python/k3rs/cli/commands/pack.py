"""`k3rs pack`: the trunk of a model for a faster disk."""

import argparse
import shlex

from k3rs.cli.console import Console
from k3rs.packed_trunk import pack_trunk, verify_trunk
from k3rs.sizes import format_size

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Packs, or checks what was packed, and says what is there."""
    if arguments.check:
        with console.step_progress("checking") as progress:
            verify_trunk(arguments.model, arguments.directory, progress=progress)
        if arguments.json:
            console.facts({"directory": arguments.directory, "intact": True})
        else:
            console.answer("the trunk is that of the model to the byte\n")
        return
    with console.step_progress("packing") as progress:
        facts = pack_trunk(arguments.model, arguments.directory, progress=progress)
    if arguments.json:
        console.facts({"directory": arguments.directory, **facts})
        return
    size, resumed = format_size(facts["file_bytes"]), facts["resumed_bytes"]
    there = f", {format_size(resumed)} of them were there already" if resumed else ""
    console.answer(f"{facts['matrices']} matrices, {size}{there}\n")
    console.note(f"use it with --trunk {shlex.quote(arguments.directory)}")
