"""What `k3rs download` makes of answers that are unusual but not wrong."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from harness import run_python
from hub_client import REPO, Client, assert_refused, layer_shard
from hub_server import Fault, HubServer

SHARD = layer_shard(0)

COUNTING = """
import sys
from k3rs.hub.download import download
from k3rs.hub.file_progress import FileProgress

class Counting(FileProgress):
    done = most = 0
    def start(self, path, size_bytes, done_bytes):
        if path == sys.argv[3]:
            self.done = done_bytes
    def advance(self, path, count_bytes):
        if path == sys.argv[3]:
            self.done += count_bytes
            self.most = max(self.most, self.done)

counting = Counting()
download(sys.argv[1], sys.argv[2], progress=counting)
print(counting.done, counting.most)
"""


def date(seconds: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_a_date_to_wait_for_is_one_of_the_clock_of_the_hub(
    hub: HubServer, client: Client, ahead_s: float
) -> None:
    headers = {"Date": date(ahead_s), "Retry-After": date(ahead_s + 1)}
    hub.faults[SHARD] = [Fault(status=503, headers=headers)]
    done = client.run()
    assert done.status == 0, done.stderr
    assert f"`{SHARD}`: HTTP 503; trying again in 1 s" in done.stderr


@pytest.mark.parametrize("asked", ["soon", "Mon, 99 Foo 2026", "-5"])
def test_a_wait_that_is_none_is_not_waited_for(hub: HubServer, client: Client, asked: str) -> None:
    hub.faults[SHARD] = [Fault(status=503, headers={"Retry-After": asked})]
    done = client.run()
    assert done.status == 0, done.stderr
    assert f"`{SHARD}`: HTTP 503; trying again in 0.25 s" in done.stderr


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_what_passes_is_tried_again(hub: HubServer, client: Client, status: int) -> None:
    hub.faults[SHARD] = [Fault(status=status)]
    done = client.run()
    assert done.status == 0, done.stderr
    assert f"`{SHARD}`: HTTP {status}; trying again" in done.stderr


@pytest.mark.parametrize("status", [400, 410, 418])
def test_what_stays_is_not(hub: HubServer, client: Client, status: int) -> None:
    hub.faults[SHARD] = [Fault(status=status)]
    assert_refused(client.run(), SHARD, f"HTTP {status}")
    assert len(hub.content_requests(SHARD)) == 1


def test_more_than_was_listed_is_left_out(hub: HubServer, client: Client) -> None:
    hub.faults[SHARD] = [Fault(appended=b"more")]
    hub.faults["config.json"] = [Fault(appended=b"more")]
    done = client.run("--json")
    assert done.status == 0, done.stderr
    assert "wrong bytes" not in done.stderr
    files = hub.repositories[REPO].files
    assert client.files() == files
    assert done.facts["fetched_bytes"] == sum(map(len, files.values()))


def test_what_is_fetched_once_more_is_not_counted_twice(hub: HubServer, tmp_path: Path) -> None:
    size = len(hub.repositories[REPO].files[SHARD])
    hub.faults[SHARD] = [Fault(cut_after=40_000), Fault(whole=True)]
    done = run_python(
        tmp_path,
        "-c",
        COUNTING,
        REPO,
        tmp_path / "model",
        SHARD,
        HF_ENDPOINT=hub.url,
        HF_HOME=str(tmp_path),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        NO_PROXY="127.0.0.1",
    )
    assert done.status == 0, done.stderr
    assert done.stdout.split() == [str(size), str(size)]
