"""What is shown of a reply, and what Ctrl-C does to it, without a process and a terminal."""

import io
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scripted_sampler import Scripted

import k3rs
from k3rs import chat
from k3rs.cli.chat_view import ChatView
from k3rs.cli.console import Console


@pytest.fixture(scope="module")
def shipped() -> Iterator[k3rs.Model]:
    with k3rs.Model.open(k3rs.shipped_model(), memory="1GB", threads=1) as opened:
        yield opened


class Stub(io.StringIO):
    """A terminal in place of a stream, or what is none."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Pressing(Scripted):
    """Ctrl-C is pressed while the ids at `presses` are chosen, as often as they are there."""

    def __init__(self, ids: Sequence[int], presses: Sequence[int]) -> None:
        super().__init__(ids)
        self._presses = presses

    def pick(self, logits: NDArray[np.float32], **more: Any) -> int:
        for _ in range(self._presses.count(len(self.seen))):
            signal.raise_signal(signal.SIGINT)
        return super().pick(logits, **more)


class Screen:
    """What a view shows of a dialogue with the shipped model, without a process."""

    def __init__(
        self, model: k3rs.Model, directory: Path, monkeypatch: pytest.MonkeyPatch, *terminals: bool
    ) -> None:
        self.out, self.err = (Stub(terminal=each) for each in terminals)
        monkeypatch.setattr(sys, "stdout", self.out)
        monkeypatch.setattr(sys, "stderr", self.err)
        self.view = ChatView(Console(), 9, folded=False)
        self.dialogue = chat.Dialogue(model, thinking="off", cache_directory=directory)

    def show(self, sampler: k3rs.Sampler) -> None:
        self.view.show(
            self.dialogue,
            lambda progress: self.dialogue.ask("x", sampler=sampler, progress=progress),
        )


@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_terminal_is_given_no_control_characters(
    shipped: k3rs.Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watches: bool,
    thinks: bool,
) -> None:
    """Also where stderr goes elsewhere. What is piped is as the model wrote it."""
    assert shipped.tokenizer is not None
    written = "a\x1b[31m\rb\x07\x08\x7f\x9b1m\tc\nd\x00"
    shown = "a␛[31m␍b␇␈␡\ufffd1m\tc\nd␀"
    ids = [*shipped.tokenizer.encode(written), 2050]
    screen = Screen(shipped, tmp_path, monkeypatch, True, watches)
    if thinks:
        screen.dialogue.conversation.thinking = "low"
    screen.show(Scripted(ids))
    if watches or not thinks:
        assert shown in screen.out.getvalue()
    screen.view.show_reasoning(screen.dialogue)
    assert not thinks or shown in screen.err.getvalue()
    for forbidden in ("\x1b[31m", "\x07", "\x08", "\x7f", "\x9b"):
        assert forbidden not in screen.out.getvalue() + screen.err.getvalue()
    piped = Screen(shipped, tmp_path, monkeypatch, False, watches)
    piped.show(Scripted(ids))
    assert piped.out.getvalue() == f"{written}\n"


def test_the_first_ctrl_c_lets_the_token_end(
    shipped: k3rs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(shipped, tmp_path, monkeypatch, False, False)
    before = signal.getsignal(signal.SIGINT)
    screen.show(Pressing([97, 98, 99, 100], [2]))
    assert signal.getsignal(signal.SIGINT) is before
    assert screen.out.getvalue() == "abc\n"
    assert "(broken off; what was said is kept" in screen.err.getvalue()
    assert screen.dialogue.conversation.messages[-1]["content"] == "abc"
    assert screen.dialogue.reply is not None
    assert screen.dialogue.reply.content == "abc"


def test_ctrl_c_before_the_first_token_leaves_the_conversation(
    shipped: k3rs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(shipped, tmp_path, monkeypatch, False, False)
    screen.show(Pressing([97, 98], [0]))
    assert (screen.out.getvalue(), screen.dialogue.conversation.messages) == ("", [])
    assert "(broken off before the answer; the conversation is as it was)" in screen.err.getvalue()


def test_the_second_ctrl_c_leaves_and_what_was_said_is_kept(
    shipped: k3rs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(shipped, tmp_path, monkeypatch, False, False)
    with pytest.raises(KeyboardInterrupt):
        screen.show(Pressing([97, 98, 99], [2, 2]))
    assert screen.dialogue.conversation.messages[-1]["content"] == "ab"
