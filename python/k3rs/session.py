"""A session: one text, and everything that grows with it."""

import operator
import os
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

    def __init__(
        self,
        core: _k3rs.Session,
        vocabulary_size: int,
        *,
        pending: Sequence[int] = (),
        note: str = "",
    ) -> None:
        self._core = core
        self._vocabulary_size = vocabulary_size
        self._pending = list(pending)
        self._note = note

    @property
    def position(self) -> int:
        """How many ids the text has."""
        return self._core.position + len(self._pending)

    @property
    def ids(self) -> list[int]:
        """The text, ids that were appended but not computed yet included."""
        return self._core.ids + self._pending

    @property
    def pending(self) -> list[int]:
        """The ids at the end of the text that the next `forward` takes first."""
        return list(self._pending)

    @property
    def is_aborted(self) -> bool:
        """Whether a call was interrupted, after which only `reset` helps."""
        return self._core.is_aborted

    @property
    def note(self) -> str:
        """What was given to `save` with it; empty for a session that was not loaded."""
        return self._note

    def append(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Adds `ids` to the text; the next `forward` takes them before its own.

        Raises `InputError` for ids outside the vocabulary.
        """
        self._pending += checked_ids(ids, self._vocabulary_size)

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

        What was appended before is fed first; with empty `ids` it takes their place, and
        where nothing was appended either, the logits of the last call are given again.
        With `all_positions` the logits after every one of `ids`, [len(ids), vocab]. With
        `capture` the result is a pair of the logits and what was recorded:
        `hidden`, float32 [layers, len(ids), hidden], the residual stream after each
        layer; `router`, for each routed layer the expert ids and their weights,
        both [len(ids), experts per token].

        Raises `InputError` for ids outside the vocabulary, `SessionError` after an
        interrupted call, `NumericalFault` where the model produces NaN or infinity.
        Ctrl-C stops it within one layer.
        """
        wanted = _checked_captures(capture)
        if len(ids) == 0 and not self._pending and not wanted and not all_positions:
            known = self._core.last_logits()
            if known is not None:
                return known
        before, own = self._pending, self._pending
        if len(ids) > 0 or not before:
            own = checked_ids(ids, self._vocabulary_size)
        else:
            before = []
        logits, recorded = self._core.forward(
            before + own,
            all_positions=all_positions,
            capture_hidden="hidden" in wanted,
            capture_router="router" in wanted,
            progress=progress,
        )
        self._pending = []
        seen = cast(Captured, recorded)
        if before:
            if all_positions:
                logits = logits[len(before) :]
            _leave_out(seen, len(before))
        return (logits, seen) if wanted else logits

    def discard_pending(self) -> None:
        """Takes back the ids that were appended and not computed yet."""
        self._pending.clear()

    def save(self, file: str | os.PathLike[str], *, note: str = "") -> None:
        """Writes the text and all that the model remembers of it to `file`.

        One safetensors file: `ids`, int32 [position]; `logits`, float32 [vocab], after
        the last id that was computed ([0] where none was); for each layer of Kimi Delta
        Attention `layers.N.kda.state`, float32 [heads, key, value], and
        `layers.N.kda.conv_history`, float32 [heads, 3, taps - 1, width]; for each of
        latent attention `layers.N.mla.latent_cache`, float32 [ids computed, width].
        `Session.pending` ids stand at the end of `ids` only. The metadata name the
        model and the version of the arithmetic; a checksum covers the whole file.
        `note` is kept with it. The file is written beside its place and renamed, so
        that an earlier one survives a failure.

        Raises `SessionFileError` if the file cannot be written, `SessionError` after
        an interrupted call, `InputError` for a note that is not text.
        """
        try:
            note.encode()
        except UnicodeEncodeError:
            raise InputError(
                "expected a note of text, found half a surrogate pair in it",
                hint="text that was decoded wrongly cannot be stored",
            ) from None
        self._core.save(os.fspath(file), self._pending, note)

    def reset(self) -> None:
        """Forgets the text, and with it an interruption."""
        self._core.reset()
        self._pending.clear()
        self._note = ""


def _leave_out(seen: Captured, count: int) -> None:
    """Takes the first `count` ids out of what was recorded."""
    if "hidden" in seen:
        seen["hidden"] = seen["hidden"][:, count:]
    if "router" in seen:
        seen["router"] = [(ids[count:], weights[count:]) for ids, weights in seen["router"]]


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
