"""`k3rs verify`: what is compared with what, what is found, and what is remembered."""

import ctypes
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forking_runner import ForkingRunner
from harness import file_names
from hub_client import (
    COMMIT,
    MANIFEST,
    REPO,
    Client,
    Verifier,
    assert_found,
    checkpoint,
    flip,
    layer_shard,
    write_list,
)
from hub_server import HubServer, Repository

from k3rs.hub.release import RELEASED_SHARD_BYTES

SHARD = layer_shard(1)
KILLS = 20
MB = 1 << 20


@pytest.fixture
def verifier(hub_services: tuple[HubServer, ForkingRunner], tmp_path: Path) -> Verifier:
    """One with the files of a checkpoint."""
    verifier = Verifier(hub_services[1], tmp_path)
    verifier.fill(checkpoint())
    return verifier


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A manifest of them, outside of their directory."""
    path = tmp_path / "manifest.json"
    write_list(path, checkpoint())
    return path


# What is found


def test_right_files_are_right(verifier: Verifier, manifest: Path) -> None:
    done = verifier.run("--manifest", manifest)
    assert done.status == 0
    assert done.stdout.endswith("all files are right\n")
    files = checkpoint()
    size = sum(map(len, files.values()))
    facts = verifier.run("--manifest", manifest, "--json").facts
    assert facts == {
        "path": str(verifier.model),
        "repo": None,
        "revision": None,
        "files": len(files),
        "bytes": size,
        "contents_checked": True,
        "read_bytes": size,
        "good": True,
        "problems": [],
        "fetch_again": [],
        "extra": [],
    }


@pytest.mark.parametrize("place", [0, 50_000, -1])
def test_one_flipped_bit_is_found(verifier: Verifier, manifest: Path, place: int) -> None:
    """Also after a check that found it right, and with nothing else changed."""
    assert verifier.run("--manifest", manifest).status == 0
    flip(verifier.model / SHARD, place)
    assert_found(verifier.run("--manifest", manifest), SHARD)
    flip(verifier.model / SHARD, place)
    assert verifier.run("--manifest", manifest, "--quiet").stderr == ""


def test_everything_that_is_wrong_is_named_and_sizes_before_hashing(
    verifier: Verifier, manifest: Path
) -> None:
    model = verifier.model
    os.truncate(model / layer_shard(0), 5)
    flip(model / SHARD, 7)
    (model / "config.json").unlink()
    (model / "tiktoken.model").unlink()
    (model / "tiktoken.model").symlink_to("nowhere")
    (model / "empty.txt").unlink()
    (model / "empty.txt").mkdir()
    sizes = [layer_shard(0), "config.json", "tiktoken.model", "empty.txt"]
    done = verifier.run("--manifest", manifest)
    assert_found(done, SHARD, *sizes)
    assert f"`{layer_shard(0)}`: expected 100,000 bytes, found 5 bytes\n" in done.stdout
    assert "`config.json`: expected 3 bytes, found nothing\n" in done.stdout
    assert "`tiktoken.model`: expected 1,000 bytes, found a dangling symlink\n" in done.stdout
    before, after = done.stderr.split("checking", 1)
    assert [line.split("`")[1] for line in before.splitlines()] == sorted(sizes)
    assert f"problem: `{SHARD}`" in after
    facts = json.loads(verifier.run("--manifest", manifest, "--json").stdout)
    assert facts["fetch_again"] == sorted([SHARD, *sizes])
    assert facts["good"] is False


def test_files_that_nobody_listed_are_notes(verifier: Verifier, manifest: Path) -> None:
    (verifier.model / "docs" / "mine.txt").write_text("mine")
    (verifier.model / f"{SHARD}.partial").write_bytes(b"begun")
    done = verifier.run("--manifest", manifest)
    assert done.status == 0
    assert f"not checked: docs/mine.txt, {SHARD}.partial\n" in done.stdout
    facts = verifier.run("--manifest", manifest, "--json").facts
    assert facts["extra"] == ["docs/mine.txt", f"{SHARD}.partial"]


def test_links_into_a_cache_are_followed(verifier: Verifier, manifest: Path) -> None:
    """As the cache of the hub's library has them: names that point to blobs."""
    blobs = verifier.model.with_name("blobs")
    blobs.mkdir()
    for number, path in enumerate(checkpoint()):
        file = verifier.model / path
        shutil.move(file, blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    assert verifier.run("--manifest", manifest).status == 0
    flip((verifier.model / SHARD).resolve(), 9)
    assert_found(verifier.run("--manifest", manifest), SHARD)


def test_nothing_is_written_into_the_model(verifier: Verifier, manifest: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        paths = [verifier.model, *sorted(verifier.model.rglob("*"))]
        statuses = [(path, path.stat()) for path in paths]
        return [(str(path), status.st_mtime_ns, status.st_ctime_ns) for path, status in statuses]

    before = state()
    assert verifier.run("--manifest", manifest).status == 0
    flip_free = verifier.start("--manifest", manifest)
    flip_free.send(signal.SIGINT)
    flip_free.wait()
    assert state() == before


def is_cached(path: Path) -> bool:
    """Whether the beginning of a file is in the page cache, which a read could change."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        page = (ctypes.c_ubyte * 1)()
        failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(1), page)
        del first  # the mapping cannot be closed before
        assert not failed, os.strerror(ctypes.get_errno())
        return bool(page[0] & 1)


def test_reading_leaves_the_page_cache_to_others(verifier: Verifier, manifest: Path) -> None:
    shard = verifier.model / SHARD
    descriptor = os.open(shard, os.O_RDONLY)
    os.fsync(descriptor)  # the kernel keeps what is not on the disk yet
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert verifier.run("--manifest", manifest).status == 0
    assert not is_cached(shard)
    shard.read_bytes()
    assert is_cached(shard)


# What it is compared with


def test_a_download_leaves_what_to_compare_with_and_repairs(
    hub_services: tuple[HubServer, ForkingRunner], tmp_path: Path
) -> None:
    hub, runner = hub_services
    hub.reset()
    hub.repositories[REPO] = Repository(checkpoint())
    client = Client(runner, tmp_path)
    assert client.run().status == 0
    done = client.k3rs("verify", client.directory)
    assert done.status == 0
    assert f"compared with {REPO} at {COMMIT[:12]}" in done.stdout
    flip(client.directory / SHARD, 1)
    flip(client.directory / "config.json", 1)
    done = client.k3rs("verify", client.directory)
    assert_found(done, SHARD, "config.json")
    assert f"repeat the `k3rs download` of {REPO}" in done.stderr
    hub.served_bytes.clear()
    assert client.run().status == 0
    assert set(hub.served_bytes) == {SHARD, "config.json"}
    assert client.k3rs("verify", client.directory).status == 0


def test_the_list_of_the_hub_is_compared_with(
    hub_services: tuple[HubServer, ForkingRunner], verifier: Verifier
) -> None:
    hub = hub_services[0]
    hub.reset()
    repository = Repository(checkpoint(), branches={"main": COMMIT, "v1": "e" * 40})
    hub.repositories[REPO] = repository
    assert verifier.run("--repo", REPO).status == 0
    facts = verifier.run("--repo", REPO, "--revision", "v1", "--json").facts
    assert (facts["repo"], facts["revision"]) == (REPO, "e" * 40)
    repository.files["config.json"] = b"[]\n"
    repository.files["more.txt"] = b"more"
    assert_found(verifier.run("--repo", REPO), "config.json", "more.txt")
    assert not hub.served_bytes


def test_the_published_sizes_are_known() -> None:
    lines = "".join(f"{name} {size}\n" for name, size in RELEASED_SHARD_BYTES.items())
    assert sum(RELEASED_SHARD_BYTES.values()) == 1_560_936_091_448
    assert hashlib.sha256(lines.encode()).hexdigest() == (
        "3d01f2506a431f136f33d67b41a7406a136bcdcdae1d3c3c5d0a1dbe358098a3"
    )


@pytest.fixture
def release(verifier: Verifier) -> Path:
    """Holes as large as the released shards in the place of the model."""
    shutil.rmtree(verifier.model)
    verifier.model.mkdir()
    for name, size in RELEASED_SHARD_BYTES.items():
        with (verifier.model / name).open("wb") as file:
            file.truncate(size)
    return verifier.model


def test_without_a_list_sizes_are_compared_with_the_published_ones(
    verifier: Verifier, release: Path
) -> None:
    done = verifier.run()
    assert done.status == 0
    assert "all sizes are right; contents were not checked, which needs a manifest" in done.stdout
    facts = verifier.run("--json").facts
    assert (facts["files"], facts["contents_checked"], facts["read_bytes"]) == (96, False, 0)
    wrong, missing = "model-00012-of-000096.safetensors", "model-00096-of-000096.safetensors"
    os.truncate(release / wrong, 16_567_507_175)
    (release / missing).unlink()
    done = verifier.run()
    assert_found(done, wrong, missing)
    assert "expected 16,567,507,176 bytes, found 16,567,507,175 bytes" in done.stdout
    assert "contents were not checked" in done.stdout
    assert f"hint: `k3rs download '{release}'` fetches what is missing" in done.stderr


def test_without_a_list_other_models_are_refused(verifier: Verifier) -> None:
    done = verifier.run()
    assert (done.status, done.stdout) == (1, "")
    assert MANIFEST in done.stderr
    assert "--write-manifest" in done.stderr.splitlines()[-1]


def test_a_manifest_in_the_model_needs_no_naming(verifier: Verifier) -> None:
    assert verifier.run("--write-manifest", verifier.model / MANIFEST).status == 0
    assert verifier.run().status == 0
    # One of another name beside the weights does not list itself either.
    assert verifier.run("--write-manifest", verifier.model / "mine.json", "--json").facts[
        "files"
    ] == len(checkpoint())
    flip(verifier.model / SHARD, 3)
    assert_found(verifier.run(), SHARD)
    assert "mine.json" in verifier.run("--quiet").stdout


def test_a_manifest_lists_everything_by_sha256(verifier: Verifier, manifest: Path) -> None:
    written = manifest.with_name("written.json")
    done = verifier.run("--write-manifest", written)
    assert done.status == 0, done.stderr
    assert json.loads(written.read_bytes()) == json.loads(manifest.read_bytes())


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.clear(),
        lambda document: document.update(files=None),
        lambda document: document.update(files=[1]),
        lambda document: document.update(repo=7),
        lambda document: document["files"][0].pop("path"),
        lambda document: document["files"][0].pop("bytes"),
        lambda document: document["files"][0].pop("sha256"),
        lambda document: document["files"][0].update(bytes=True),
        lambda document: document["files"][0].update(bytes=-1),
        lambda document: document["files"][0].update(sha256="0" * 63),
        lambda document: document["files"][0].update(path="../config.json"),
        lambda document: document["files"][0].update(path="/etc/passwd"),
        lambda document: document["files"].append(document["files"][0]),
    ],
)
def test_a_broken_manifest_is_refused(
    verifier: Verifier, manifest: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    document = json.loads(manifest.read_bytes())
    change(document)
    manifest.write_text(json.dumps(document))
    done = verifier.run("--manifest", manifest)
    assert (done.status, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: `{manifest}`: ")
    assert ", found " in error
    assert hint.startswith("hint: ")


def test_an_unfinished_download_is_no_model_to_list(verifier: Verifier, manifest: Path) -> None:
    (verifier.model / f"{SHARD}.partial").write_bytes(b"begun")
    manifest.unlink()
    done = verifier.run("--write-manifest", manifest)
    assert (done.status, manifest.exists()) == (1, False)
    assert f"`{SHARD}.partial`" in done.stderr
    assert "unfinished" in done.stderr.splitlines()[-1]


def test_wrong_usage(verifier: Verifier, manifest: Path) -> None:
    assert verifier.run("--revision", "main", "--manifest", manifest).status == 2
    assert verifier.run("--repo", REPO, "--manifest", manifest).status == 2
    assert verifier.run("--write-manifest", manifest.parent / "none" / "m.json").status == 2
    assert verifier.run("--manifest", manifest.with_name("none.json")).status == 1


# After an interruption


@pytest.fixture
def large(verifier: Verifier, manifest: Path) -> int:
    """Files that take a while, with one wrong bit; returns the size of all."""
    shutil.rmtree(verifier.model)
    verifier.model.mkdir()
    count, size = 60, 24 * MB
    zeros = hashlib.sha256(bytes(size)).hexdigest()
    files = [{"path": f"{n}.safetensors", "bytes": size, "sha256": zeros} for n in range(count)]
    for entry in files:
        with (verifier.model / str(entry["path"])).open("wb") as file:
            file.truncate(size)
    with (verifier.model / "41.safetensors").open("r+b") as file:
        file.seek(size - 1)
        file.write(b"\x80")
    manifest.write_text(json.dumps({"repo": None, "revision": None, "files": files}))
    return count * size


def test_a_check_killed_at_any_moment_is_continued(
    verifier: Verifier, manifest: Path, large: int
) -> None:
    generator = random.Random(20)
    before = file_names(verifier.model)
    killed = continued = 0
    while killed < KILLS:
        running = verifier.start("--manifest", manifest)
        if killed % 2:
            running.wait_until_it_says("is hashed")
        time.sleep(generator.uniform(0.01, 0.06))
        running.send(signal.SIGKILL)
        done = running.wait()
        if done.status == -signal.SIGKILL:
            killed += 1
        else:  # a fast machine came to the end
            assert_found(done, "41.safetensors")
        left = re.match(r"checking \d+ files: (.*) of 1.51 GB\n", done.stderr)
        continued += left is not None and left[1] != "1.51 GB"
    assert continued >= KILLS // 4
    done = verifier.run("--manifest", manifest, "--json")
    assert (done.status, done.facts["fetch_again"]) == (1, ["41.safetensors"])
    assert file_names(verifier.model) == before


def test_ctrl_c_ends_at_once_and_what_changed_is_read_again(
    verifier: Verifier, manifest: Path, large: int
) -> None:
    running = verifier.start("--manifest", manifest)
    running.wait_until_it_says("4 of 60")
    running.send(signal.SIGINT)
    sent_at = time.monotonic()
    done = running.wait()
    assert time.monotonic() - sent_at < 1.5
    assert done.status == 130
    assert done.stderr.endswith(
        "files that were hashed to their end are remembered: the same command continues from "
        "there\nerror: interrupted\n"
    )
    finished = [line.split()[1] for line in done.stderr.splitlines() if " is hashed " in line]
    with (verifier.model / finished[0]).open("r+b") as file:
        file.write(b"\x01")
    done = verifier.run("--manifest", manifest, "--json")
    assert done.facts["fetch_again"] == sorted({finished[0], "41.safetensors"})
    assert large // 4 < done.facts["read_bytes"] <= large - (len(finished) - 1) * 24 * MB
    assert f": {finished[1]} is hashed" not in done.stderr
    count = 60 - len(finished) + 1
    assert f"{count} of {count})" in done.stderr


def test_without_a_cache_directory_it_works_all_the_same(
    verifier: Verifier, manifest: Path
) -> None:
    shutil.rmtree(verifier.cache, ignore_errors=True)
    verifier.cache.write_text("a file")
    assert verifier.run("--manifest", manifest).status == 0
