"""Ctrl-C that waits for the end of a token, so that the text can go on from there."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["GentleInterrupt", "Terminated", "ended_by_signals", "gentle_interrupt"]


# Ignored, or handled by something that is not Python.
_LEFT_ALONE = (signal.SIG_IGN, None)


class Terminated(KeyboardInterrupt):
    """The terminal was closed, or somebody asked the process to end."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGHUP and SIGTERM raise `Terminated`, so that what was said can be kept.

    Those that are ignored stay so.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    before = {number: old for number, old in handlers.items() if old not in _LEFT_ALONE}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class GentleInterrupt:
    """Whether somebody has asked for an end."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def gentle_interrupt(on_request: Callable[[], None]) -> Iterator[GentleInterrupt]:
    """The first Ctrl-C only sets `requested` and calls `on_request`; the next interrupts.

    An interruption in the middle of a token leaves a session that cannot go on.
    Where Ctrl-C is ignored, it stays so.
    """
    interrupt = GentleInterrupt()
    before = signal.getsignal(signal.SIGINT)
    if before in _LEFT_ALONE:
        yield interrupt
        return

    def ask(_number: int, _frame: FrameType | None) -> None:
        interrupt.requested = True
        signal.signal(signal.SIGINT, before)
        on_request()

    signal.signal(signal.SIGINT, ask)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
