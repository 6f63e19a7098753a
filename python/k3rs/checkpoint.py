"""Facts about a checkpoint directory that need no weights in memory."""

import json
import os
from pathlib import Path
from typing import Any

from k3rs import _k3rs
from k3rs.exceptions import CheckpointError, InputError
from k3rs.presets import MemoryRequest
from k3rs.tokenizer import Tokenizer
from k3rs.vocabulary import RANKS_FILE

__all__ = [
    "DEFAULT_POSITIONS",
    "inspect",
    "load_tokenizer",
    "plan",
    "require_directory",
    "require_positive",
]

DEFAULT_POSITIONS = 4096
"""Positions that the memory plan makes room for when nothing else is said."""


def require_directory(path: str | os.PathLike[str]) -> Path:
    """`path` as a `Path`, refused with `CheckpointError` unless it is a directory."""
    directory = Path(path)
    if directory.is_dir():
        return directory
    found = "a file" if directory.exists() else "nothing there"
    raise CheckpointError(
        f"{directory}: expected a model directory, found {found}",
        hint="give the directory that holds config.json and the *.safetensors files",
    )


def require_positive(**values: int | None) -> None:
    """Raises `InputError` unless every value that is given is at least 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise InputError(
                f"expected {name} to be at least 1, found {value}",
                hint="leave it out for the default",
            )


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """The tokenizer of the checkpoint at `path`; `None` where it has no `tiktoken.model`."""
    directory = require_directory(path)
    if not (directory / RANKS_FILE).exists():
        return None
    return Tokenizer.from_directory(directory)


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is at `path`, by its config and tensor headers: a checkpoint, complete or not.

    `complete` says whether it could be run, `problem` why not, `runnable_layers` how many
    of its first layers could. Raises `CheckpointError` or `ConfigError` where there is no
    config, or nothing beside it.
    """
    facts: dict[str, Any] = json.loads(_k3rs.inspect(str(require_directory(path))))
    return facts


def plan(
    path: str | os.PathLike[str],
    request: MemoryRequest | None = None,
    *,
    positions: int = DEFAULT_POSITIONS,
    prefill_chunk: int | None = None,
    threads: int | None = None,
    layers: int | None = None,
) -> dict[str, Any]:
    """How the budget of `request` would be divided, and the smallest one accepted.

    The arguments are those of `Model.open`.

    Raises `MemoryBudgetError`, which carries `minimum_bytes`, when it would not fit.
    """
    require_positive(
        positions=positions, prefill_chunk=prefill_chunk, threads=threads, layers=layers
    )
    request = request or MemoryRequest()
    facts: dict[str, Any] = json.loads(
        _k3rs.plan(
            str(require_directory(path)),
            memory_bytes=request.memory_bytes,
            trunk_bytes=request.trunk_bytes,
            cache_bytes=request.cache_bytes,
            positions=positions,
            prefill_chunk=prefill_chunk,
            threads=threads,
            layers=layers,
        )
    )
    return facts
