"""Progress of work on many large files: bars on a terminal, else a line for every file."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console as Terminal
from rich.table import Column

from k3rs.cli.console import Console
from k3rs.hub.file_progress import FileProgress
from k3rs.sizes import format_size

__all__ = ["file_progress"]

_SHOWN_EVERY_S = 0.1
_FILE_NAME_WIDTH_MAX = 33
"""As long as the names of the released shards."""


@contextmanager
def file_progress(console: Console) -> Iterator[FileProgress]:
    """What shows the progress of the work inside of the block."""
    if not console.is_live:
        yield _FileLines(console)
        return
    bars = _bars()
    with bars:
        yield _FileBars(bars)


class _FileLines(FileProgress):
    """A line for every finished file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()

    def begin(self, doing: str, file_count: int, size_bytes: int, done_bytes: int) -> None:
        self._doing, self._file_count, self._finished = doing, file_count, 0
        self._sizes: dict[str, int] = {}
        files = "1 file" if file_count == 1 else f"{file_count:,} files"
        left = format_size(size_bytes - done_bytes)
        self._console.note(f"{doing} {files}: {left} of {format_size(size_bytes)}")

    def start(self, path: str, size_bytes: int, done_bytes: int) -> None:
        self._sizes[path] = size_bytes
        if done_bytes:
            self._console.note(f"continuing {path} from {format_size(done_bytes)} on")

    def finish(self, path: str) -> None:
        with self._lock:
            self._finished += 1
            count = f"{self._finished:,} of {self._file_count:,}"
            size = format_size(self._sizes[path])
            self._console.note(f"{self._doing}: {path} is done ({size}, {count})")

    def note(self, text: str) -> None:
        self._console.note(text)


class _FileBars(FileProgress):
    """A bar for every file at work, and one for all with the time to go."""

    def __init__(self, bars: progress.Progress) -> None:
        self._bars = bars
        self._lock = threading.Lock()
        self._total: progress.TaskID | None = None
        self._tasks: dict[str, progress.TaskID] = {}
        self._pending: Counter[progress.TaskID] = Counter()
        self._shown_at = 0.0

    def begin(self, doing: str, file_count: int, size_bytes: int, done_bytes: int) -> None:
        with self._lock:
            if self._total is not None:
                self._bars.remove_task(self._total)
            self._doing, self._file_count, self._finished = doing, file_count, 0
            self._total = self._bars.add_task(
                self._description(), total=size_bytes, completed=done_bytes
            )

    def start(self, path: str, size_bytes: int, done_bytes: int) -> None:
        with self._lock:
            name = path
            if len(name) > _FILE_NAME_WIDTH_MAX:
                name = f"...{path[3 - _FILE_NAME_WIDTH_MAX :]}"
            self._tasks[path] = self._bars.add_task(name, total=size_bytes, completed=done_bytes)

    def advance(self, path: str, count_bytes: int) -> None:
        with self._lock:
            for task in (self._tasks[path], self._total):
                if task is not None:
                    self._pending[task] += count_bytes
            # The estimate of the speed remembers a number of steps: they must not be tiny.
            if time.monotonic() - self._shown_at >= _SHOWN_EVERY_S:
                self._show()

    def finish(self, path: str) -> None:
        with self._lock:
            self._finished += 1
            self._remove(path)

    def abandon(self, path: str) -> None:
        with self._lock:
            self._remove(path)

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self) -> None:
        for task, count_bytes in self._pending.items():
            self._bars.advance(task, count_bytes)
        self._pending.clear()
        self._shown_at = time.monotonic()

    def _remove(self, path: str) -> None:
        self._show()
        self._bars.remove_task(self._tasks.pop(path))
        if self._total is not None:
            self._bars.update(self._total, description=self._description())

    def _description(self) -> str:
        return f"{self._doing}, {self._finished} of {self._file_count} files done"


def _bars() -> progress.Progress:
    # A full last line would wrap at the ^C that a terminal echoes behind it.
    width = max(20, Terminal(file=sys.stderr).width - 4)
    return progress.Progress(
        progress.TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        progress.BarColumn(bar_width=8),
        progress.TaskProgressColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Terminal(file=sys.stderr, width=width),
        expand=True,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
