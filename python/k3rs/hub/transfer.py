"""One file on its way from the hub: continued, checked, and put in place when it is right."""

import io
import os
import threading
from pathlib import Path
from typing import TypeAlias

from k3rs.exceptions import CheckpointError, K3Error
from k3rs.hub.file_progress import FileProgress
from k3rs.hub.manifest import Hasher, ListedFile
from k3rs.hub.repository import Hub, StoppedError, TransientError
from k3rs.hub.whole_file import PARTIAL_SUFFIX, put_in_place

__all__ = ["Transfer", "partial_bytes", "partial_path"]

_CONTENT_ATTEMPTS = 2
_BLOCK_BYTES = 4 << 20

Sink: TypeAlias = "io.FileIO | io.BytesIO"


def partial_path(directory: Path, path: str) -> Path:
    """Where a file of `directory` is until it is complete."""
    return directory / f"{path}{PARTIAL_SUFFIX}"


def partial_bytes(directory: Path, file: ListedFile) -> int:
    """How much of a file an earlier download has left that can be continued."""
    try:
        size_bytes = partial_path(directory, file.path).stat().st_size
    except OSError:
        return 0
    return size_bytes if size_bytes <= file.size_bytes else 0


class Transfer:
    """A file of `repo` at the commit `revision`, to be fetched once.

    `received_bytes` is what came over the network.
    """

    def __init__(
        self,
        hub: Hub,
        repo: str,
        revision: str,
        file: ListedFile,
        *,
        stop: threading.Event,
        progress: FileProgress,
    ) -> None:
        self._hub = hub
        self._repo = repo
        self._revision = revision
        self._file = file
        self._stop = stop
        self._progress = progress
        self._hasher = self._new_hasher()
        self.received_bytes = 0

    def into_memory(self) -> bytes:
        """The content, for what is small and needed before anything is written."""
        sink = io.BytesIO()
        if not self._complete(sink):
            raise self._wrong_content()
        return sink.getvalue()

    def into_directory(self, directory: Path) -> os.stat_result:
        """Puts the file into `directory`, continuing what is left of an earlier attempt.

        Unfinished it stays beside its place, unless its content is wrong. Returns the status that
        it had when it was complete.
        """
        partial = partial_path(directory, self._file.path)
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()
            # Without a buffer nothing is lost when this process ends at any moment.
            with io.FileIO(partial, "r+") as sink:
                if sink.seek(0, io.SEEK_END) > self._file.size_bytes:
                    sink.truncate(0)
                complete = self._complete(sink)
                status = os.fstat(sink.fileno())
            if not complete:
                partial.unlink()
                raise self._wrong_content()
            put_in_place(partial, directory / self._file.path)
        except K3Error:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(partial)) from error
        return status

    def _complete(self, sink: Sink) -> bool:
        """Fills `sink`, again if need be; whether it has the right content then."""
        self._hash_existing(sink)
        for attempt in range(_CONTENT_ATTEMPTS):
            if attempt:
                self._progress.note(f"`{self._file.path}`: wrong bytes arrived; fetching it again")
                self._start_over(sink)
            self._receive(sink)
            if self._hasher.hexdigest() == self._file.hash:
                return True
        return False

    def _receive(self, sink: Sink) -> None:
        """Appends to `sink` until it has all bytes."""
        farthest = sink.tell()
        attempts = self._hub.attempts(f"`{self._file.path}`")
        while sink.tell() < self._file.size_bytes:
            try:
                self._receive_once(sink)
            except TransientError as error:
                attempts.failed(error, progressed=sink.tell() > farthest)
                farthest = max(farthest, sink.tell())

    def _receive_once(self, sink: Sink) -> None:
        """Appends what one answer has: all that is missing, or else `TransientError`."""
        file, offset = self._file, sink.tell()
        with self._hub.stream(self._repo, self._revision, file.path, offset) as (start, pieces):
            if start < offset:  # the server does not serve parts
                self._start_over(sink)
            for piece in pieces:
                self._append(sink, piece[: file.size_bytes - sink.tell()])
                if sink.tell() == file.size_bytes:
                    return
        raise TransientError("the connection ended early")

    def _append(self, sink: Sink, piece: bytes) -> None:
        if self._stop.is_set():
            raise StoppedError
        left = memoryview(piece)
        while left:  # a full disk takes a part before it takes nothing
            left = left[sink.write(left) :]
        self._hasher.update(piece)
        self.received_bytes += len(piece)
        self._progress.advance(self._file.path, len(piece))

    def _hash_existing(self, sink: Sink) -> None:
        sink.seek(0)
        while block := sink.read(_BLOCK_BYTES):
            if self._stop.is_set():
                raise StoppedError
            self._hasher.update(block)

    def _start_over(self, sink: Sink) -> None:
        self._progress.advance(self._file.path, -sink.tell())
        sink.seek(0)
        sink.truncate()
        self._hasher = self._new_hasher()

    def _new_hasher(self) -> Hasher:
        return self._file.hash_kind.hasher(self._file.size_bytes)

    def _wrong_content(self) -> CheckpointError:
        return CheckpointError(
            f"`{self._file.path}`: expected {self._file.hash_kind} {self._file.hash} by the list "
            f"of {self._repo}, found other bytes in {_CONTENT_ATTEMPTS} attempts",
            "something between here and the hub changes files, or this disk does; run the same "
            "command again, by another network if it stays",
        )
