"""A reply while it is written: progress, dimmed reasoning, and the answer."""

import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from datetime import timedelta
from typing import TypeAlias

from k3rs.chat import Dialogue, Event, ToolCall
from k3rs.cli.console import Console, LayerProgress, printable
from k3rs.cli.gentle_interrupt import Terminated, gentle_interrupt
from k3rs.session import Progress

__all__ = ["ChatView", "Events"]

Events: TypeAlias = Generator[Event, None, None]
"""A reply while it is written."""


class ChatView:
    """Shows replies. Where nobody watches, the answers alone go to stdout."""

    def __init__(self, console: Console, layers: int, *, folded: bool) -> None:
        self._console = console
        self._layers = layers
        self._watched = console.is_live and sys.stdout is not None and sys.stdout.isatty()
        self.folded = folded
        """Whether reasoning is only counted, not shown."""
        self._section = ""

    def show(self, dialogue: Dialogue, ask: Callable[[Progress], Events]) -> None:
        """Shows the reply that `ask` begins, to its end.

        The first Ctrl-C breaks it off, after the token that is being computed if there is
        an answer already. `KeyboardInterrupt` is raised for the next one.
        """
        self._section = ""
        started = time.perf_counter()
        events: Events | None = None

        def break_off() -> None:
            if events is None:
                return
            if dialogue.reply_tokens == 0:
                raise KeyboardInterrupt
            dialogue.stop()
            progress.describe("last token (Ctrl-C again leaves)")

        with gentle_interrupt(break_off) as interrupt, self._console.layer_progress() as progress:
            progress.begin(self._layers, lambda: _cost(dialogue, started))
            with closing(ask(progress)) as events:
                if not interrupt.requested:
                    self._take_all(events, dialogue, progress)
            is_complete = not interrupt.requested
        self._report(dialogue, started, is_complete=is_complete)

    def show_reasoning(self, dialogue: Dialogue) -> None:
        """What the model thought before its last answer."""
        reasoning = dialogue.reply.reasoning if dialogue.reply else ""
        self._console.remark(printable(reasoning) or "(no reasoning)")

    def _take_all(self, events: Events, dialogue: Dialogue, progress: LayerProgress) -> None:
        try:
            for event in events:
                self._take(event, progress)
                progress.describe(self._activity(dialogue))
        except Terminated:
            raise
        except KeyboardInterrupt:
            if dialogue.reply_tokens:
                raise
        finally:
            if dialogue.reply_tokens:
                self._end_section(progress)

    def _take(self, event: Event, progress: LayerProgress) -> None:
        if isinstance(event, ToolCall):
            self._begin("call", progress)
            self._write(f"{event.name}({event.arguments})\n", progress)
            return
        self._begin(event.channel, progress)
        if event.channel == "content":
            self._write(event.text, progress)
        elif self._watched and not self.folded:
            self._write(event.text, progress, is_dim=True)

    def _begin(self, section: str, progress: LayerProgress) -> None:
        if section == self._section:
            return
        self._end_section(progress)
        self._section = section

    def _end_section(self, progress: LayerProgress) -> None:
        """One line end behind a section that was shown; how much was thought, if it was not."""
        section, self._section = self._section, ""
        if section == "content" or (section == "reasoning" and self._watched and not self.folded):
            self._write("\n", progress)
        elif section == "reasoning" and self._watched:
            self._write("(thought; /reasoning shows it)\n", progress, is_dim=True)

    def _write(self, text: str, progress: LayerProgress, *, is_dim: bool = False) -> None:
        if self._watched:
            progress.append(text, is_dim=is_dim)
        else:
            self._console.answer(text)

    def _activity(self, dialogue: Dialogue) -> str:
        words = "thinking" if self._section == "reasoning" else "answering"
        return f"{words}, token {dialogue.reply_tokens + 1}"

    def _report(self, dialogue: Dialogue, started: float, *, is_complete: bool) -> None:
        reply = dialogue.reply
        if dialogue.reply_tokens == 0:
            self._console.note("(broken off before the answer; the conversation is as it was)")
            return
        if not is_complete:
            self._console.note(
                "(broken off; what was said is kept: /undo takes it back, /retry answers again)"
            )
        elif reply is not None and reply.finish_reason == "length":
            self._console.note("(cut off: --max-tokens or the context is used up)")
        for note in () if reply is None else reply.notes:
            self._console.note(f"({note})")
        if self._watched:
            self._console.remark(f"({_cost(dialogue, started)})")


def _cost(dialogue: Dialogue, started: float) -> str:
    """Time, tokens, and how fast they came."""
    elapsed = max(time.perf_counter() - started, 1e-9)
    words = [str(timedelta(seconds=int(elapsed))), f"{dialogue.prompt_tokens} ids read"]
    if dialogue.reply_tokens:
        pace = dialogue.reply_tokens / max(elapsed - dialogue.prompt_seconds, 1e-9)
        shown = f"{pace:.2f} tokens/s" if pace >= 1 else f"{1 / pace:.2f} s/token"
        words += [f"{dialogue.reply_tokens} tokens", shown]
    return ", ".join(words)
