"""The one place that prints: the answer on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich import progress
from rich.console import Console as Terminal

__all__ = ["Console", "LayerProgress", "print_error"]


def print_error(message: str, hint: str | None = None) -> None:
    """An error on stderr and, on a line of its own, what to do about it."""
    # Where stderr takes nothing, the exit status has to say it all.
    with suppress(OSError):
        _write(sys.stderr, f"error: {message}\n" + (f"hint: {hint}\n" if hint else ""))


class LayerProgress:
    """Shows how far a sweep over the layers is; does nothing where nobody looks."""

    def __init__(self, bar: progress.Progress | None = None) -> None:
        self._bar = bar
        if bar is not None:
            self._task = bar.add_task("reading the prompt", total=None)

    def __call__(self, layers_done: int, layers: int) -> None:
        """Called by the engine after each layer."""
        if self._bar is not None:
            self._bar.update(self._task, completed=layers_done, total=layers)

    def describe(self, text: str) -> None:
        """What is being computed."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)

    def stop(self) -> None:
        """Removes the bar, to make room for text on the same terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


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
    def shares_terminal(self) -> bool:
        """Whether the answer appears where a progress bar would be drawn."""
        return _is_terminal(sys.stdout) and _is_terminal(sys.stderr)

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
        """A progress bar for sweeps, if stderr is a terminal."""
        if self._quiet or not _is_terminal(sys.stderr):
            yield LayerProgress()
            return
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("layers"),
            progress.TimeElapsedColumn(),
            console=Terminal(file=sys.stderr),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with bar:
            yield LayerProgress(bar)

    @contextmanager
    def step_progress(self, description: str) -> Iterator[Callable[[int, int], None] | None]:
        """A callable for the steps done and the steps in all, if stderr is a terminal."""
        if self._quiet or not _is_terminal(sys.stderr):
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
