"""The Rust core, as Python sees it. Private: use `k3rs` itself."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__version__: str

def available_backends() -> list[str]:
    """Instruction sets that this CPU can run, best first; `scalar` is always there."""

def inspect(path: str) -> str:
    """Facts about a checkpoint directory as JSON text; reads headers only."""

def plan(
    path: str,
    *,
    memory_bytes: int | None = None,
    trunk_bytes: int | None = None,
    cache_bytes: int | None = None,
    positions: int = 4096,
    prefill_chunk: int | None = None,
) -> str:
    """The memory plan as JSON text, without loading anything."""

class Engine:
    """An open checkpoint."""

    @staticmethod
    def open(
        path: str,
        *,
        memory_bytes: int | None = None,
        trunk_bytes: int | None = None,
        cache_bytes: int | None = None,
        positions: int = 4096,
        prefill_chunk: int | None = None,
        threads: int | None = None,
        backend: str = "auto",
        direct: bool | None = None,
    ) -> Engine: ...
    def session(self) -> Session: ...
    def describe(self) -> str:
        """JSON: `model`, `config`, `unknown_config_keys`, `options`, `plan`."""
    def report(self) -> str:
        """JSON: `io`, `experts`, `memory` counted since open."""

class Session:
    """One text: everything that grows with it."""

    @property
    def position(self) -> int: ...
    def forward(
        self,
        ids: Sequence[int],
        *,
        all_positions: bool = False,
        capture_hidden: bool = False,
        capture_router: bool = False,
        progress: Callable[[int, int], Any] | None = None,
    ) -> tuple[NDArray[np.float32], dict[str, Any]]: ...
    def reset(self) -> None: ...
