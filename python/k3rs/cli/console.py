"""The one place that prints: the answer on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rich import progress
from rich.console import Console as Terminal
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

__all__ = ["Console", "LayerProgress", "print_error", "printable"]

# A model may write escape sequences; a terminal would obey them.
_CONTROL_NAMES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_CONTROL_NAMES[0x7F] = 0x2421
_CONTROL_NAMES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """`text` with signs in the place of what a terminal would obey."""
    return text.translate(_CONTROL_NAMES)


_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"


def print_error(message: str, hint: str | None = None) -> None:
    """An error on stderr and, on a line of its own, what to do about it."""
    # Where stderr takes nothing, the exit status has to say it all.
    with suppress(OSError):
        text = f"error: {message}\n" + (f"hint: {hint}\n" if hint else "")
        _write(sys.stderr, printable(text) if _is_terminal(sys.stderr) else text)


class LayerProgress:
    """Shows how far a sweep is and what the run has cost; nothing where nobody looks.

    With `shows_answer` the end of the answer grows above, as much as there is room for.
    """

    def __init__(self, bar: progress.Progress | None = None, *, shows_answer: bool = False) -> None:
        self._bar = bar
        self._cost: Callable[[], str] | None = None
        self._cost_now = ""
        self.shows_answer = shows_answer
        """Whether the answer is shown here and not written to stdout yet."""
        self._pieces: list[tuple[str, str]] = []
        if bar is not None:
            self._task = bar.add_task("reading the prompt", total=None)

    def begin(self, layers: int, cost: Callable[[], str]) -> None:
        """`cost` says in a few words what the run has cost until now."""
        self._cost = cost
        self._update(completed=0, total=layers)

    def __call__(self, layers_done: int, layers: int) -> None:
        """Called by the engine while it works."""
        self._update(completed=layers_done, total=layers)

    def describe(self, text: str) -> None:
        """What is being computed from now on."""
        if self._bar is not None:
            # Otherwise the time to go would stay that of a task that was complete once.
            self._bar.reset(self._task)
        self._update(description=text)

    def _update(self, **changes: Any) -> None:
        if self._bar is not None:
            self._cost_now = "" if self._cost is None else self._cost()
            self._bar.update(self._task, **changes)

    def append(self, text: str, *, is_dim: bool = False) -> None:
        """More of the answer."""
        text = printable(text)
        style = "dim" if is_dim else ""
        if self._pieces and self._pieces[-1][1] == style:
            text = self._pieces.pop()[0] + text
        self._pieces.append((text, style))

    def answer(self) -> Iterator[str]:
        """What there is of it, for a terminal."""
        for text, style in self._pieces:
            yield f"{_DIM}{text}{_NOT_DIM}" if style else text

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        # A full last line would wrap at the ^C that a terminal echoes behind it, and
        # what is drawn over it afterwards would be a line off.
        options = options.update(width=max(1, options.max_width - 4))
        cost = list(Text(self._cost_now, style="dim").wrap(console, options.max_width))
        if self.shows_answer and self._pieces:
            lines = Text.assemble(*self._pieces).wrap(console, options.max_width)
            yield from lines[-max(1, console.size.height - 2 - len(cost)) :]
        if self._bar is not None:
            yield from console.render(self._bar, options)
        yield from cost


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
            _write(sys.stdout, printable(text) if _is_terminal(sys.stdout) else text)

    def facts(self, facts: Mapping[str, Any]) -> None:
        """Facts for a program: one JSON object."""
        _write(sys.stdout, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")

    def note(self, text: str) -> None:
        """A line for a person who did not ask for quiet."""
        if not self._quiet:
            _write(sys.stderr, text + "\n")

    def remark(self, text: str) -> None:
        """A note that can be overlooked."""
        self.note(f"{_DIM}{text}{_NOT_DIM}" if self.is_live else text)

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
            progress.TimeRemainingColumn(),
            console=terminal,
        )
        shown = LayerProgress(bar, shows_answer=_is_terminal(sys.stdout))
        try:
            with Live(shown, console=terminal, transient=True, redirect_stdout=False):
                yield shown
        finally:
            for piece in shown.answer():
                _write(sys.stdout, piece)

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
