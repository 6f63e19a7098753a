"""Files that appear whole or not at all."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from k3rs.closing import Closing

__all__ = ["LogitsFile", "PendingFile", "require_place"]


class PendingFile(Closing):
    """A file written beside its target and renamed on `commit`.

    Opened before the work whose result it takes, so that a path that cannot be
    written is an error at once. What is not a regular file (a device, a pipe) is
    written in place. Without `commit` the target stays as it was.
    """

    def __init__(self, path: str) -> None:
        self._target = Path(path)
        self._beside: Path | None = None
        if not self._target.exists() or stat.S_ISREG(self._target.stat().st_mode):
            # The file that a link points to is replaced, not the link.
            self._target = self._target.resolve()
            name = f".{self._target.name}.{os.getpid()}.partial"
            self._beside = self._target.with_name(name)
        with self._named_errors():
            self.file: BinaryIO = (self._beside or self._target).open("wb")

    def write(self, data: bytes) -> None:
        """Appends `data`."""
        with self._named_errors():
            self.file.write(data)

    def commit(self) -> None:
        """Puts the file in its place."""
        with self._named_errors():
            self.file.close()
            if self._beside is not None:
                self._beside.replace(self._target)
                self._beside = None

    def close(self) -> None:
        """Throws away what was not committed."""
        if self._beside is not None:
            self._beside.unlink(missing_ok=True)
            self._beside = None
        # Closing flushes; of a file that is thrown away nobody wants to hear.
        try:
            self.file.close()
        except OSError:
            return

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """The operating system's errors with the name that the user gave."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._target)) from error


class LogitsFile(PendingFile):
    """A `.npy` file, float32 [steps, vocab], that grows row by row.

    Rows go to the file as they come: kept in memory they would count against the
    budget. The header is written again, at the same length, when their number is known.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._shape = (0, 0)

    def append(self, logits: NDArray[np.float32]) -> None:
        """The logits of the next step, float32 [vocab]."""
        rows, width = self._shape
        if rows == 0:
            width = len(logits)
            self._write_header((0, width))
        self._shape = (rows + 1, width)
        self.write(np.ascontiguousarray(logits, dtype="<f4").tobytes())

    def commit(self) -> None:
        """Completes the header and puts the file in its place."""
        with self._named_errors():
            self.file.seek(0)
        self._write_header(self._shape)
        super().commit()

    def _write_header(self, shape: tuple[int, int]) -> None:
        # numpy pads the header so that the first dimension can grow.
        header: dict[str, Any] = {"descr": "<f4", "fortran_order": False, "shape": shape}
        with self._named_errors():
            npy.write_array_header_1_0(self.file, header)


def require_place(path: str) -> None:
    """Raises `OSError` unless a regular file can be put at `path`, where nothing changes."""
    if Path(path).exists() and not Path(path).is_file():
        raise OSError(errno.EINVAL, "something that is no regular file is there", path)
    PendingFile(path).close()
