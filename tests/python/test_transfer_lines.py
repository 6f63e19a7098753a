"""Progress of files where there is no room for bars, or nobody who could see them move."""

import os
import pty
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT_S, command_environment
from terminal import drawn_lines

from k3rs.cli.console import Console
from k3rs.cli.transfer_progress import file_progress

NAME = "model-00001-of-000096.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that takes a second to hash."""
    model = tmp_path / "model"
    model.mkdir()
    with (model / NAME).open("wb") as file:
        file.truncate(1 << 30)
    return model


def watch_check(model: Path, columns: int, term: str) -> list[str]:
    """The lines that a terminal was ever shown."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    process = subprocess.Popen(
        [sys.executable, "-m", "k3rs", "verify", "model", "--write-manifest", "m.json"],
        cwd=model.parent,
        env=command_environment(TERM=term, XDG_CACHE_HOME=str(model.parent / "cache")),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            written += os.read(ours, 1 << 16)
        except OSError:  # how a terminal says that nobody writes to it any more
            break
    os.close(ours)
    assert process.wait(TIME_LIMIT_S) == 0, written
    return drawn_lines(written.decode())


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        # The shard keeps its end, at which shards differ, and the share and the time stay.
        (40, rf"...{NAME[-20:]} D% T"),
        (52, f"{NAME} D% T"),
        (60, f"{NAME} B D% T"),
        (80, f"{NAME} B D% S T"),
    ],
)
def test_a_narrow_terminal_loses_the_speed_then_the_bar(
    model: Path, columns: int, row: str
) -> None:
    kinds = []
    for line in watch_check(model, columns, "xterm"):
        if "% " not in line:
            continue
        assert len(line) <= columns - 4
        name, *others = line.split()
        kinds.append(" ".join([name, *(_kind(part) for part in others if part[-3:] != "B/s")]))
        kinds[-1] = kinds[-1].replace("N T", "S T")
    assert row in kinds, kinds


def _kind(part: str) -> str:
    """Which column a part of a line is of."""
    if part.endswith("%"):
        return "D%"
    if ":" in part:
        return "T"
    return "N" if part[0].isdigit() else "B"


def test_a_dumb_terminal_gets_lines(model: Path) -> None:
    lines = watch_check(model, 80, "dumb")
    assert lines[0] == "checking 1 file: 1.07 GB of 1.07 GB"
    assert lines[1] == f"checking: {NAME} is hashed (1.07 GB, 1 of 1)"


def test_a_long_file_says_every_minute_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with file_progress(Console()) as progress:
        progress.begin("fetching", "done", 2, 2000, 0)
        progress.start("a", 1000, 0)
        for _ in range(25):
            now_s += 10
            progress.advance("a", 10)
        progress.finish("a")
        now_s += 50
        progress.advance("a", 10)
    assert capsys.readouterr().err.splitlines() == [
        "fetching 2 files: 2.00 kB of 2.00 kB",
        "fetching: a 6 %, all files 3 %, 0:32:20 to go",
        "fetching: a 12 %, all files 6 %, 0:31:20 to go",
        "fetching: a 18 %, all files 9 %, 0:30:20 to go",
        "fetching: a 24 %, all files 12 %, 0:29:20 to go",
        "fetching: a is done (1.00 kB, 1 of 2)",
    ]
