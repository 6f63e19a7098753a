"""What a person at a terminal sees of `k3rs generate`."""

import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import TIME_LIMIT_S, RunK3rs, command_environment

ERASED_LINE = "\x1b[2K"

Watch = Callable[..., str]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    """Runs the command at a terminal of 80 columns and returns all that it wrote there."""

    def run(*arguments: str | Path) -> str:
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        process = subprocess.Popen(
            [sys.executable, "-m", "k3rs", *map(str, arguments)],
            cwd=tmp_path,
            env=command_environment(TERM="xterm"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        written = b""
        while piece := _read(ours):
            written += piece
        os.close(ours)
        assert process.wait(TIME_LIMIT_S) == 0
        return written.decode().replace("\r\n", "\n")

    return run


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""


def test_progress_is_shown_and_then_replaced_by_the_answer_and_a_report(
    watch: Watch, run_k3rs: RunK3rs, model_path: Path
) -> None:
    arguments = ["generate", model_path, "--ids", "3,4,5,6,7", "-n", "500"]
    answer = run_k3rs(*arguments).stdout
    shown = watch(*arguments)
    words = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).split())
    assert re.search(r"token \d+ \S+ \d/\d layers 0:00:0\d, read [\d.]+ .B", words)
    assert re.search(r"\d+% of experts cached, [\d.]+ tokens/s, 0:00:0\d to go", words)
    live, left = shown.rsplit(ERASED_LINE, 1)
    assert answer not in live
    report = left.split(answer, 1)[1].splitlines()
    assert [line.split()[0] for line in report if line] == ["prompt", "found", "read"]
    assert all(len(line) <= 80 for line in report)
    assert "500 tokens (length)" in report[0]


def test_quiet_is_the_answer_alone(watch: Watch, run_k3rs: RunK3rs, model_path: Path) -> None:
    arguments = ["generate", model_path, "--ids", "3,4,5", "-n", "3", "--quiet"]
    assert watch(*arguments) == run_k3rs(*arguments).stdout
