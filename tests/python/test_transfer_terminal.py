"""What a person at a terminal of 80 columns sees of `k3rs download` and `k3rs verify`."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_client import COMMIT, REPO, checkpoint
from hub_server import Fault, HubServer, Repository
from terminal import ERASED_LINE, drawn_lines, watch

LONG_NAME = "a directory/with a name that is too long to be shown whole [100%].safetensors"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    hub = HubServer()
    hub.repositories[REPO] = Repository({**checkpoint(), LONG_NAME: bytes(150_000)})
    yield hub
    hub.close()


def watch_transfer(hub: HubServer, place: Path, *arguments: str | Path) -> tuple[int, str]:
    """`watch` with `hub` as the only one that is known."""
    return watch(
        place,
        *arguments,
        HF_ENDPOINT=hub.url,
        HF_HOME=str(place),
        XDG_CACHE_HOME=str(place / "cache"),
        NO_PROXY="127.0.0.1",
    )


def test_a_download_shows_every_file_all_of_them_and_the_time_to_go(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.bytes_per_s = 200_000
    hub.faults[LONG_NAME] = [Fault(cut_after=100_000)]
    status, shown = watch_transfer(hub, tmp_path, "download", REPO, "model")
    assert status == 0, shown
    lines = drawn_lines(shown)
    # A full line would wrap at the ^C that a terminal echoes behind it.
    assert all(len(line) <= 76 for line in lines if "━" in line)
    # A name is cut at its beginning: its end tells shards apart.
    files = [r"model-00001-of-000005\.safetensors", re.escape("..." + LONG_NAME[-30:])]
    for name in (r"fetching, \d of 10 files done", *files):
        row = re.compile(name + r" +\S+ +\d+% [\d.]+ .B/s +0:00:0\d")
        assert any(row.fullmatch(line) for line in lines), name
    assert f"`{LONG_NAME}`: the connection broke; trying again in 0.25 s" in " ".join(lines)
    left = shown.rsplit(ERASED_LINE, 1)[1]
    assert drawn_lines(left)[0].startswith(f"{REPO} at {COMMIT[:12]}: 11 files, ")
    assert drawn_lines(left)[-1] == "next: k3rs plan model"


def test_a_check_shows_the_same_and_then_the_answer(hub: HubServer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name, size in (("a", 1 << 30), ("b", 10)):
        with (model / name).open("wb") as file:
            file.truncate(size)
    assert watch_transfer(hub, tmp_path, "verify", "model", "--write-manifest", "manifest")[0] == 0
    os.truncate(model / "b", 5)
    status, shown = watch_transfer(hub, tmp_path, "verify", "model", "--manifest", "manifest")
    assert status == 1
    lines = drawn_lines(shown)
    problem = "`b`: expected 10 bytes, found 5 bytes"
    assert f"problem: {problem}" in lines
    for name in ("checking, 0 of 1 files hashed", "a"):
        row = re.compile(name + r" +\S+ +\d+% [\d.]+ .B/s +0:\d\d:\d\d")
        assert any(row.fullmatch(line) for line in lines), name
    left = drawn_lines(shown.rsplit(ERASED_LINE, 1)[1])
    assert left[1:3] == ["to be fetched again:", f"  {problem}"]


def test_quiet_is_the_answer_alone(hub: HubServer, tmp_path: Path) -> None:
    status, shown = watch_transfer(
        hub, tmp_path, "download", REPO, "model", "--no-weights", "--quiet"
    )
    assert status == 0
    assert shown.startswith(f"{REPO} at {COMMIT[:12]}: 5 files, ")
    assert "\x1b" not in shown
