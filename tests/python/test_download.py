"""`k3rs download` against a hub on this machine: what is fetched, kept, refused and continued."""

import hashlib
import json
import os
import random
import signal
import time
from typing import Any

import pytest
from hub_client import (
    COMMIT,
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
from hub_server import HubServer, Repository

OTHER_COMMIT = "c" * 40
KILLS = 20


# What is fetched


def test_a_download_is_the_repository_and_a_manifest(hub: HubServer, client: Client) -> None:
    files = hub.repositories[REPO].files
    done = client.run("--json")
    assert done.status == 0, done.stderr
    assert client.files() == files
    manifest = client.manifest()
    assert (manifest["repo"], manifest["revision"]) == (REPO, COMMIT)
    assert {entry["path"]: entry["bytes"] for entry in manifest["files"]} == {
        path: len(content) for path, content in files.items()
    }
    hashes = {entry["path"]: entry for entry in manifest["files"]}
    shard = layer_shard(0)
    assert hashes[shard]["sha256"] == hashlib.sha256(files[shard]).hexdigest()
    # What `git hash-object` says of this content.
    assert hashes["config.json"]["git_sha1"] == "0967ef424bce6791893e9a57bb952f80fd536e93"
    size = sum(map(len, files.values()))
    assert done.facts == {
        "repo": REPO,
        "revision": COMMIT,
        "directory": str(client.directory),
        "manifest": str(client.directory / MANIFEST),
        "files": len(files),
        "bytes": size,
        "other_files": 0,
        "fetched_files": len(files),
        "fetched_bytes": size,
    }


def test_every_file_has_a_line_unless_quiet_is_asked_for(hub: HubServer, client: Client) -> None:
    lines = client.run().stderr.splitlines()
    for path in hub.repositories[REPO].files:
        assert len([line for line in lines if f" {path} is done " in line]) == 1
    (client.directory / "config.json").unlink()
    done = client.run("--quiet")
    assert (done.status, done.stderr) == (0, "")
    assert REPO in done.stdout


def test_kimi_k3_is_the_model_that_is_fetched_by_default(hub: HubServer, client: Client) -> None:
    hub.repositories["moonshotai/Kimi-K3"] = Repository({"config.json": b"{}"})
    done = client.k3rs("download", client.directory, "--json")
    assert done.facts["repo"] == "moonshotai/Kimi-K3"
    assert client.files() == {"config.json": b"{}"}


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_layers_are_their_shards_and_that_of_the_embedding(
    hub: HubServer, client: Client, prefix: str
) -> None:
    files = checkpoint(prefix)
    hub.repositories[REPO].files = files
    weights = {path for path in files if path.endswith(".safetensors")}
    assert client.run("--only-layers", "1-2").status == 0
    first = {layer_shard(1), layer_shard(2), EMBEDDING_SHARD}
    assert set(client.files()) == set(files) - weights | first
    assert not hub.content_requests(IMAGE_SHARD)
    # More of it later: what is there is not fetched again, and the manifest has both.
    served = hub.served_bytes[EMBEDDING_SHARD]
    assert client.run("--only-layers", "0").status == 0
    assert set(client.files()) == set(files) - {IMAGE_SHARD}
    assert hub.served_bytes[EMBEDDING_SHARD] == served
    assert {entry["path"] for entry in client.manifest()["files"]} == set(client.files())
    assert client.k3rs("verify", client.directory).status == 0


@pytest.mark.parametrize("layers", ["1-3", "3", "2-1", "-1", "a", "1-"])
def test_layers_that_are_not_there_are_wrong_usage(
    hub: HubServer, client: Client, layers: str
) -> None:
    assert_refused(client.run(f"--only-layers={layers}"), "layers", status=2)
    assert not client.directory.exists()


def test_layers_need_an_index(hub: HubServer, client: Client) -> None:
    del hub.repositories[REPO].files[INDEX]
    assert_refused(client.run("--only-layers", "0"), INDEX)


def test_without_weights_everything_else_comes(hub: HubServer, client: Client) -> None:
    assert client.run("--no-weights").status == 0
    files = hub.repositories[REPO].files
    others = {path: files[path] for path in files if not path.endswith(".safetensors")}
    assert client.files() == others
    assert {entry["path"] for entry in client.manifest()["files"]} == set(others)


# What is kept


def test_a_finished_download_fetches_nothing(hub: HubServer, client: Client) -> None:
    assert client.run().status == 0
    hub.served_bytes.clear()
    done = client.run("--json")
    assert (done.facts["fetched_files"], done.facts["fetched_bytes"]) == (0, 0)
    assert not hub.served_bytes


@pytest.mark.parametrize("entry", [None, "x", [], [1], [[], {}, None]])
def test_a_broken_record_costs_only_a_look_at_the_files(
    hub: HubServer, client: Client, entry: Any
) -> None:
    assert client.run().status == 0
    hub.served_bytes.clear()
    (record,) = client.cache.rglob("download-*.json")
    document = json.loads(record.read_bytes())
    document["files"] = dict.fromkeys(document["files"], entry)
    record.write_text("{" if entry is None else json.dumps(document))
    done = client.run()
    assert done.status == 0, done.stderr
    assert f"checking: {IMAGE_SHARD} is hashed" in done.stderr
    assert not hub.served_bytes


def test_files_from_elsewhere_are_compared_then_kept_or_replaced(
    hub: HubServer, client: Client
) -> None:
    files = hub.repositories[REPO].files
    client.directory.mkdir()
    right, wrong, short = (layer_shard(layer) for layer in range(3))
    (client.directory / right).write_bytes(files[right])
    (client.directory / wrong).write_bytes(bytes([files[wrong][0] ^ 1]) + files[wrong][1:])
    (client.directory / short).write_bytes(files[short][:-1])
    done = client.run()
    assert done.status == 0
    assert client.files() == files
    assert not hub.served_bytes[right]
    for replaced in (wrong, short):
        assert f"`{replaced}` is another one" in done.stderr


@pytest.mark.parametrize("left", [b"", b"garbage", bytes(100_000), bytes(200_000)])
def test_what_is_left_of_another_file_does_no_harm(
    hub: HubServer, client: Client, left: bytes
) -> None:
    client.directory.mkdir()
    (client.directory / f"{layer_shard(0)}.partial").write_bytes(left)
    done = client.run()
    assert done.status == 0
    # What is longer than the file is not even compared.
    assert ("wrong bytes arrived" in done.stderr) == (0 < len(left) <= 100_000)
    assert client.files() == hub.repositories[REPO].files


def test_a_directory_stays_at_its_commit(hub: HubServer, client: Client) -> None:
    repository = hub.repositories[REPO]
    assert client.run("--no-weights").status == 0
    repository.branches = {"main": OTHER_COMMIT, "before": COMMIT}
    hub.requests.clear()
    assert_refused(client.run("--revision", "main"), COMMIT, OTHER_COMMIT, MANIFEST)
    assert client.run().status == 0
    assert client.run("--revision", "before").status == 0
    assert client.manifest()["revision"] == COMMIT
    contents = [request.path for request in hub.requests if "/resolve/" in request.path]
    assert contents
    assert all(f"/resolve/{COMMIT}/" in path for path in contents)


def test_a_revision_is_resolved_once(hub: HubServer, client: Client) -> None:
    hub.repositories[REPO].branches["a/branch"] = OTHER_COMMIT
    assert client.run("--revision", "a/branch").status == 0
    assert client.manifest()["revision"] == OTHER_COMMIT
    asked = [request.path for request in hub.requests if not request.at_storage]
    assert "/revision/a%2Fbranch?" in asked[0]
    assert all(f"/resolve/{OTHER_COMMIT}/" in path for path in asked[1:])


def test_a_directory_of_another_repository_is_left_alone(hub: HubServer, client: Client) -> None:
    hub.repositories["owner/other"] = Repository({"config.json": b"[]"})
    assert client.run("--no-weights").status == 0
    before = client.files()
    assert_refused(client.k3rs("download", "owner/other", client.directory), REPO, MANIFEST)
    assert client.files() == before


# What is refused before anything is written


@pytest.mark.parametrize(
    "name", ["../out", "a/../../out", "/out", "a//b", "./a", "a\nb", "x.partial"]
)
def test_names_that_lead_elsewhere_are_refused(hub: HubServer, client: Client, name: str) -> None:
    hub.repositories[REPO].files[name] = b"hostile"
    assert_refused(client.run(), "name")
    assert not client.directory.exists()


def test_an_index_with_an_unlisted_shard_is_refused_before_weights(
    hub: HubServer, client: Client
) -> None:
    del hub.repositories[REPO].files[layer_shard(1)]
    assert_refused(client.run(), INDEX, layer_shard(1))
    assert not client.directory.exists()
    assert not any(request.at_storage for request in hub.requests)


@pytest.mark.parametrize("index", [b"", b"[]", b'{"weight_map": []}', b'{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(hub: HubServer, client: Client, index: bytes) -> None:
    hub.repositories[REPO].files[INDEX] = index
    assert_refused(client.run(), INDEX, "weight_map")


def test_too_little_space_is_said_with_both_numbers(hub: HubServer, client: Client) -> None:
    def enlarge(document: dict[str, Any]) -> None:
        for sibling in document["siblings"]:
            if sibling["rfilename"] == IMAGE_SHARD:
                sibling["size"] = 10**17

    hub.repositories[REPO].listing = enlarge
    needed = sum(map(len, hub.repositories[REPO].files.values())) - 100_004 + 10**17
    done = client.run()
    assert_refused(done, f"{needed:,} bytes", "free", "--only-layers")
    status = os.statvfs(client.directory.parent)
    found = int(done.stderr.split("found ")[1].split(" ")[0].replace(",", ""))
    assert abs(found - status.f_bavail * status.f_frsize) < 10**9
    assert not client.directory.exists()


def test_space_is_needed_only_for_what_is_missing(hub: HubServer, client: Client) -> None:
    """Sparse files on the disk as large as the disk could not hold twice."""
    assert client.run().status == 0
    hub.repositories[REPO].listing = lambda document: document["siblings"].append(
        {"rfilename": "large.bin", "size": 10**17, "blobId": "d" * 40}
    )
    assert_refused(client.run(), f"{10**17:,} bytes")
    client.directory.joinpath("large.bin.partial").touch()
    free = os.statvfs(client.directory).f_bavail * os.statvfs(client.directory).f_frsize
    half = free // 2
    hub.repositories[REPO].listing = lambda document: document["siblings"].append(
        {"rfilename": "large.bin", "size": free + half, "blobId": "d" * 40}
    )
    os.truncate(client.directory / "large.bin.partial", 1)
    assert_refused(client.run(), f"{free + half - 1:,} bytes")


@pytest.mark.parametrize(
    "listing",
    [
        lambda document: document.clear(),
        lambda document: document.update(sha="main"),
        lambda document: document.update(siblings=[]),
        lambda document: document["siblings"][0].pop("size"),
        lambda document: document["siblings"][0].pop("blobId"),
        lambda document: document["siblings"][0].update(blobId="zz"),
        lambda document: document["siblings"][0].update(size=-1),
        lambda document: document["siblings"].append(document["siblings"][0]),
    ],
)
def test_a_strange_listing_is_refused(hub: HubServer, client: Client, listing: Any) -> None:
    hub.repositories[REPO].listing = listing
    assert_refused(client.run())
    assert not client.directory.exists()


@pytest.mark.parametrize("name", ["owner", "own er/model", "a/b/c", ""])
def test_a_name_that_is_none_is_refused(hub: HubServer, client: Client, name: str) -> None:
    done = client.k3rs("download", name, client.directory)
    assert done.status in {1, 2}
    assert done.stderr.startswith("error: expected ")
    assert not client.directory.exists()


# Ends at any moment


def test_a_second_download_into_a_directory_is_refused_at_once(
    hub: HubServer, client: Client
) -> None:
    hub.bytes_per_s = 100_000
    first = client.start()
    first.wait_until_it_says("fetching")
    time.sleep(0.2)
    asked = len(hub.requests)
    started = time.monotonic()
    assert_refused(client.run(), str(client.directory), "another")
    assert time.monotonic() - started < 1.5
    assert len(hub.requests) - asked < 10
    hub.bytes_per_s = None
    assert first.wait().status == 0
    assert client.files() == hub.repositories[REPO].files


def test_ctrl_c_ends_at_once_and_the_same_command_continues(hub: HubServer, client: Client) -> None:
    hub.bytes_per_s = 100_000
    running = client.start()
    running.wait_until_it_says("empty.txt is done")
    time.sleep(0.4)
    running.send(signal.SIGINT)
    sent_at = time.monotonic()
    done = running.wait()
    assert time.monotonic() - sent_at < 1.5
    assert done.status == 130
    assert done.stderr.endswith(
        "what has arrived stays: the same command continues from there\nerror: interrupted\n"
    )
    hub.bytes_per_s = None
    hub.requests.clear()
    assert client.run().status == 0
    assert any(request.range for request in hub.requests)
    assert client.files() == hub.repositories[REPO].files


def test_a_download_killed_at_any_moment_is_continued(hub: HubServer, client: Client) -> None:
    files = checkpoint(shard_bytes=1_600_000)
    hub.repositories[REPO].files = files
    hub.bytes_per_s = 1.0e6
    generator = random.Random(20)
    killed = 0
    for _ in range(KILLS):
        running = client.start()
        time.sleep(generator.uniform(0.02, 0.22))
        running.send(signal.SIGKILL)
        killed += running.wait().status == -signal.SIGKILL
        for path, content in client.files().items() if client.directory.exists() else ():
            if not path.endswith(".partial"):
                assert content == files[path]
    assert killed == KILLS
    hub.bytes_per_s = None
    assert client.run().status == 0
    assert client.files() == files
    assert any(request.range for request in hub.requests)
    # Each end loses what was on its way to three files, in buffers that the server cannot see.
    size = sum(map(len, files.values()))
    index_bytes = len(files[INDEX]) * KILLS
    assert sum(hub.served_bytes.values()) < size + index_bytes + KILLS * 3 * (1 << 16)
    assert client.k3rs("verify", client.directory).status == 0
