"""What a check remembers, for how long, and what a change in the meantime does to it."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from forking_runner import ForkingRunner
from hub_client import (
    MANIFEST,
    REPO,
    Client,
    Verifier,
    assert_found,
    assert_refused,
    flip,
    layer_shard,
)
from hub_server import HubServer

from k3rs.hub.file_progress import FileProgress
from k3rs.hub.verification import verify, write_manifest

SHARD = layer_shard(1)
SMALL = {f"small {n}": bytes([n]) * 1000 for n in range(5)}
SMALL_BYTES = 5000
LARGE = "large"
LARGE_BYTES = 1 << 30
ZEROS = "49bc20df15e412a64472421e13fe86ff1c5165e18b2afccf160d4dc19fe68a14"
"""The SHA-256 of so many zeros."""


def make_large(path: Path) -> None:
    """A hole that takes a while to read."""
    with path.open("wb") as file:
        file.truncate(LARGE_BYTES)


@pytest.fixture
def verifier(hub_services: tuple[HubServer, ForkingRunner], tmp_path: Path) -> Verifier:
    """One with small files, a large one, and a manifest of them."""
    verifier = Verifier(hub_services[1], tmp_path)
    verifier.fill(SMALL)
    assert verifier.run("--write-manifest", verifier.model / MANIFEST).status == 0
    add_large(verifier.model)
    return verifier


def add_large(directory: Path) -> None:
    """A large file in the directory and in its manifest."""
    make_large(directory / LARGE)
    manifest = directory / MANIFEST
    document = json.loads(manifest.read_bytes())
    document["files"].append({"path": LARGE, "bytes": LARGE_BYTES, "sha256": ZEROS})
    manifest.write_text(json.dumps(document))


@pytest.fixture
def interrupted(verifier: Verifier) -> Verifier:
    """One whose check was interrupted when all but the large file were hashed."""
    running = verifier.start()
    running.wait_until_it_says(", 5 of 6)")
    running.send(signal.SIGINT)
    done = running.wait()
    assert done.status == 130
    assert "files that were hashed to their end are remembered" in done.stderr
    return verifier


def age(verifier: Verifier, seconds: float) -> None:
    """Makes what is remembered as old as that."""
    (record,) = verifier.cache.rglob("verify-*.json")
    document: dict[str, Any] = json.loads(record.read_bytes())
    for entry in document["files"].values():
        entry[-2] -= seconds
    record.write_text(json.dumps(document))


# For how long


@pytest.mark.parametrize(
    ("seconds", "read_bytes"),
    [
        (0, LARGE_BYTES),
        (23 * 3600, LARGE_BYTES),
        (25 * 3600, LARGE_BYTES + SMALL_BYTES),
        (-3600, LARGE_BYTES + SMALL_BYTES),
    ],
)
def test_what_was_hashed_counts_for_a_day(
    interrupted: Verifier, seconds: float, read_bytes: int
) -> None:
    age(interrupted, seconds)
    assert interrupted.run("--json").facts["read_bytes"] == read_bytes


def test_the_answer_says_what_was_not_hashed_now(interrupted: Verifier) -> None:
    done = interrupted.run()
    assert done.status == 0
    assert "5.00 kB of them were hashed by another check" in done.stdout
    assert "--again" in done.stdout


def test_again_remembers_nothing(interrupted: Verifier, tmp_path: Path) -> None:
    assert "--again" in interrupted.run("--help").stdout
    facts = interrupted.run("--again", "--json").facts
    assert facts["read_bytes"] == LARGE_BYTES + SMALL_BYTES


@pytest.mark.parametrize("content", ["", "[" * 200_000, '{"files": 7}', "9" * 5000])
def test_a_damaged_record_costs_only_time(interrupted: Verifier, content: str) -> None:
    (record,) = interrupted.cache.rglob("verify-*.json")
    record.write_text(content)
    done = interrupted.run("--json")
    assert (done.status, done.facts["read_bytes"]) == (0, LARGE_BYTES + SMALL_BYTES)


def test_a_bit_that_flips_after_an_interruption_is_found(interrupted: Verifier) -> None:
    flip(interrupted.model / "small 3", 5)
    assert_found(interrupted.run(), "small 3")


def test_what_was_hashed_for_a_manifest_is_kept_until_it_is_written(verifier: Verifier) -> None:
    """A full disk at the end must not cost all of it."""
    target = verifier.model.parent / "m.json"
    running = verifier.start("--write-manifest", target)
    running.wait_until_it_says("checking 6 files")
    in_the_way = target.with_name("m.json.partial")
    in_the_way.mkdir()
    assert running.wait().status == 1
    in_the_way.rmdir()
    done = verifier.run("--write-manifest", target)
    assert done.status == 0
    assert "checking" not in done.stderr
    assert len(json.loads(target.read_bytes())["files"]) == 6
    assert not list(verifier.cache.rglob("manifest-*.json"))


# What changes while it is read


def change_while_read(verifier: Verifier, *arguments: str | Path) -> Any:
    """A run during which the part of the large file that was read becomes another."""
    running = verifier.start(*arguments)
    running.wait_until_it_says(", 5 of 6)")
    with (verifier.model / LARGE).open("r+b") as file:
        file.write(b"\x01")
    return running.wait()


def test_a_file_that_changes_while_it_is_read_is_not_right(verifier: Verifier) -> None:
    done = change_while_read(verifier)
    assert_found(done, LARGE)
    assert "found that it changed while it was read" in done.stdout
    assert_found(verifier.run(), LARGE)


def test_a_file_that_changes_while_it_is_read_is_not_listed(verifier: Verifier) -> None:
    target = verifier.model.parent / "m.json"
    done = change_while_read(verifier, "--write-manifest", target)
    assert_refused(done, LARGE, "changed while it was read")
    assert not target.exists()
    (record,) = verifier.cache.rglob("manifest-*.json")
    assert set(json.loads(record.read_bytes())["files"]) == set(SMALL)


def test_a_download_does_not_believe_a_file_that_changes_while_it_is_read(
    hub: HubServer, client: Client
) -> None:
    hub.repositories[REPO].listing = lambda document: document["siblings"].append(
        {"rfilename": LARGE, "size": LARGE_BYTES, "blobId": "d" * 40}
    )
    client.directory.mkdir()
    make_large(client.directory / LARGE)
    running = client.start()
    running.wait_until_it_says("checking 1 file")
    with (client.directory / LARGE).open("r+b", buffering=0) as file:
        for content in range(20):  # one of them comes after it was opened
            file.write(bytes([content]))
            time.sleep(0.01)
    assert_refused(running.wait(), LARGE, "changed while it was read", "run the same command again")
    assert not client.files().keys() - {LARGE}


# What a download does about it


def test_a_problem_that_was_shown_is_fetched_again_whatever_happens_next(
    hub: HubServer, client: Client
) -> None:
    assert client.run().status == 0
    listed = (client.directory / MANIFEST).read_bytes()
    add_large(client.directory)
    flip(client.directory / SHARD, 9)
    running = client.start_k3rs("verify", client.directory)
    running.wait_until_it_says(f"problem: `{SHARD}`")
    running.send(signal.SIGKILL)
    assert running.wait().status == -signal.SIGKILL
    (client.directory / LARGE).unlink()
    (client.directory / MANIFEST).write_bytes(listed)
    hub.served_bytes.clear()
    assert client.run().status == 0
    assert set(hub.served_bytes) == {SHARD}
    assert client.files() == hub.repositories[REPO].files


def test_the_hint_works_after_a_check_by_somebody_else(hub: HubServer, client: Client) -> None:
    assert client.run().status == 0
    flip(client.directory / SHARD, 9)
    ours, client.cache = client.cache, client.cache.with_name("theirs")
    done = client.k3rs("verify", client.directory)
    assert_found(done, SHARD)
    assert f"delete the wrong files and repeat the `k3rs download` of {REPO}" in done.stderr
    client.cache = ours
    (client.directory / SHARD).unlink()
    assert client.run().status == 0
    assert client.k3rs("verify", client.directory).status == 0


# In which order


def test_the_largest_files_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a thread would be alone with one at the end."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    model = tmp_path / "model"
    model.mkdir()
    sizes = {f"{n:02}": 1000 * n for n in range(40)}
    for name, size in sizes.items():
        (model / name).write_bytes(bytes(size))
    started: list[str] = []

    class Starts(FileProgress):
        def start(self, path: str, size_bytes: int, done_bytes: int) -> None:
            started.append(path)
            assert (size_bytes, done_bytes) == (sizes[path], 0)

    manifest = write_manifest(model, tmp_path / "m.json")
    assert verify(model, manifest, progress=Starts()).good
    expected = sorted(sizes, reverse=True)
    # Of two threads one may overtake the other by what it is about to say.
    assert max(abs(started.index(name) - expected.index(name)) for name in sizes) < 10
