"""`k3rs download` when the network, the hub or the disk does wrong."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from harness import RunK3rs
from hub_client import (
    EMBEDDING_SHARD,
    IMAGE_SHARD,
    INDEX,
    MANIFEST,
    REPO,
    Client,
    assert_refused,
    checkpoint,
    layer_shard,
)
from hub_server import SIGNATURE, Fault, HubServer

OTHER = "hf_of_somebody_else"
HIDDEN = "hf_that_nobody_may_see"
SHARDS = [*(layer_shard(layer) for layer in range(3)), EMBEDDING_SHARD, IMAGE_SHARD]


# What breaks and is continued


def test_what_breaks_in_the_middle_is_continued_from_there(hub: HubServer, client: Client) -> None:
    cut = Fault(cut_after=40_000)
    hub.faults |= {
        SHARDS[0]: [cut, cut],
        SHARDS[1]: [Fault(cut_after=30_000, stalls=True)],
        SHARDS[2]: [cut, Fault(status=500), Fault(status=403)],
        SHARDS[3]: [cut, Fault(shifted=True)],
        "tiktoken.model": [Fault(status=503)],
        "config.json": [Fault(cut_after=1)],
    }
    done = client.run("--json")
    assert done.status == 0, done.stderr
    files = hub.repositories[REPO].files
    assert client.files() == files
    asked = {shard: [r.range for r in hub.content_requests(shard)] for shard in SHARDS}
    assert asked[SHARDS[0]] == [None, "bytes=40000-", "bytes=80000-"]
    assert asked[SHARDS[1]] == [None, "bytes=30000-"]
    assert asked[SHARDS[2]] == [None, *["bytes=40000-"] * 3]
    assert asked[SHARDS[3]] == [None, *["bytes=40000-"] * 2]
    assert [r.range for r in hub.content_requests("config.json")] == [None, "bytes=1-"]
    # Parts of what the hub compresses could not be put together.
    contents = [request for request in hub.requests if "/api/" not in request.path]
    assert {request.encoding for request in contents} == {"identity"}
    # Nothing that had arrived came again.
    assert done.facts["fetched_bytes"] == sum(map(len, files.values()))
    assert f"`{SHARDS[1]}`: no answer in time; trying again in 0.25 s" in done.stderr


def test_a_server_that_does_not_serve_parts_is_read_from_the_beginning(
    hub: HubServer, client: Client
) -> None:
    hub.faults[SHARDS[0]] = [Fault(cut_after=40_000), Fault(whole=True, cut_after=20_000)]
    done = client.run("--json")
    assert done.status == 0, done.stderr
    files = hub.repositories[REPO].files
    assert client.files() == files
    ranges = [request.range for request in hub.content_requests(SHARDS[0])]
    assert ranges == [None, "bytes=40000-", "bytes=20000-"]
    assert done.facts["fetched_bytes"] == sum(map(len, files.values())) + 40_000


def test_the_hub_says_how_long_to_wait(hub: HubServer, client: Client) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=3)
    hub.faults |= {
        REPO: [Fault(status=429, headers={"Retry-After": "0"})] * 3,
        SHARDS[0]: [Fault(status=429, headers={"Retry-After": "1"})],
        SHARDS[1]: [Fault(status=503, headers={"Retry-After": format_datetime(soon, usegmt=True)})],
        SHARDS[2]: [Fault(status=429, headers={"RateLimit": '"resolvers";r=0;t=2'})],
    }
    started = time.monotonic()
    done = client.run()
    assert done.status == 0, done.stderr

    def waited_s(shard: str) -> float:
        first, second = (request.time_s for request in hub.content_requests(shard))
        return second - first

    assert 1 <= waited_s(SHARDS[0]) < 5
    assert 1.5 < waited_s(SHARDS[1]) < 6
    assert 2 <= waited_s(SHARDS[2]) < 6
    listed_at = [request.time_s for request in hub.requests if "/api/" in request.path][-1]
    assert listed_at - started < 2


def test_a_wait_of_hours_is_refused(hub: HubServer, client: Client) -> None:
    hub.faults[SHARDS[0]] = [Fault(status=429, headers={"Retry-After": "7200"})]
    assert_refused(client.run(), SHARDS[0], "7200 seconds", "later")
    assert client.run().status == 0


@pytest.mark.parametrize("retries", [0, 1])
def test_it_gives_up_and_can_be_continued(hub: HubServer, client: Client, retries: int) -> None:
    hub.faults[IMAGE_SHARD] = [Fault(cut_after=40_000)] + [Fault(status=500)] * 9
    done = client.run("--retries", str(retries))
    words = ["the connection broke"] if retries == 0 else ["HTTP 500", "2 attempts"]
    assert_refused(done, IMAGE_SHARD, hub.url, "continues", *words)
    assert IMAGE_SHARD not in client.files()
    hub.faults.clear()
    hub.requests.clear()
    assert client.run().status == 0
    assert [request.range for request in hub.content_requests(IMAGE_SHARD)] == ["bytes=40000-"]
    assert client.files() == hub.repositories[REPO].files


def test_a_server_that_never_gets_further_is_given_up(hub: HubServer, client: Client) -> None:
    hub.faults[IMAGE_SHARD] = [Fault(whole=True, cut_after=20_000)] * 40
    assert_refused(client.run("--retries", "2"), IMAGE_SHARD, "3 attempts")
    assert len(hub.content_requests(IMAGE_SHARD)) == 3


def test_no_connection_is_said_with_the_address(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    address = "http://127.0.0.1:9"
    done = run_k3rs(
        "download", REPO, tmp_path / "model", "--retries", "0", HF_ENDPOINT=address, HF_TOKEN=HIDDEN
    )
    assert_refused(done, address, "no connection", "check the connection")
    assert HIDDEN not in done.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [("HF_HUB_OFFLINE", "1", 1), ("HF_ENDPOINT", "nowhere", 2), ("HF_ENDPOINT", "ftp://a", 2)],
)
def test_an_environment_without_a_hub_is_named(
    run_k3rs: RunK3rs, tmp_path: Path, variable: str, value: str, status: int
) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", variable: value}
    done = run_k3rs("download", REPO, tmp_path / "model", **environment)
    assert_refused(done, variable, status=status)
    assert not (tmp_path / "model").exists()


# Who may have it


@pytest.mark.parametrize("token", ["", HIDDEN])
def test_without_access_the_hint_says_how_to_get_it(
    hub: HubServer, client: Client, token: str
) -> None:
    hub.repositories[REPO].token = OTHER
    done = client.run(token=token)
    assert_refused(done, "access refused", "HF_TOKEN", f"{hub.url}/{REPO}")
    assert f"HTTP {403 if token else 401}" in done.stderr
    assert HIDDEN not in done.stderr
    assert len(hub.requests) == 1


def test_the_token_goes_to_the_hub_and_nowhere_else(hub: HubServer, client: Client) -> None:
    hub.repositories[REPO].token = HIDDEN
    hub.faults[SHARDS[0]] = [Fault(cut_after=100), Fault(status=403), Fault(status=500)]
    done = client.run(token=HIDDEN)
    assert done.status == 0, done.stderr
    for request in hub.requests:
        assert request.token == (None if request.at_storage else f"Bearer {HIDDEN}")
    assert sum(request.at_storage for request in hub.requests) == 9
    written = [done.stdout, done.stderr, (client.directory / MANIFEST).read_text()]
    assert not any(HIDDEN in text or SIGNATURE in text for text in written)


@pytest.mark.parametrize("token", ["hf_ü", "hf with spaces", "hf_\x01"])
def test_a_token_that_is_none_is_refused_unseen(hub: HubServer, client: Client, token: str) -> None:
    done = client.run(token=token)
    assert_refused(done, "token", "HF_TOKEN", status=2)
    assert token not in done.stderr
    assert not hub.requests


def test_nothing_of_that_name(hub: HubServer, client: Client) -> None:
    assert_refused(client.run("--revision", "v9"), "v9", "HTTP 404", "--revision")
    assert_refused(client.k3rs("download", "owner/none", client.directory), "owner/none", "404")
    assert not client.directory.exists()


def test_one_file_that_cannot_be_had_does_not_stop_the_others(
    hub: HubServer, client: Client
) -> None:
    hub.faults |= {SHARDS[0]: [Fault(status=404)], "config.json": [Fault(status=404)]}
    done = client.run()
    assert_refused(done, "2 files", SHARDS[0], "`config.json`")
    files = hub.repositories[REPO].files
    assert (
        client.files().items()
        >= {
            path: content
            for path, content in files.items()
            if path not in {SHARDS[0], "config.json"}
        }.items()
    )
    assert client.run().status == 0
    assert client.files() == files


# Wrong bytes


@pytest.mark.parametrize("name", [SHARDS[0], "config.json", INDEX])
def test_wrong_bytes_are_fetched_once_more(hub: HubServer, client: Client, name: str) -> None:
    hub.faults[name] = [Fault(flipped=True)]
    done = client.run()
    assert done.status == 0, done.stderr
    assert f"`{name}`: wrong bytes arrived" in done.stderr
    assert client.files() == hub.repositories[REPO].files


@pytest.mark.parametrize("name", [SHARDS[0], "config.json"])
def test_bytes_that_stay_wrong_are_refused_by_name(
    hub: HubServer, client: Client, name: str
) -> None:
    files = hub.repositories[REPO].files
    hub.faults[name] = [Fault(flipped=True)] * 2
    assert_refused(client.run(), f"`{name}`", "other bytes")
    assert client.files() == {path: files[path] for path in files if path != name}
    assert len(hub.content_requests(name)) == 2
    assert client.run().status == 0
    assert client.files() == files


def test_an_index_that_stays_wrong_is_refused_before_anything_is_written(
    hub: HubServer, client: Client
) -> None:
    hub.faults[INDEX] = [Fault(flipped=True)] * 2
    assert_refused(client.run(), INDEX, "other bytes")
    assert not client.directory.exists()


# The disk


def test_a_file_in_the_place_of_the_directory_is_refused(hub: HubServer, client: Client) -> None:
    client.directory.write_bytes(b"precious")
    assert_refused(client.run(), str(client.directory), "found the file")
    assert_refused(client.k3rs("download", REPO, client.directory / "below"), "found the file")
    assert client.directory.read_bytes() == b"precious"
    assert not hub.requests


@pytest.fixture
def small_disk(client: Client) -> Iterator[Path]:
    """A file system of 1 MB in the place of the directory."""
    client.directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", client.directory],
        capture_output=True,
        timeout=10,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield client.directory
    subprocess.run(["umount", client.directory], timeout=10, check=True)


def test_a_disk_that_may_not_be_written_is_refused_before_work(
    hub: HubServer, client: Client, small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", small_disk], timeout=10, check=True)
    assert_refused(client.run(), str(small_disk), "written")
    assert not hub.requests


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_directory_that_may_not_be_written_is_refused_before_work(
    hub: HubServer, client: Client
) -> None:
    client.directory.mkdir(mode=0o500)
    assert_refused(client.run(), str(client.directory), "written")
    assert not hub.requests


def test_a_small_disk_is_refused_before_anything_is_written(
    hub: HubServer, client: Client, small_disk: Path
) -> None:
    hub.repositories[REPO].files = checkpoint(shard_bytes=300_000)
    needed = sum(map(len, hub.repositories[REPO].files.values()))
    assert_refused(client.run(), f"{needed:,} bytes", f"found {1 << 20:,}")
    assert client.files() == {}
    assert not (small_disk / MANIFEST).exists()


def test_a_disk_that_becomes_full_keeps_what_is_finished(
    hub: HubServer, client: Client, small_disk: Path
) -> None:
    def fill_when_the_others_are_there() -> None:
        give_up_at = time.monotonic() + 10
        while not all((small_disk / shard).exists() for shard in SHARDS[:-1]):
            assert time.monotonic() < give_up_at
            time.sleep(0.005)
        free = shutil.disk_usage(small_disk).free
        (small_disk / "filler").write_bytes(bytes(free - 50_000))

    hub.faults[IMAGE_SHARD] = [Fault(before=fill_when_the_others_are_there)]
    done = client.run()
    assert done.status == 1
    *_, note, error, hint = done.stderr.splitlines()
    assert note == "what has arrived stays: the same command continues from there"
    assert error.startswith(f"error: cannot use `{client.directory}/")
    assert "No space left on device" in error
    assert "room" in hint
    files = hub.repositories[REPO].files
    kept = set(files) - {IMAGE_SHARD}
    assert set(client.files()) == kept | {"filler", f"{IMAGE_SHARD}.partial"}
    (small_disk / "filler").unlink()
    hub.served_bytes.clear()
    assert client.run().status == 0
    assert client.files() == files
    assert not set(hub.served_bytes) & kept
    assert hub.served_bytes[IMAGE_SHARD] < len(files[IMAGE_SHARD])


def test_a_file_that_cannot_grow_is_continued_later(hub: HubServer, client: Client) -> None:
    done = client.run(file_bytes_max=60_000)
    assert done.status == 1
    assert re.search(r"error: cannot use `.*\.safetensors\.partial`: File too large", done.stderr)
    hub.requests.clear()
    assert client.run().status == 0
    assert client.files() == hub.repositories[REPO].files
    assert "bytes=60000-" in {request.range for request in hub.requests}


def test_ctrl_c_does_not_wait_for_a_silent_server(hub: HubServer, client: Client) -> None:
    hub.faults |= {shard: [Fault(cut_after=100, stalls=True)] for shard in SHARDS}
    running = client.start()
    running.wait_until_it_says("tiktoken.model is done")
    time.sleep(0.1)
    running.send(signal.SIGINT)
    sent_at = time.monotonic()
    assert running.wait().status == 130
    assert time.monotonic() - sent_at < 0.8
