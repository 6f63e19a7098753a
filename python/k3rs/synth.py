"""Checkpoints of the released layout without the released weights."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3rs import _k3rs
from k3rs.exceptions import InputError

__all__ = ["synthesize"]

_LARGEST_SEED = 2**64 - 1
_LARGEST_SIZE = 2**32


def synthesize(
    directory: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    layers: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    sparse: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], Any] | None = None,
) -> dict[str, Any]:
    """Writes a made-up checkpoint into `directory`, which must be new or empty.

    The model is that of `config` (a `config.json`; the released one without it), of which the
    first `layers` layers are kept, with `experts` routed experts a layer and `vocab` token ids;
    special ids keep their distance from the end of the vocabulary.

    With `sparse` the data are holes that read as zeros and take no room. Otherwise the weights
    are random, the same for the same `seed`, and of such sizes that texts differ; then the
    image tensors, which the text model never reads, are left out.

    `progress` is called with the steps done and the steps in all. Returns the facts about what
    was written, `disk_bytes` among them. After an error, or Ctrl-C, nothing unfinished is left.
    """
    sizes = {"layers": layers, "experts": experts, "vocab": vocab}
    for name, size in sizes.items():
        if size is not None:
            _require(name, size, 1, _LARGEST_SIZE)
    _require("seed", seed, 0, _LARGEST_SEED)
    facts: dict[str, Any] = json.loads(
        _k3rs.synthesize(
            str(Path(directory)),
            config=None if config is None else str(Path(config)),
            layers=layers,
            experts=experts,
            vocabulary=vocab,
            sparse=sparse,
            seed=seed,
            progress=progress,
        )
    )
    return facts


def _require(name: str, value: int, smallest: int, largest: int) -> None:
    if not smallest <= value <= largest:
        raise InputError(
            f"expected `{name}` from {smallest} to {largest}, found {value}",
            hint="leave it out for the default",
        )
