"""The one place that prints: the answer on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich import progress
from rich.console import Console as Terminal
from rich.console import ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

__all__ = ["Console", "LayerProgress", "print_error"]


def print_error(message: str, hint: str | None = None) -> None:
    """An error on stderr and, on a line of its own, what to do about it."""
    # Where stderr takes nothing, the exit status has to say it all.
    with suppress(OSError):
        _write(sys.stderr, f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))


class _Tail:
    """The end of a growing text, as much as the terminal has room for above a bar."""

    def __init__(self) -> None:
        self.text = ""

    def append(self, text: str) -> None:
        """More of the text."""
        self.text += text

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        lines = Text(self.text).wrap(console, options.max_width)
        yield from lines[-max(1, console.size.height - 2) :]


class LayerProgress:
    """Shows how far a sweep is and what the run has cost; nothing where nobody looks."""

    def __init__(self, bar: progress.Progress | None = None) -> None:
        self._bar = bar
        self._cost: Callable[[], str] | None = None
        self.tail: _Tail | None = None
        """The answer until now, if it is shown here and not written to stdout yet."""
        if bar is not None:
            self._task = bar.add_task("reading the prompt", total=None, cost="")

    def show_cost(self, cost: Callable[[], str]) -> None:
        """`cost` says in a few words what the run has cost until now."""
        self._cost = cost

    def __call__(self, layers_done: int, layers: int) -> None:
        """Called by the engine after each layer."""
        if self._bar is not None:
            cost = "" if self._cost is None else self._cost()
            self._bar.update(self._task, completed=layers_done, total=layers, cost=cost)

    def describe(self, text: str) -> None:
        """What is being computed."""
        if self._bar is not None:
            self._bar.update(self._task, description=text, completed=0)


class Console:
    """Decides what is shown, from how loud the user wants it and who is looking."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self._quiet = quiet
        self._verbose = verbose
        # A character that the terminal cannot show must not end the program.
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")

    @property
    def is_live(self) -> bool:
        """Whether somebody watches stderr."""
        return not self._quiet and _is_terminal(sys.stderr)

    def answer(self, text: str) -> None:
        """A piece of the answer, shown at once."""
        if text:
            _write(sys.stdout, text)

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Facts for a program: one JSON object."""
        _write(sys.stdout, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    def note(self, text: str) -> None:
        """A line for a person who did not ask for quiet."""
        if not self._quiet:
            _write(sys.stderr, text + "\n")

    def detail(self, text: str) -> None:
        """A line for a person who asked for more."""
        if self._verbose:
            _write(sys.stderr, text + "\n")

    @contextmanager
    def layer_progress(self) -> Iterator[LayerProgress]:
        """Progress of sweeps, if stderr is a terminal.

        Where the answer appears on the same terminal it grows above the bar, and is
        written to stdout at the end.
        """
        if not self.is_live:
            yield LayerProgress()
            return
        terminal = Terminal(file=sys.stderr)
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TextColumn("layers"),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[cost]}"),
            console=terminal,
        )
        shown = LayerProgress(bar)
        if not _is_terminal(sys.stdout):
            with Live(bar, console=terminal, transient=True, redirect_stdout=False):
                yield shown
            return
        shown.tail = _Tail()
        try:
            with Live(Group(shown.tail, bar), console=terminal, transient=True):
                yield shown
        finally:
            self.answer(shown.tail.text)

    @contextmanager
    def step_progress(self, description: str) -> Iterator[Callable[[int, int], None] | None]:
        """A callable for the steps done and the steps in all, if stderr is a terminal."""
        if not self.is_live:
            yield None
            return
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=Terminal(file=sys.stderr),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        task = bar.add_task(description, total=None)
        with bar:
            yield lambda done, steps: bar.update(task, completed=done, total=steps)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


def _write(stream: Any, text: str) -> None:
    if stream is not None:  # a process can be started without one
        stream.write(text)
        stream.flush()
