"""One writer to a directory at a time."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from k3rs.exceptions import CheckpointError

__all__ = ["exclusive"]

_WITHOUT_LOCKS = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


@contextmanager
def exclusive(directory: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Holds `directory` against other downloads, which are refused with `CheckpointError`.

    The lock is on the directory itself, so it leaves no file behind, and the kernel lets go of
    it however the process ends. Where the file system has no such locks, `note` is told.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"expected `{directory}` for this download alone, found another one at work in it",
                "wait until it is done, or choose another directory",
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            note(f"`{directory}` cannot be locked: do not start a second download into it")
        yield
    finally:
        os.close(descriptor)
