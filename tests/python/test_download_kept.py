"""What a second `k3rs download` says of files that are there, and when it looks at them again."""

import os
import time

import pytest
from hub_client import MANIFEST, REPO, Client, layer_shard
from hub_server import HubServer, Repository

SHARD = layer_shard(1)


def test_only_what_was_looked_at_is_called_right(hub: HubServer, client: Client) -> None:
    assert client.run().status == 0
    os.truncate(client.directory / SHARD, 5)
    files = hub.repositories[REPO].files
    others = [content for path, content in files.items() if not path.endswith(".safetensors")]
    facts = client.run("--no-weights", "--json").facts
    assert (facts["files"], facts["bytes"]) == (len(others), sum(map(len, others)))
    assert facts["other_files"] == len(files) - len(others) == 5
    done = client.run("--no-weights")
    assert done.status == 0
    first, second, third = done.stdout.splitlines()
    assert ": 5 files, " in first
    assert first.endswith(", every hash as listed")
    assert second == (
        "not looked at now: 5 files of earlier downloads; "
        f"`k3rs verify '{client.directory}'` compares them as well"
    )
    assert third == "fetched now: 0 files, 0 B over the network"
    # They stay listed, so that a check finds what is wrong.
    done = client.k3rs("verify", client.directory)
    assert done.status == 1
    assert f"`{SHARD}`: expected 100,001 bytes, found 5 bytes" in done.stdout


def test_one_file_is_one_file(hub: HubServer, client: Client) -> None:
    hub.repositories[REPO] = Repository({"config.json": b"{}"})
    done = client.run()
    assert ": 1 file, 2 B, every hash as listed\n" in done.stdout
    assert "fetched now: 1 file, 2 B over the network\n" in done.stdout
    assert ": 1 file, 2 B\n" in client.k3rs("verify", client.directory).stdout


def test_a_complete_directory_is_not_written_to(hub: HubServer, client: Client) -> None:
    """Its disk may be full."""
    assert client.run().status == 0
    manifest = client.directory / MANIFEST
    places = (client.directory, manifest)
    before = [(place.stat().st_ino, place.stat().st_mtime_ns) for place in places]
    time.sleep(0.02)
    assert client.run().status == 0
    assert [(place.stat().st_ino, place.stat().st_mtime_ns) for place in places] == before


def test_another_file_of_the_same_size_and_time_is_looked_at(
    hub: HubServer, client: Client
) -> None:
    assert client.run().status == 0
    shard = client.directory / SHARD
    status = shard.stat()
    other = client.cache / "other"
    other.write_bytes(bytes(status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(shard)
    done = client.run()
    assert done.status == 0
    assert f"`{SHARD}` is another one" in done.stderr
    assert client.files() == hub.repositories[REPO].files


def test_another_owner_or_mode_is_no_reason_to_read_it_all(hub: HubServer, client: Client) -> None:
    assert client.run().status == 0
    (client.directory / SHARD).chmod(0o600)
    (client.directory / layer_shard(2)).touch()
    done = client.run()
    assert done.status == 0
    assert f"checking: {layer_shard(2)} is hashed" in done.stderr
    assert SHARD not in done.stderr


@pytest.mark.parametrize("content", ["[" * 200_000, "9" * 5000, '{"files": 7}'])
def test_a_damaged_record_costs_only_a_look(hub: HubServer, client: Client, content: str) -> None:
    assert client.run().status == 0
    (record,) = client.cache.rglob("download-*.json")
    record.write_text(content)
    hub.served_bytes.clear()
    done = client.run()
    assert done.status == 0
    assert f"checking: {SHARD} is hashed" in done.stderr
    assert not hub.served_bytes
