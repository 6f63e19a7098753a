"""Lists of files that are broken or hostile: refused in words, and never obeyed by a terminal."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forking_runner import ForkingRunner
from harness import Completed
from hub_client import (
    INDEX,
    MANIFEST,
    REPO,
    Client,
    Verifier,
    assert_refused,
    checkpoint,
    layer_shard,
    write_list,
)
from hub_server import HubServer

SHARD = layer_shard(1)
DEEP = "[" * 200_000
ESCAPE = "\x1b[31mred"


@pytest.fixture
def verifier(hub_services: tuple[HubServer, ForkingRunner], tmp_path: Path) -> Verifier:
    """One with the files of a checkpoint and a manifest of them."""
    verifier = Verifier(hub_services[1], tmp_path)
    verifier.fill(checkpoint())
    write_list(verifier.model / MANIFEST, checkpoint())
    return verifier


def changed(verifier: Verifier, change: Callable[[dict[str, Any]], object]) -> Completed:
    """A check against the manifest after `change`."""
    path = verifier.model / MANIFEST
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))
    return verifier.run()


# A manifest


@pytest.mark.parametrize("content", ["", "{", DEEP, "9" * 5000])
def test_a_damaged_manifest_is_refused_and_the_hint_works(
    hub: HubServer, client: Client, content: str
) -> None:
    assert client.run().status == 0
    manifest = client.directory / MANIFEST
    manifest.write_text(content)
    words = (str(manifest), "expected a manifest", "remove this list of files", "k3rs download")
    assert_refused(client.k3rs("verify", client.directory), *words)
    assert_refused(client.run(), *words)
    manifest.unlink()
    hub.served_bytes.clear()
    assert client.run().status == 0
    assert not hub.served_bytes
    assert client.k3rs("verify", client.directory).status == 0


@pytest.mark.parametrize("size", [10**400, 1 << 63, 1.5, "12", None])
def test_a_size_that_no_file_has_is_refused(verifier: Verifier, size: object) -> None:
    done = changed(verifier, lambda document: document["files"][0].update(bytes=size))
    assert_refused(done, "expected a size from 0 to below 2^63 bytes", "remove this list")


def test_the_largest_size_is_only_not_there(verifier: Verifier) -> None:
    done = changed(verifier, lambda document: document["files"][0].update(bytes=(1 << 63) - 1))
    assert done.status == 1
    assert "expected 9,223,372,036,854,775,807 bytes, found " in done.stdout


def test_a_list_without_files_makes_nothing_right(verifier: Verifier, tmp_path: Path) -> None:
    done = changed(verifier, lambda document: document.update(files=[]))
    assert_refused(done, "found a list without any")
    empty = tmp_path / "empty"
    empty.mkdir()
    verifier.model = empty
    assert_refused(verifier.run("--write-manifest", tmp_path / "m.json"), str(empty), "found none")
    assert not (tmp_path / "m.json").exists()


def test_a_file_where_others_need_a_directory_is_refused(verifier: Verifier) -> None:
    def add(document: dict[str, Any]) -> None:
        document["files"].append({**document["files"][0], "path": f"{SHARD}/below/it"})

    assert_refused(changed(verifier, add), f"directory `{SHARD}`", f"`{SHARD}/below/it`")


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["files"][0].update(path=ESCAPE),
        lambda document: document["files"][0].update(path=f"a\n{ESCAPE}"),
        lambda document: document["files"][0].update(sha256=ESCAPE),
        lambda document: document["files"][0].update(bytes=ESCAPE),
        lambda document: document.update(repo=ESCAPE),
    ],
)
def test_what_a_manifest_says_does_not_steer_the_terminal(
    verifier: Verifier, change: Callable[[dict[str, Any]], object]
) -> None:
    done = changed(verifier, change)
    assert_refused(done, MANIFEST)
    assert "\x1b" not in done.stderr
    assert len(done.stderr.splitlines()) == 2


def test_names_of_files_do_not_steer_the_terminal(verifier: Verifier) -> None:
    (verifier.model / f"{ESCAPE}\nall files are wrong").touch()
    done = verifier.run()
    assert done.status == 0
    assert "\x1b" not in done.stdout
    assert "not checked: \\x1b[31mred\\nall files are wrong\n" in done.stdout
    # A program gets the name itself.
    assert verifier.run("--json").facts["extra"] == [f"{ESCAPE}\nall files are wrong"]


# What is looked at before hashing a terabyte for `--write-manifest`


@pytest.mark.parametrize("name", [b"broken \xff", b"a\x1b[31m", b"a\nb"])
def test_a_name_that_cannot_be_listed_is_said_first(verifier: Verifier, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(verifier.model) + b"/" + name)).touch()
    done = verifier.run("--write-manifest", verifier.model.parent / "m.json")
    assert_refused(done, "inside of the model directory", "rename that file")
    assert "checking" not in done.stderr
    assert "\x1b" not in done.stderr
    assert "trust" not in done.stderr


def test_an_unfinished_download_is_said_first(verifier: Verifier) -> None:
    (verifier.model / f"{SHARD}.partial").touch()
    done = verifier.run("--write-manifest", verifier.model.parent / "m.json")
    assert_refused(done, f"`{SHARD}.partial`", "unfinished")
    assert "checking" not in done.stderr


@pytest.mark.parametrize("directory", ["m.json", "m.json.partial"])
def test_a_place_that_takes_no_manifest_is_said_first(verifier: Verifier, directory: str) -> None:
    place = verifier.model.parent / directory
    place.mkdir()
    done = verifier.run("--write-manifest", verifier.model.parent / "m.json")
    assert_refused(done, str(place))
    assert "checking" not in done.stderr


def test_what_is_no_file_is_said_first(verifier: Verifier) -> None:
    os.mkfifo(verifier.model / "pipe")
    done = verifier.run("--write-manifest", verifier.model.parent / "m.json")
    assert_refused(done, "`pipe`", "something else")
    assert "checking" not in done.stderr


# What the hub says


@pytest.mark.parametrize(
    "listing",
    [
        lambda document: document["siblings"][0].update(size="12"),
        lambda document: document["siblings"][0].update(size=10**400),
        lambda document: document["siblings"][0].update(rfilename=5),
        lambda document: document["siblings"][0].update(rfilename=ESCAPE),
        lambda document: document["siblings"][0].update(blobId=5),
        lambda document: document["siblings"][-1]["lfs"].update(sha256=5),
        lambda document: document["siblings"].append(
            {**document["siblings"][0], "rfilename": "config.json/a"}
        ),
        lambda document: document.update(sha=5),
    ],
)
def test_a_hostile_listing_is_refused_in_words(
    hub: HubServer, client: Client, listing: Callable[[dict[str, Any]], object]
) -> None:
    hub.repositories[REPO].listing = listing
    done = client.run()
    assert_refused(done, REPO)
    assert "\x1b" not in done.stderr
    assert "internal error" not in done.stderr
    assert not client.directory.exists()


@pytest.mark.parametrize(
    "index",
    [
        DEEP,
        json.dumps({"weight_map": {f"model.layers.{'1' * 5000}.norm": SHARD}}),
        json.dumps({"weight_map": {"model.layers.1.norm": f"{ESCAPE}\n.safetensors"}}),
    ],
    ids=["deep", "layer", "name"],
)
def test_a_hostile_index_is_refused_in_words(hub: HubServer, client: Client, index: str) -> None:
    hub.repositories[REPO].files[INDEX] = index.encode()
    done = client.run("--only-layers", "1")
    assert done.status in {1, 2}
    assert_refused(done, "expected", status=done.status)
    assert "\x1b" not in done.stderr
    assert "internal error" not in done.stderr


# What is in the way


@pytest.mark.parametrize("name", ["config.json", f"{SHARD}.partial"])
def test_a_directory_in_the_place_of_a_file_is_named_before_anything_is_written(
    hub: HubServer, client: Client, name: str
) -> None:
    (client.directory / name).mkdir(parents=True)
    assert_refused(client.run(), f"found the directory `{client.directory / name}`", "move it")
    assert client.files() == {}
    assert not (client.directory / MANIFEST).exists()


def test_a_file_in_the_place_of_a_directory_is_named(hub: HubServer, client: Client) -> None:
    client.directory.mkdir()
    (client.directory / "docs").write_text("mine")
    assert_refused(client.run(), f"found the file `{client.directory / 'docs'}`", "move it")
    assert client.files() == {"docs": b"mine"}
