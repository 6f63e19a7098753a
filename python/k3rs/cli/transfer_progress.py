"""Progress of work on many large files: bars on a terminal, else a line for every file."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich import progress
from rich.console import Console as Terminal
from rich.table import Column

from k3rs.cli.console import Console
from k3rs.hub.file_progress import FileProgress
from k3rs.sizes import format_size

__all__ = ["counted_files", "file_progress"]

_SHOWN_EVERY_S = 0.1
_SAID_EVERY_S = 60.0
_FILE_NAME_WIDTH_MAX = 33
"""As long as the names of the released shards."""
_WIDTH_MIN = 20
_COLUMN_WIDTHS: dict[type[progress.ProgressColumn], int] = {
    progress.BarColumn: 9,
    progress.TaskProgressColumn: 5,
    progress.TransferSpeedColumn: 11,
    progress.TimeRemainingColumn: 8,
}
"""How many characters each takes, with the space in front of it."""


def counted_files(count: int) -> str:
    """How many files, in words."""
    return "1 file" if count == 1 else f"{count:,} files"


@contextmanager
def file_progress(console: Console) -> Iterator[FileProgress]:
    """What shows the progress of the work inside of the block."""
    if not console.is_live or Terminal(file=sys.stderr).is_dumb_terminal:
        yield _FileLines(console)
        return
    # A full last line would wrap at the ^C that a terminal echoes behind it.
    width = max(_WIDTH_MIN, Terminal(file=sys.stderr).width - 4)
    columns = _columns(width)
    room = width - sum(_COLUMN_WIDTHS[type(column)] for column in columns)
    bars = _bars(width, columns)
    with bars:
        yield _FileBars(bars, min(room, _FILE_NAME_WIDTH_MAX))


class _FileLines(FileProgress):
    """A line for every finished file, and one a minute for those that take longer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()

    def begin(
        self, doing: str, done: str, file_count: int, size_bytes: int, done_bytes: int
    ) -> None:
        self._doing, self._done, self._file_count, self._finished = doing, done, file_count, 0
        self._sizes: dict[str, int] = {}
        self._done_of: dict[str, int] = {}
        self._size_bytes, self._begun_bytes, self._done_bytes = size_bytes, done_bytes, done_bytes
        self._begun_at = self._said_at = time.monotonic()
        left = format_size(size_bytes - done_bytes)
        size = format_size(size_bytes)
        self._console.note(f"{doing} {counted_files(file_count)}: {left} of {size}")

    def start(self, path: str, size_bytes: int, done_bytes: int) -> None:
        self._sizes[path], self._done_of[path] = size_bytes, done_bytes
        if done_bytes:
            self._console.note(f"continuing {path} from {format_size(done_bytes)} on")

    def advance(self, path: str, count_bytes: int) -> None:
        with self._lock:
            self._done_bytes += count_bytes
            self._done_of[path] += count_bytes
            now = time.monotonic()
            if now - self._said_at < _SAID_EVERY_S:
                return
            self._said_at = now
            file = _percent(self._done_of[path], self._sizes[path])
            files = _percent(self._done_bytes, self._size_bytes)
            gained = self._done_bytes - self._begun_bytes
            to_go = ""
            if gained > 0:
                left_s = (now - self._begun_at) * (self._size_bytes - self._done_bytes) / gained
                to_go = f", {timedelta(seconds=round(left_s))} to go"
            self._console.note(f"{self._doing}: {path} {file}, all files {files}{to_go}")

    def finish(self, path: str) -> None:
        with self._lock:
            self._said_at = time.monotonic()
            self._finished += 1
            count = f"{self._finished:,} of {self._file_count:,}"
            size = format_size(self._sizes[path])
            self._console.note(f"{self._doing}: {path} is {self._done} ({size}, {count})")

    def note(self, text: str) -> None:
        self._console.note(text)


def _percent(part_bytes: int, size_bytes: int) -> str:
    return f"{100 * part_bytes // max(1, size_bytes)} %"


class _FileBars(FileProgress):
    """A bar for every file at work, and one for all with the time to go."""

    def __init__(self, bars: progress.Progress, name_width: int) -> None:
        self._bars = bars
        self._name_width = name_width
        self._lock = threading.Lock()
        self._total: progress.TaskID | None = None
        self._tasks: dict[str, progress.TaskID] = {}
        self._pending: Counter[progress.TaskID] = Counter()
        self._shown_at = 0.0

    def begin(
        self, doing: str, done: str, file_count: int, size_bytes: int, done_bytes: int
    ) -> None:
        with self._lock:
            if self._total is not None:
                self._bars.remove_task(self._total)
            self._doing, self._done, self._file_count, self._finished = doing, done, file_count, 0
            self._total = self._bars.add_task(
                self._description(), total=size_bytes, completed=done_bytes
            )

    def start(self, path: str, size_bytes: int, done_bytes: int) -> None:
        with self._lock:
            name = path
            if len(name) > self._name_width:
                name = f"...{path[3 - self._name_width :]}"
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
        return f"{self._doing}, {self._finished} of {self._file_count} files {self._done}"


def _columns(width: int) -> list[progress.ProgressColumn]:
    """What there is room for behind the names: first the speed has to go, then the bar."""
    columns: list[progress.ProgressColumn] = [
        progress.BarColumn(bar_width=8),
        progress.TaskProgressColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    ]
    for expendable in (progress.TransferSpeedColumn, progress.BarColumn):
        if width - sum(_COLUMN_WIDTHS[type(column)] for column in columns) < _FILE_NAME_WIDTH_MAX:
            columns = [column for column in columns if not isinstance(column, expendable)]
    return columns


def _bars(width: int, columns: list[progress.ProgressColumn]) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        ),
        *columns,
        console=Terminal(file=sys.stderr, width=width),
        expand=True,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
