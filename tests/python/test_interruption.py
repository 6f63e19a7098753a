"""Ctrl-C: noticed within a moment, and what was cut off cannot be mistaken for a text."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from harness import TIME_LIMIT_S, Prompt, command_environment, interrupt_generation, joined

import k3rs
from k3rs.exceptions import SessionError

# Tokens that take far longer than the test.
LONG_TEXT = [1] * 100_000
NOTICED_WITHIN_S = 3.0


def interrupted(session: k3rs.Session) -> float:
    """Reads a long text until Ctrl-C; the seconds between it and the exception."""
    sent_at: list[float] = []

    def interrupt() -> None:
        sent_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.1, interrupt)

    def begin(_done: int, _total: int) -> None:
        if timer.ident is None:
            timer.start()

    with pytest.raises(KeyboardInterrupt):
        session.forward(LONG_TEXT, progress=begin)
    noticed_at = time.monotonic()
    timer.join()
    return noticed_at - sent_at[0]


def test_a_long_call_stops(model: k3rs.Model) -> None:
    session = model.session()
    assert interrupted(session) < NOTICED_WITHIN_S
    with pytest.raises(SessionError) as refused:
        session.forward([1])
    assert refused.value.hint == "reset the session or open a new one"
    expected = model.session().forward([1, 2])
    session.reset()
    assert np.array_equal(session.forward([1, 2]), expected)


def test_generation_from_an_interrupted_session_cannot_go_on(model: k3rs.Model) -> None:
    session = model.session()
    tokens = model.generate([1], max_tokens=8, session=session)
    next(tokens)
    interrupted(session)
    with pytest.raises(SessionError):
        next(tokens)


def test_the_command_stops_in_the_middle_of_a_prompt(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("the fox " * 50_000, encoding="utf-8")
    process = subprocess.Popen(
        [
            sys.executable, "-m", "k3rs", "generate", str(model_path),
            "--prompt-file", "prompt.txt", "--verbose",
        ],
        cwd=tmp_path,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    # Said when the model is open and nothing is left but to read the prompt.
    while b"experts are cached" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.2)
    sent_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIME_LIMIT_S)
    assert time.monotonic() - sent_at < NOTICED_WITHIN_S
    assert (process.returncode, stdout) == (130, b"")
    assert stderr.endswith(b"error: interrupted\n")
    assert b"Traceback" not in stderr


def test_the_command_prints_what_was_generated(
    without_tokenizer: Path, tmp_path: Path, prompts: list[Prompt]
) -> None:
    ids = joined(prompts[0].ids)
    done = interrupt_generation(tmp_path, without_tokenizer, "--ids", ids, "-n", "1000000")
    assert done.status == 130
    assert done.stderr.endswith("error: interrupted\n")
    # Whole ids with commas between them, and a line end.
    answer = done.stdout
    assert answer.endswith("\n")
    printed = [int(word) for word in answer.strip().split(",")]
    known = prompts[0].greedy
    assert printed[: len(known)] == known[: len(printed)]
