"""What a person types in a chat: messages of one or several lines."""

import io
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from k3rs.user_directories import state_directory

__all__ = ["FENCE", "ChatInput", "chat_input", "unfenced"]

FENCE = '"""'
"""A message that begins with it goes on over lines until it comes again."""


class ChatInput(Protocol):
    """Where messages come from."""

    def read(self) -> str | None:
        """The next message as it was typed; `None` at the end. Raises `KeyboardInterrupt`."""


def chat_input(commands: Iterable[str]) -> ChatInput:
    """A line editor at a terminal, which completes `commands`; plain lines from elsewhere."""
    if all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)):
        return _Editor(commands)
    return _Lines()


class _Editor:
    """Editing, history, completion, and messages of several lines."""

    def __init__(self, commands: Iterable[str]) -> None:
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            if _is_open(buffer.text):
                buffer.insert_text("\n")
            else:
                buffer.validate_and_handle()

        @keys.add("escape", "enter")
        @keys.add("c-j")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            FormattedText([("bold ansigreen", "> ")]),
            history=_history(),
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            key_bindings=keys,
            multiline=True,
            prompt_continuation="  ",
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt()
        except EOFError:
            return None


class _Lines:
    """One line a message, or all lines between two fences."""

    def __init__(self) -> None:
        # A message that is no text is refused as one, and ends nothing.
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")

    def read(self) -> str | None:
        text = ""
        for line in sys.stdin or ():
            text += line
            if not _is_open(text):
                break
        return text.removesuffix("\n") if text else None


def _is_open(text: str) -> bool:
    """Whether a fence was begun and not ended."""
    stripped = text.strip()
    return stripped.startswith(FENCE) and (
        len(stripped) < 2 * len(FENCE) or not stripped.endswith(FENCE)
    )


def unfenced(text: str) -> str | None:
    """What stands between the fences of `text`; `None` if it has none."""
    stripped = text.strip()
    if not stripped.startswith(FENCE):
        return None
    return stripped.removeprefix(FENCE).removesuffix(FENCE).strip("\n")


class _History(FileHistory):
    """A history that a full disk only shortens."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def _history() -> History:
    """Kept in the user's state directory, if that works."""
    try:
        file = state_directory() / "chat_history"
        file.parent.mkdir(parents=True, exist_ok=True)
        # What was typed is nobody else's business.
        file.touch(mode=0o600)
        return _History(file)
    except OSError:
        return InMemoryHistory()
