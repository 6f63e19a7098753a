"""Hashes of many large files at the speed of the disk."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from k3rs import _k3rs
from k3rs.exceptions import CheckpointError, ReadError
from k3rs.hub.file_progress import FileProgress
from k3rs.hub.hash_record import HashRecord
from k3rs.hub.manifest import HashKind, ListedFile
from k3rs.worker_threads import for_each

__all__ = ["ChangedFileError", "Target", "hash_files", "targets"]

Target = tuple[str, int, HashKind]
"""A file of a directory: its name there, its size in bytes, and the hash that is wanted."""

_THREADS_MIN = 2
_THREADS_MAX = 8


class ChangedFileError(CheckpointError):
    """A file has not been the same all the time while it was read."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"expected `{path}` to stay as it is, found that it changed while it was read",
            "end what writes to it, then run the same command again",
        )


def targets(files: Sequence[ListedFile]) -> list[Target]:
    """What to hash to compare `files` with what is listed."""
    return [(file.path, file.size_bytes, file.hash_kind) for file in files]


def hash_files(
    directory: Path,
    wanted: Sequence[Target],
    *,
    record: HashRecord,
    progress: FileProgress,
    found: Callable[[str, str | CheckpointError | ReadError], None],
) -> int:
    """Calls `found` with the name and the hash of every file, or the error of reading it.

    What `record` knows is not read again, and what is hashed is added to it. The largest come
    first, so that no thread is left alone with one at the end. Each thread, one a CPU and
    two to eight, reads 32 MiB ahead, past the page cache where that works: it is there for the
    model. Returns how many bytes were read.
    """
    waiting: list[Target] = []
    for path, size_bytes, kind in wanted:
        known = record.find(path, kind)
        if known is None:
            waiting.append((path, size_bytes, kind))
        else:
            found(path, known)
    waiting.sort(key=lambda target: -target[1])
    total = sum(size_bytes for _, size_bytes, _ in wanted)
    unread = sum(size_bytes for _, size_bytes, _ in waiting)
    if waiting:
        progress.begin("checking", "hashed", len(waiting), total, total - unread)
    stop = threading.Event()

    def work(target: Target) -> None:
        path, size_bytes, kind = target
        progress.start(path, size_bytes, 0)
        try:
            outcome = _hash(directory / path, target, stop, progress)
        except (CheckpointError, ReadError) as error:
            progress.abandon(path)
            found(path, error)
            return
        if outcome is not None:
            hash_found, status = outcome
            record.add(path, kind, hash_found, status)
            progress.finish(path)
            found(path, hash_found)

    try:
        thread_count = min(max(os.cpu_count() or 1, _THREADS_MIN), _THREADS_MAX)
        for_each(waiting, work, thread_count, stop)
    finally:
        record.save()
    return unread


def _hash(
    file: Path, target: Target, stop: threading.Event, progress: FileProgress
) -> tuple[str, os.stat_result] | None:
    """The hash of a file and what it was found for; `None` when stopped."""
    path, size_bytes, kind = target

    def advanced(count: int) -> bool:
        progress.advance(path, count)
        return not stop.is_set()

    before = _status(file)
    try:
        found = _k3rs.hash_file(str(file), kind, advanced)
    except ReadError:
        if _changes(_status(file)) != _changes(before):
            raise ChangedFileError(file) from None
        raise
    if found is None:
        return None
    after = _status(file)
    if after.st_size != size_bytes or _changes(after) != _changes(before):
        raise ChangedFileError(file)
    return found, after


def _status(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise ReadError(f"cannot measure `{file}`: {error.strerror}") from error


def _changes(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
