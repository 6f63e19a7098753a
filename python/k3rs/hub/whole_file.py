"""Files that appear whole or not at all, also when the power fails."""

import os
from pathlib import Path

__all__ = ["PARTIAL_SUFFIX", "put_in_place", "write_whole"]

PARTIAL_SUFFIX = ".partial"
"""The end of the names of unfinished files."""


def write_whole(path: Path, content: bytes) -> None:
    """Replaces the file at `path` by one with `content`.

    What a killed writer leaves beside it is taken over by the next one.
    """
    partial = path.with_name(f"{path.name}{PARTIAL_SUFFIX}")
    try:
        partial.write_bytes(content)
        put_in_place(partial, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def put_in_place(partial: Path, path: Path) -> None:
    """Gives the finished file `partial`, in the directory of `path`, that name.

    Its data reach the disk first and its name next: in the other order a power failure
    could leave a file of the right name with holes.
    """
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
