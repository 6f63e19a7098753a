"""Threads that work through a list and can be left behind."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

__all__ = ["for_each"]

Item = TypeVar("Item")

_ATTENTIVE_S = 0.05
"""How often Ctrl-C is looked for: its signal may reach another thread, which does not wake this."""

_FAREWELL_S = 0.3
"""How long the threads have to notice that they should stop."""


def for_each(
    items: Sequence[Item], work: Callable[[Item], None], thread_count: int, stop: threading.Event
) -> None:
    """Calls `work` with every item, in their order, on up to `thread_count` threads.

    The first exception of `work`, and Ctrl-C, end it all and are raised here. `stop` is set at
    the end in any case, and `work` has to watch it; a thread that is stuck in a call then is
    left behind and ends with the process.
    """
    waiting: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def serve() -> None:
        outcome: BaseException | None = None
        try:
            while not (stop.is_set() or waiting.empty()):
                with suppress(queue.Empty):  # another thread was faster
                    item = waiting.get_nowait()
                    work(item)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome = error
        ended.put(outcome)

    threads = [
        threading.Thread(target=serve, daemon=True) for _ in range(min(thread_count, len(items)))
    ]
    for thread in threads:
        thread.start()
    try:
        outcome = next(filter(None, (_next(ended) for _ in threads)), None)
    finally:
        stop.set()
        farewell_at = time.monotonic() + _FAREWELL_S
        for thread in threads:
            thread.join(max(0.0, farewell_at - time.monotonic()))
    if outcome is not None:
        raise outcome


def _next(ended: queue.SimpleQueue[BaseException | None]) -> BaseException | None:
    while True:
        with suppress(queue.Empty):
            return ended.get(timeout=_ATTENTIVE_S)
