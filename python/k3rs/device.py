"""What the device below a directory delivers to reads like those of the engine.

The engine reads tiles of the trunk one after the other, and experts here and there, past the
page cache where that works. The shards of a model are measured themselves; where there is no
model, files of random bytes are written for the purpose and removed at once.
"""

import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from k3rs import _k3rs
from k3rs.exceptions import CheckpointError, InputError, K3Error, ReadError
from k3rs.sizes import format_size
from k3rs.worker_threads import for_each

__all__ = ["Device", "interruptible", "measure_directory", "measure_shards"]

_PROBE_PREFIX = ".k3rs-probe-"
"""How the name of the temporary directory begins, should it ever be left behind."""

_PROBE_BYTES = 1 << 30
_SHARE_OF_FREE = 4
_SMALLEST_PROBE_BYTES = 1 << 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Device:
    """What was measured at `path`, in units of 10^9 bytes a second."""

    path: str
    tiles_gb_s: float
    experts_gb_s: float
    direct: bool
    """Whether reads bypass the page cache, `why` in words."""
    why: str
    sparse: bool
    """Whether the files are mostly holes, of which the disk knows nothing."""
    file_bytes: int
    """The size of all files that were read from."""


def measure_shards(directory: Path, *, seconds: float = 1.0) -> Device:
    """The device below the weights in `directory`, where nothing is written.

    Takes `seconds` for each of the two kinds of reads. Raises `CheckpointError` where there
    are no weights, and `ReadError` where they cannot be read.
    """
    shards = sorted(path for path in directory.glob("*.safetensors") if path.is_file())
    if not shards:
        raise CheckpointError(
            f"{directory}: expected *.safetensors to measure the device by, found none",
            "name the directory of a model, or a directory to write to",
        )
    return _measure(directory, shards, seconds)


def measure_directory(
    directory: Path, *, probe_bytes: int | None = None, seconds: float = 1.0
) -> Device:
    """The device below `directory`, by a file of `probe_bytes` that is there for a moment.

    Without a size it has 1 GiB, or a quarter of the room if that is less. Takes `seconds` for
    each of the two kinds of reads. Raises `ReadError` where the directory takes no such file, and
    `InputError` for a size that says nothing or for which there is no room.
    """
    try:
        free_bytes = shutil.disk_usage(directory).free
        if probe_bytes is None:
            probe_bytes = _usual_probe_bytes(directory, free_bytes)
        if probe_bytes < _SMALLEST_PROBE_BYTES:
            raise InputError(
                f"expected a temporary file of at least {format_size(_SMALLEST_PROBE_BYTES)} to "
                f"measure a disk by, found a size of {format_size(probe_bytes)}",
                "name a larger size, or leave it out for the default",
            )
        if probe_bytes > free_bytes:
            raise InputError(
                f"{directory}: expected a temporary file that fits, found a size of "
                f"{format_size(probe_bytes)} where {format_size(free_bytes)} are free",
                "name a smaller size, make room, or name another directory",
            )
        with _probe_file(directory, probe_bytes) as probe:
            return _measure(directory, [probe], seconds)
    except OSError as error:
        if isinstance(error, K3Error):
            raise
        raise ReadError(
            f"{directory}: expected a directory that takes a temporary file, found: "
            f"{error.strerror or error}",
            "name a directory that you may write to, with --directory, or a model, which is only "
            "read",
        ) from error


def _usual_probe_bytes(directory: Path, free_bytes: int) -> int:
    size_bytes = min(_PROBE_BYTES, free_bytes // _SHARE_OF_FREE)
    if size_bytes < _SMALLEST_PROBE_BYTES:
        raise ReadError(
            f"{directory}: expected at least {format_size(_SHARE_OF_FREE * _SMALLEST_PROBE_BYTES)} "
            f"of room for a temporary file, found {format_size(free_bytes)} free",
            "make room, or name another directory",
        )
    return size_bytes


@contextmanager
def _probe_file(directory: Path, size_bytes: int) -> Iterator[Path]:
    # In a directory of its own: a writer that Ctrl-C leaves behind cannot make the file again
    # when both are gone.
    place = directory / f"{_PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        place.mkdir(0o700)
        probe = place / "probe"
        interruptible(lambda: _k3rs.write_probe_file(str(probe), size_bytes))
        yield probe
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _measure(directory: Path, files: Sequence[Path], seconds: float) -> Device:
    paths = [str(path) for path in files]
    text = interruptible(lambda: _k3rs.measure_device(paths, seconds))
    size_bytes = sum(path.stat().st_size for path in files)
    return Device(path=str(directory), **json.loads(text), file_bytes=size_bytes)


def interruptible(work: Callable[[], Result]) -> Result:
    """The result of `work`, a call of the core that does not watch for Ctrl-C itself."""
    results: list[Result] = []
    for_each([work], lambda item: results.append(item()), 1, threading.Event())
    return results[0]
