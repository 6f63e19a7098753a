"""`k3rs verify`: whether the files of a checkpoint are those that were published."""

import argparse
import importlib
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k3rs.checkpoint import require_directory
from k3rs.cli.console import Console
from k3rs.cli.pending_file import require_place
from k3rs.cli.transfer_progress import counted_files, file_progress
from k3rs.exceptions import CheckpointError, InputError
from k3rs.hub.file_progress import FileProgress
from k3rs.hub.manifest import Manifest, short_hash, shown
from k3rs.hub.verification import Problem, Verification, saved_manifest, verify, write_manifest
from k3rs.hub.whole_file import PARTIAL_SUFFIX
from k3rs.sizes import format_size

__all__ = ["run"]

_LONGEST_LIST = 12


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Compares the files, or writes a manifest of them; a difference is an error."""
    if arguments.revision is not None and arguments.repo is None:
        raise InputError("expected --repo with --revision, found none", "add --repo REPO")
    act = _compare if arguments.write_manifest is None else _write_manifest
    try:
        act(arguments, console)
    except KeyboardInterrupt:
        console.note(
            "files that were hashed to their end are remembered: the same command continues from "
            "there"
        )
        raise


def _compare(arguments: argparse.Namespace, console: Console) -> None:
    with file_progress(console) as progress:
        manifest = _manifest(arguments, progress)

        def show_at_once(problem: Problem) -> None:
            # Where nothing is read, the answer comes as soon.
            if manifest is not None:
                progress.note(f"problem: {problem}")

        done = verify(
            arguments.model,
            manifest,
            again=arguments.again,
            progress=progress,
            on_problem=show_at_once,
        )
    if arguments.json:
        console.facts(_facts(arguments, manifest, done))
    else:
        console.answer("".join(f"{line}\n" for line in _lines(manifest, done)))
    if not done.good:
        raise CheckpointError(
            f"`{arguments.model}`: expected {counted_files(done.files)} as listed, found "
            f"{len(done.problems):,} that have to be fetched again",
            _repair_hint(arguments.model, manifest),
        )


def _manifest(arguments: argparse.Namespace, progress: FileProgress) -> Manifest | None:
    """What to compare with."""
    if arguments.manifest is not None:
        return Manifest.read(Path(arguments.manifest))
    if arguments.repo is None:
        return saved_manifest(arguments.model)
    require_directory(arguments.model)
    # Only this needs what speaks with the network, which takes a while to load.
    hub = importlib.import_module("k3rs.hub.repository").Hub(
        stop=threading.Event(), note=progress.note
    )
    listing: Manifest = hub.listing(arguments.repo, arguments.revision)
    return listing


def _write_manifest(arguments: argparse.Namespace, console: Console) -> None:
    path = Path(arguments.write_manifest)
    if not path.absolute().parent.is_dir():
        raise InputError(
            f"expected a file in a directory that exists, found `{path}`", "make the directory"
        )
    for place in (path, path.with_name(f"{path.name}{PARTIAL_SUFFIX}")):
        require_place(str(place))
    with file_progress(console) as progress:
        manifest = write_manifest(arguments.model, path, again=arguments.again, progress=progress)
    if arguments.json:
        console.facts(
            {
                "path": arguments.model,
                "manifest": arguments.write_manifest,
                "files": len(manifest.files),
                "bytes": manifest.size_bytes,
            }
        )
        return
    console.answer(
        f"wrote {path}: {counted_files(len(manifest.files))}, {format_size(manifest.size_bytes)}, "
        "as they are now\n"
    )


def _repair_hint(directory: str, manifest: Manifest | None) -> str:
    if manifest is None:
        return (
            f"`k3rs download {shlex.quote(directory)}` fetches what is missing and what has "
            "another size"
        )
    if manifest.repo is None:
        return "replace them, and compare again"
    # A download of another user, or with another cache directory, may still believe in them.
    return (
        f"delete the wrong files and repeat the `k3rs download` of {manifest.repo} that made the "
        "directory: it fetches them and keeps the rest"
    )


def _facts(
    arguments: argparse.Namespace, manifest: Manifest | None, done: Verification
) -> dict[str, Any]:
    return {
        "path": arguments.model,
        "repo": None if manifest is None else manifest.repo,
        "revision": None if manifest is None else manifest.revision,
        "files": done.files,
        "bytes": done.size_bytes,
        "contents_checked": done.contents_checked,
        "read_bytes": done.read_bytes,
        "good": done.good,
        "problems": [
            {"path": problem.path, "expected": problem.expected, "found": problem.found}
            for problem in done.problems
        ],
        "fetch_again": [problem.path for problem in done.problems],
        "extra": list(done.extra),
    }


def _lines(manifest: Manifest | None, done: Verification) -> Iterator[str]:
    if manifest is None:
        source = "the sizes of the released shards"
    elif manifest.repo is None:
        source = "a manifest of files of unknown origin"
    else:
        source = f"{manifest.repo} at {short_hash(str(manifest.revision))}"
    yield f"compared with {source}: {counted_files(done.files)}, {format_size(done.size_bytes)}"
    if done.contents_checked and done.read_bytes < done.size_bytes and done.good:
        known = format_size(done.size_bytes - done.read_bytes)
        yield (
            f"{known} of them were hashed by another check, within a day, that has not come to its "
            "end; --again hashes everything"
        )
    if done.extra:
        names = ", ".join(map(shown, done.extra[:_LONGEST_LIST]))
        left_out = len(done.extra) - _LONGEST_LIST
        more = f", ... ({left_out} more)" if left_out > 0 else ""
        yield f"note: not listed, and not checked: {names}{more}"
    if done.problems:
        yield "to be fetched again:"
        yield from (f"  {problem}" for problem in done.problems)
    elif done.contents_checked:
        yield "all files are right"
    if not done.contents_checked:
        sizes = "" if done.problems else "all sizes are right; "
        yield (
            f"{sizes}contents were not checked, which needs a manifest: "
            "--manifest FILE, or --repo REPO"
        )
