"""What a command writes to the terminal of a person."""

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

from harness import TIME_LIMIT_S, command_environment

ERASED_LINE = "\x1b[2K"


def watch(place: Path, *arguments: str | Path, **extra: str) -> tuple[int, str]:
    """The status of `k3rs` run in `place`, and all that it wrote to a terminal of 80 columns.

    `extra` goes into its environment.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "k3rs", *map(str, arguments)],
        cwd=place,
        env=command_environment(TERM="xterm", **extra),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    while piece := _read(ours):
        written += piece
    os.close(ours)
    return process.wait(TIME_LIMIT_S), written.decode().replace("\r\n", "\n")


def drawn_lines(shown: str) -> list[str]:
    """All lines that were ever drawn, without colours and movements."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""
