"""`k3rs download`: a repository of the hub as a directory."""

import argparse
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from k3rs.cli.console import Console
from k3rs.cli.transfer_progress import counted_files, file_progress
from k3rs.exceptions import K3Error
from k3rs.hub.checkpoint_part import CheckpointPart, parse_layers
from k3rs.hub.download import DEFAULT_REPO, Downloaded, download
from k3rs.hub.manifest import MANIFEST_FILE, short_hash
from k3rs.sizes import format_size

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Fetches what is missing, then says what the directory holds."""
    repo = arguments.repo or DEFAULT_REPO
    layers = None if arguments.only_layers is None else parse_layers(arguments.only_layers)
    part = CheckpointPart(weights=not arguments.no_weights, layers=layers)
    try:
        with file_progress(console) as progress:
            done = download(
                repo,
                arguments.directory,
                revision=arguments.revision,
                part=part,
                retries=arguments.retries,
                progress=progress,
            )
    except K3Error:
        raise
    except (KeyboardInterrupt, OSError):  # the disk may be full, for one
        console.note("what has arrived stays: the same command continues from there")
        raise
    facts = _facts(done, arguments.directory)
    if arguments.json:
        console.facts(facts)
        return
    console.answer("".join(f"{line}\n" for line in _lines(facts)))
    if part == CheckpointPart():
        console.answer(f"next: k3rs plan {shlex.quote(arguments.directory)}\n")


def _facts(done: Downloaded, directory: str) -> dict[str, Any]:
    manifest = done.manifest
    return {
        "repo": manifest.repo,
        "revision": manifest.revision,
        "directory": directory,
        "manifest": str(Path(directory) / MANIFEST_FILE),
        "files": len(done.checked),
        "bytes": sum(file.size_bytes for file in done.checked),
        "other_files": len(manifest.files) - len(done.checked),
        "fetched_files": done.fetched_files,
        "fetched_bytes": done.fetched_bytes,
    }


def _lines(facts: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{facts['repo']} at {short_hash(facts['revision'])}: {counted_files(facts['files'])}, "
        f"{format_size(facts['bytes'])}, every hash as listed"
    )
    if facts["other_files"]:
        yield (
            f"not looked at now: {counted_files(facts['other_files'])} of earlier downloads; "
            f"`k3rs verify {shlex.quote(facts['directory'])}` compares them as well"
        )
    yield (
        f"fetched now: {counted_files(facts['fetched_files'])}, "
        f"{format_size(facts['fetched_bytes'])} over the network"
    )
