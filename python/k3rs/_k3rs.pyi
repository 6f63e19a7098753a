"""The Rust core, as Python sees it. Private: use `k3rs` itself."""

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Engine",
    "Session",
    "__version__",
    "available_backends",
    "bench",
    "hash_file",
    "inspect",
    "measure_device",
    "memory_read_gb_s",
    "pack_trunk",
    "plan",
    "read_session_label",
    "replay_trace",
    "synthesize",
    "verify_trunk",
    "write_probe_file",
]

__version__: str

def available_backends() -> list[str]:
    """Instruction sets that this CPU can run, best first; `scalar` is always there."""

def bench(*, threads: int | None = None, backend: str = "auto", quick: bool = False) -> str:
    """Limits of the machine and the kernels beside them as JSON text."""

def memory_read_gb_s() -> float:
    """Bytes read from memory in a second with all cores, in units of 10^9."""

def measure_device(paths: Sequence[str], seconds: float) -> str:
    """What the device below existing files delivers, as JSON text; `seconds` a kind of read."""

def write_probe_file(path: str, size_bytes: int) -> None:
    """Writes random bytes to a new file, to measure a device by."""

def hash_file(path: str, algorithm: str, advanced: Callable[[int], bool]) -> str | None:
    """The hexadecimal `sha256` or `git_sha1` of a file, or `None` once `advanced` returns false.

    `advanced` is told how many more bytes were hashed. Blocks of 4 MiB, eight of them read ahead.
    Raises `k3rs.exceptions.ReadError`.
    """

def inspect(path: str) -> str:
    """Facts about a checkpoint directory, complete or not, as JSON text."""

def plan(
    path: str,
    *,
    memory_bytes: int | None = None,
    trunk_bytes: int | None = None,
    cache_bytes: int | None = None,
    positions: int = 4096,
    prefill_chunk: int | None = None,
    threads: int | None = None,
    layers: int | None = None,
) -> str:
    """The memory plan as JSON text, without loading anything."""

def synthesize(
    directory: str,
    *,
    config: str | None = None,
    layers: int | None = None,
    experts: int | None = None,
    vocabulary: int | None = None,
    sparse: bool = False,
    seed: int = 0,
    progress: Callable[[int, int], Any] | None = None,
) -> str:
    """Writes a synthetic checkpoint; facts about it as JSON text."""

def pack_trunk(
    model: str, directory: str, *, progress: Callable[[int, int], Any] | None = None
) -> str:
    """Writes the trunk of a checkpoint into `directory`; facts about it as JSON text."""

def verify_trunk(
    model: str, directory: str, *, progress: Callable[[int, int], Any] | None = None
) -> None:
    """Compares a packed trunk with its model and its checksums."""

def read_session_label(path: str) -> str:
    """JSON of a saved session's `fingerprint`, `positions`, `ids` (both counts) and `note`."""

def replay_trace(
    requests: NDArray[np.uint32], slots: Sequence[int], first_counted: int
) -> list[tuple[int, str, int]]:
    """Cache size, policy and hits; `requests` is token, layer, expert, [n, 3]."""

@final
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
        trunk: str | None = None,
        layers: int | None = None,
    ) -> Engine: ...
    def session(self) -> Session: ...
    def load_session(self, path: str) -> tuple[Session, list[int], str]:
        """The saved session, the ids that it has not taken yet, and its note."""
    def describe(self) -> str:
        """JSON: `model`, `config`, `unknown_config_keys`, `options`, `plan`."""
    def report(self) -> str:
        """JSON: `io`, `experts`, `memory` counted since open."""

@final
class Session:
    """One text: everything that grows with it."""

    @property
    def position(self) -> int: ...
    @property
    def ids(self) -> list[int]: ...
    @property
    def is_aborted(self) -> bool: ...
    def last_logits(self) -> NDArray[np.float32] | None: ...
    def save(self, path: str, pending: Sequence[int], note: str) -> None: ...
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
