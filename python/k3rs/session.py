"""A session: one text, and everything that grows with it."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast, overload

import numpy as np
from numpy.typing import NDArray

from k3rs import _k3rs
from k3rs.exceptions import InputError

__all__ = ["Capture", "Captured", "Progress", "Routes", "Session", "checked_ids"]

Capture: TypeAlias = Literal["hidden", "router"]
"""What `Session.forward` can record."""

Progress: TypeAlias = Callable[[int, int], Any]
"""Called with the layers done and the layers in all, in the thread of the caller."""


Routes: TypeAlias = list[tuple[NDArray[np.int32], NDArray[np.float32]]]
"""For each routed layer expert ids and weights, both [ids, experts per token]."""


class Captured(TypedDict, total=False):
    """What `Session.forward` recorded on request."""

    hidden: NDArray[np.float32]
    router: Routes


_CAPTURES: Final = ("hidden", "router")


class Session:
    """One text being read and written by a model. Made by `Model.session`.

    The bits of its logits do not depend on how the ids were split into calls.
    A call that was interrupted leaves the session unusable until `reset`.
    """

    def __init__(self, core: _k3rs.Session, vocabulary_size: int) -> None:
        self._core = core
        self._vocabulary_size = vocabulary_size

    @property
    def position(self) -> int:
        """How many ids the session has taken."""
        return self._core.position

    @overload
    def forward(
        self,
        ids: Sequence[int] | NDArray[np.integer[Any]],
        *,
        all_positions: bool = False,
        progress: Progress | None = None,
    ) -> NDArray[np.float32]: ...

    @overload
    def forward(
        self,
        ids: Sequence[int] | NDArray[np.integer[Any]],
        *,
        all_positions: bool = False,
        capture: Sequence[Capture],
        progress: Progress | None = None,
    ) -> tuple[NDArray[np.float32], Captured]: ...

    def forward(
        self,
        ids: Sequence[int] | NDArray[np.integer[Any]],
        *,
        all_positions: bool = False,
        capture: Sequence[Capture] = (),
        progress: Progress | None = None,
    ) -> NDArray[np.float32] | tuple[NDArray[np.float32], Captured]:
        """Feeds `ids` and returns the logits after the last of them, float32 [vocab].

        With `all_positions` the logits after every id, [len(ids), vocab]. With
        `capture` the result is a pair of the logits and what was recorded:
        `hidden`, float32 [layers, len(ids), hidden], the residual stream after each
        layer; `router`, for each routed layer the expert ids and their weights,
        both [len(ids), experts per token].

        Raises `InputError` for ids outside the vocabulary, `SessionError` after an
        interrupted call, `NumericalFault` where the model produces NaN or infinity.
        Ctrl-C stops it within one layer.
        """
        wanted = _checked_captures(capture)
        logits, seen = self._core.forward(
            checked_ids(ids, self._vocabulary_size),
            all_positions=all_positions,
            capture_hidden="hidden" in wanted,
            capture_router="router" in wanted,
            progress=progress,
        )
        return (logits, cast(Captured, seen)) if wanted else logits

    def reset(self) -> None:
        """Forgets the text, and with it an interruption."""
        self._core.reset()


def checked_ids(ids: Sequence[int] | NDArray[np.integer[Any]], vocabulary_size: int) -> list[int]:
    """`ids` as plain integers, each of them in the vocabulary; at least one."""
    hint = f"ids are whole numbers from 0 to {vocabulary_size - 1}"
    if len(ids) == 0:
        raise InputError("expected at least one token id, found an empty list", hint=hint)
    checked: list[int] = []
    for index, value in enumerate(ids):
        try:
            token_id = operator.index(value)
        except TypeError:
            raise InputError(
                f"ids[{index}]: expected a whole number, found {value!r}", hint=hint
            ) from None
        if not 0 <= token_id < vocabulary_size:
            raise InputError(
                f"ids[{index}]: expected an id of the vocabulary of {vocabulary_size}, "
                f"found {token_id}",
                hint=hint,
            )
        checked.append(token_id)
    return checked


def _checked_captures(capture: Sequence[str]) -> frozenset[str]:
    names = (capture,) if isinstance(capture, str) else capture
    unknown = [name for name in names if name not in _CAPTURES]
    if unknown:
        raise InputError(
            f"expected captures from {', '.join(_CAPTURES)}, found {unknown[0]!r}",
            hint='write for example capture=("hidden", "router")',
        )
    return frozenset(names)
