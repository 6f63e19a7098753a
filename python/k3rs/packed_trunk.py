"""The trunk by itself, in the order of use, for a disk that is faster than the model's."""

import json
import os
from typing import Any

from k3rs import _k3rs
from k3rs.checkpoint import require_directory
from k3rs.session import Progress

__all__ = ["pack_trunk", "verify_trunk"]


def pack_trunk(
    model: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes the streamed matrices of the checkpoint `model` to `trunk.safetensors`.

    The file is made beside its place in `directory`, which is created; an attempt that was
    interrupted is continued, one that is complete is left as it is. `progress` is called
    with the pieces done and the pieces in all. Returns `matrices`, `file_bytes`, and
    `resumed_bytes`, what was there already.

    Raises what `Model.open` raises for the checkpoint, and `CheckpointError` if there is no
    room, another process packs into `directory`, or it holds the trunk of another model.
    """
    path = os.fspath(require_directory(model))
    facts: dict[str, Any] = json.loads(
        _k3rs.pack_trunk(path, os.fspath(directory), progress=progress)
    )
    return facts


def verify_trunk(
    model: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
) -> None:
    """Compares every byte of a packed trunk with the checkpoint `model`, and with its checksums.

    Raises `CheckpointError` if there is no trunk of this model in `directory`, or a piece
    differs.
    """
    path = os.fspath(require_directory(model))
    _k3rs.verify_trunk(path, os.fspath(directory), progress=progress)
