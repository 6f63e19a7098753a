"""Expert requests of a run: read, written, and replayed against caches of other sizes.

The file that `k3rs generate --trace` writes is ASCII text. Its first line is
`k3rs-trace 1`; each further line is one token in one layer with experts, in order:
the token counted from 0, the layer, and the experts that it was routed to, separated
by single spaces.

A file whose name ends in `.u16` has pairs of little-endian 16-bit numbers instead, a
layer and one of its experts; a new token starts where the layer number falls.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k3rs import _k3rs
from k3rs.exceptions import InputError, TraceError

__all__ = ["FIRST_LINE", "Trace", "read_trace", "replay"]

FIRST_LINE: Final = b"k3rs-trace 1"

_VISIT: Final = re.compile(rb"[0-9]{1,9}(?: [0-9]{1,9}){2,}")
_PAIR_BYTES: Final = 4
_SHOWN_BYTES: Final = 40
_SLOTS_MAX: Final = 10**12
_DEFAULT_SHARES: Final = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
"""Default cache sizes, in requests of a token."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests for experts in the order in which they were made."""

    path: Path
    requests: NDArray[np.uint32]
    """Token, layer and expert, [n, 3]; at least one row."""

    @property
    def tokens(self) -> int:
        """How many tokens made them."""
        return int(self.requests[-1, 0]) + 1


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The requests in the file `path`, in the format that its name stands for.

    Raises `TraceError` for a file that is not of the format, `OSError` for one that
    cannot be read.
    """
    path = Path(path)
    data = path.read_bytes()
    requests = _from_pairs(path, data) if path.suffix == ".u16" else _from_text(path, data)
    if len(requests) == 0:
        raise TraceError(
            f"{path}: expected requests for experts, found none",
            hint="a model without experts leaves no trace to replay",
        )
    return Trace(path, requests)


def replay(trace: Trace, slots: Sequence[int] | None = None, *, skip: int = 0) -> dict[str, Any]:
    """Hit rates of caches of `slots` experts that are empty before the first token.

    The first `skip` tokens fill the cache and are not counted. The policies are `lru`,
    `belady` (the optimum, which knows the future) and `default`, that of the engine.
    Without `slots`: from an eighth to four times the experts of a token.

    Raises `TraceError` where tokens or layers are out of order or an expert repeats.
    """
    if slots is None:
        width = len(trace.requests) / trace.tokens
        slots = sorted({max(1, round(share * width)) for share in _DEFAULT_SHARES})
    if not slots or min(slots) < 1 or max(slots) > _SLOTS_MAX:
        raise InputError(
            f"expected cache sizes of at least 1 slot and at most {_SLOTS_MAX:,}, "
            f"found {list(slots)}",
            hint="leave them out for the default",
        )
    if not 0 <= skip < trace.tokens:
        raise InputError(
            f"expected to skip fewer than the {trace.tokens} tokens of the trace, found {skip}",
            hint="at least one token has to be counted",
        )
    try:
        results = _k3rs.replay_trace(trace.requests, slots, skip)
    except InputError as error:
        raise TraceError(f"{trace.path}: {error}", error.hint) from None
    counted = int(np.count_nonzero(trace.requests[:, 0] >= skip))
    return {
        "tokens": trace.tokens,
        "requests": len(trace.requests),
        "counted_tokens": trace.tokens - skip,
        "counted_requests": counted,
        "results": [
            {"slots": size, "policy": policy, "hit_rate": hits / counted}
            for size, policy, hits in results
        ],
    }


def _from_pairs(path: Path, data: bytes) -> NDArray[np.uint32]:
    if len(data) % _PAIR_BYTES:
        raise TraceError(
            f"{path}: expected pairs of 16-bit numbers, so a multiple of {_PAIR_BYTES} bytes, "
            f"found {len(data)} bytes",
            hint="the file is cut off, or of another format",
        )
    pairs = np.frombuffer(data, "<u2").reshape(-1, 2).astype(np.uint32)
    falls = np.diff(pairs[:, 0].astype(np.int64), prepend=0) < 0
    return np.column_stack([np.cumsum(falls, dtype=np.uint32), pairs])


def _from_text(path: Path, data: bytes) -> NDArray[np.uint32]:
    lines = data.split(b"\n")
    if lines[0] != FIRST_LINE or len(lines) == 1:
        raise TraceError(
            f"{path}: expected the first line `{FIRST_LINE.decode()}`, found {_shown(lines[0])}",
            hint="give a file that --trace wrote, or one of 16-bit pairs with the ending .u16",
        )
    if lines[-1]:
        raise TraceError(
            f"{path}, line {len(lines)}: expected a line end, found the end of the file",
            hint="the file is cut off",
        )
    requests: list[tuple[int, int, int]] = []
    for number, line in enumerate(lines[1:-1], start=2):
        if _VISIT.fullmatch(line) is None:
            raise TraceError(
                f"{path}, line {number}: expected token, layer and experts in decimal, "
                f"found {_shown(line)}",
                hint="the file is damaged; make it again with --trace",
            )
        token, layer, *experts = map(int, line.split(b" "))
        requests += [(token, layer, expert) for expert in experts]
    return np.array(requests, dtype=np.uint32).reshape(-1, 3)


def _shown(line: bytes) -> str:
    """The start of `line`, safe to print."""
    text = line[:_SHOWN_BYTES].decode("ascii", errors="backslashreplace")
    return repr(text) + ("..." if len(line) > _SHOWN_BYTES else "")
