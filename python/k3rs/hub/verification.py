"""Whether the files of a checkpoint are those that were published: sizes first, then hashes.

A check writes nothing into the directory. The files that it has hashed when it is interrupted
are remembered in the user's cache directory for a day and not hashed again by the next one, as
long as they do not change; when a check has come to its end, that is forgotten.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from k3rs.checkpoint import require_directory
from k3rs.exceptions import CheckpointError, ReadError
from k3rs.hub.file_hashing import ChangedFileError, Target, hash_files, targets
from k3rs.hub.file_progress import FileProgress
from k3rs.hub.hash_record import HashRecord, Purpose
from k3rs.hub.manifest import (
    MANIFEST_FILE,
    HashKind,
    ListedFile,
    Manifest,
    check_name,
    short_hash,
)
from k3rs.hub.release import RELEASED_SHARD_BYTES
from k3rs.hub.whole_file import PARTIAL_SUFFIX

__all__ = ["Problem", "Verification", "saved_manifest", "verify", "write_manifest"]

_LIBRARY_DIRECTORY = ".cache"
"""Where `hf_hub_download` keeps its notes about a directory."""


@dataclass(frozen=True)
class Problem:
    """A file that has to be fetched again: what was expected of it and what was found."""

    path: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"`{self.path}`: expected {self.expected}, found {self.found}"


OnProblem: TypeAlias = Callable[[Problem], None]


@dataclass(frozen=True)
class Verification:
    """What a check has found. `read_bytes` is how much it had to read.

    `extra` are files that nobody has listed. Without `contents_checked` only the sizes were.
    """

    files: int
    size_bytes: int
    contents_checked: bool
    read_bytes: int
    problems: tuple[Problem, ...]
    extra: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether everything is right."""
        return not self.problems


def saved_manifest(directory: str | os.PathLike[str]) -> Manifest | None:
    """The manifest that a download has left in `directory`, if there is one."""
    path = require_directory(directory) / MANIFEST_FILE
    return Manifest.read(path) if path.exists() else None


def verify(
    directory: str | os.PathLike[str],
    manifest: Manifest | None = None,
    *,
    again: bool = False,
    progress: FileProgress | None = None,
    on_problem: OnProblem | None = None,
) -> Verification:
    """Compares the files in `directory` with `manifest`.

    Without one the sizes of the shards are compared with those of the released checkpoint, and
    contents are not. `on_problem` is told each problem when it is found, those of sizes before
    anything is hashed; the next download looks at that file again. With `again` everything is
    hashed, also what an interrupted check has hashed. Raises `CheckpointError` where there is
    nothing to compare with.
    """
    place = require_directory(directory)
    if manifest is not None and not manifest.files:
        raise CheckpointError(
            "expected files to compare with, found a list without any", "choose another list"
        )
    listed = _released_sizes(place) if manifest is None else _sizes(manifest.files)
    problems: list[Problem] = []

    def report(problem: Problem) -> None:
        problems.append(problem)
        # Before anybody reads of it: who then interrupts this can have the file fetched again.
        HashRecord(Purpose.DOWNLOAD, place).forget(problem.path)
        if on_problem is not None:
            on_problem(problem)

    for problem in _size_problems(place, listed):
        report(problem)
    read_bytes = 0
    if manifest is not None:
        wrong = {problem.path for problem in problems}
        right = [file for file in manifest.files if file.path not in wrong]
        record = _record(Purpose.VERIFY, place, again=again)
        read_bytes = _compare_contents(place, right, record, progress or FileProgress(), report)
        record.delete()
    return Verification(
        files=len(listed),
        size_bytes=sum(listed.values()),
        contents_checked=manifest is not None,
        read_bytes=read_bytes,
        problems=tuple(sorted(problems, key=lambda problem: problem.path)),
        extra=tuple(path for path in _files_in(place) if path not in listed),
    )


def write_manifest(
    directory: str | os.PathLike[str],
    path: Path,
    *,
    again: bool = False,
    progress: FileProgress | None = None,
) -> Manifest:
    """Writes a manifest of the files that are in `directory` now to `path`; itself is left out.

    Raises `CheckpointError` for a file that cannot be read or cannot be listed by its name, the
    latter before anything is hashed.
    """
    place = require_directory(directory)
    wanted = _listable_files(place, {path.resolve(), Path(f"{path.resolve()}{PARTIAL_SUFFIX}")})
    record = _record(Purpose.MANIFEST, place, again=again)
    hashes = _hashes(place, wanted, record, progress or FileProgress())
    manifest = Manifest(
        None, None, tuple(ListedFile(path, size, kind, hashes[path]) for path, size, kind in wanted)
    )
    manifest.write(path)
    record.delete()
    return manifest


def _listable_files(place: Path, left_out: set[Path]) -> list[Target]:
    wanted: list[Target] = []
    for path in _files_in(place):
        if (place / path).resolve() in left_out:
            continue
        check_name(path, "rename that file, or move it away")
        status = (place / path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                f"expected files in `{place}`, found `{path}`, which is something else",
                "move it away",
            )
        wanted.append((path, status.st_size, HashKind.SHA256))
    if not wanted:
        raise CheckpointError(
            f"expected files in `{place}`, found none", "give the directory of a model"
        )
    return wanted


def _hashes(
    place: Path, wanted: Sequence[Target], record: HashRecord, progress: FileProgress
) -> dict[str, str]:
    hashes: dict[str, str] = {}

    def found(path: str, outcome: str | CheckpointError | ReadError) -> None:
        if not isinstance(outcome, str):
            raise outcome
        hashes[path] = outcome

    hash_files(place, wanted, record=record, progress=progress, found=found)
    return hashes


def _compare_contents(
    place: Path,
    files: Sequence[ListedFile],
    record: HashRecord,
    progress: FileProgress,
    report: OnProblem,
) -> int:
    """Reports the files whose hash is another; returns how many bytes were read for it."""
    by_path = {file.path: file for file in files}

    def compare(path: str, outcome: str | CheckpointError | ReadError) -> None:
        file = by_path[path]
        if isinstance(outcome, ChangedFileError):
            report(Problem(path, "a file that stays as it is", "that it changed while it was read"))
        elif not isinstance(outcome, str):
            report(Problem(path, "a readable file", str(outcome)))
        elif outcome != file.hash:
            expected, found = short_hash(file.hash), short_hash(outcome)
            report(Problem(path, f"{file.hash_kind} {expected}...", f"other content, {found}..."))

    return hash_files(place, targets(files), record=record, progress=progress, found=compare)


def _record(purpose: Purpose, place: Path, *, again: bool) -> HashRecord:
    record = HashRecord(purpose, place)
    if again:
        record.delete()
    return record


def _sizes(files: Sequence[ListedFile]) -> dict[str, int]:
    return {file.path: file.size_bytes for file in files}


def _released_sizes(place: Path) -> dict[str, int]:
    if not any((place / name).is_file() for name in RELEASED_SHARD_BYTES):
        raise CheckpointError(
            f"`{place}`: expected `{MANIFEST_FILE}`, or shards of the released model, whose sizes "
            "are known, found neither",
            "name a list to compare with by --manifest FILE or --repo REPO, or make one of the "
            "files as they are by --write-manifest FILE",
        )
    return RELEASED_SHARD_BYTES


def _size_problems(place: Path, listed: dict[str, int]) -> Iterator[Problem]:
    for path, size_bytes in listed.items():
        file = place / path
        expected = f"{size_bytes:,} bytes"
        try:
            status = file.stat()
        except OSError as error:
            dangling = file.is_symlink() and isinstance(error, FileNotFoundError)
            missing = "a dangling symlink" if dangling else "nothing"
            absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            yield Problem(path, expected, missing if absent else error.strerror or str(error))
            continue
        if not file.is_file():
            yield Problem(path, expected, "something that is not a file")
        elif status.st_size != size_bytes:
            yield Problem(path, expected, f"{status.st_size:,} bytes")


def _files_in(place: Path) -> list[str]:
    """Names of all files in a directory and below, as a manifest has them, without manifests."""
    found = []
    for directory, below, names in os.walk(place):
        if _LIBRARY_DIRECTORY in below:
            below.remove(_LIBRARY_DIRECTORY)
        found += [(Path(directory) / name).relative_to(place).as_posix() for name in names]
    return sorted(path for path in found if path != MANIFEST_FILE)
