"""What the tests of downloads share: a checkpoint on a hub, and a client with a directory."""

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forking_runner import ForkingRunner, Running
from harness import Completed
from hub_server import HubServer

REPO = "owner/model"
COMMIT = "a" * 40
MANIFEST = "k3rs-manifest.json"
INDEX = "model.safetensors.index.json"
EMBEDDING_SHARD = "model-00004-of-000005.safetensors"
IMAGE_SHARD = "model-00005-of-000005.safetensors"


def layer_shard(layer: int) -> str:
    return f"model-{layer + 1:05}-of-000005.safetensors"


def checkpoint(prefix: str = "language_model.", shard_bytes: int = 100_000) -> dict[str, bytes]:
    """Files as the release has them, with random weights: three layers, a shard each."""
    shard_of = {f"{prefix}model.layers.{layer}.norm": layer_shard(layer) for layer in range(3)}
    shard_of |= {
        f"{prefix}model.embed_tokens.weight": EMBEDDING_SHARD,
        f"{prefix}lm_head.weight": EMBEDDING_SHARD,
        "vision_tower.proj": IMAGE_SHARD,
    }
    generator = random.Random(7)
    return {
        "config.json": b"{}\n",
        "empty.txt": b"",
        "docs/a name with spaces, #1 [50%]?.txt": b"spaces\n",
        "tiktoken.model": generator.randbytes(1000),
        INDEX: json.dumps({"weight_map": shard_of}).encode(),
        **{
            shard: generator.randbytes(shard_bytes + place)
            for place, shard in enumerate(sorted(set(shard_of.values())))
        },
    }


@contextmanager
def hub_and_runner(place: Path) -> Iterator[tuple[HubServer, ForkingRunner]]:
    """A hub, and runs of the command that know no other one and no login."""
    hub = HubServer()
    runner = ForkingRunner(
        HF_ENDPOINT=hub.url,
        HF_HOME=str(place),
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DOWNLOAD_TIMEOUT="1",
        NO_PROXY="127.0.0.1",
    )
    with runner:
        yield hub, runner
    hub.close()


@contextmanager
def place_without_waits() -> Iterator[Path]:
    """A directory in memory where there can be one, so that no test waits for a disk."""
    memory = Path("/dev", "shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


class Client:
    """Downloads into one directory, with a cache directory of its own."""

    def __init__(self, runner: ForkingRunner, place: Path) -> None:
        self._runner = runner
        self.cache = place / "cache"
        self.directory = place / "a model"

    def start(self, *arguments: str, token: str = "", file_bytes_max: int | None = None) -> Running:
        return self._runner.start(
            "download",
            REPO,
            self.directory,
            *arguments,
            file_bytes_max=file_bytes_max,
            XDG_CACHE_HOME=str(self.cache),
            HF_TOKEN=token,
        )

    def run(self, *arguments: str, token: str = "", file_bytes_max: int | None = None) -> Completed:
        return self.start(*arguments, token=token, file_bytes_max=file_bytes_max).wait()

    def k3rs(self, *arguments: str | Path) -> Completed:
        return self.start_k3rs(*arguments).wait()

    def start_k3rs(self, *arguments: str | Path) -> Running:
        return self._runner.start(*arguments, XDG_CACHE_HOME=str(self.cache))

    def files(self) -> dict[str, bytes]:
        """All that is in the directory but the manifest."""
        return {
            path.relative_to(self.directory).as_posix(): path.read_bytes()
            for path in self.directory.rglob("*")
            if path.is_file() and path.name != MANIFEST
        }

    def manifest(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads((self.directory / MANIFEST).read_bytes())
        return document


def assert_refused(done: Completed, *words: str, status: int = 1) -> None:
    """An error and a hint that have all `words`, and nothing else on stdout."""
    assert (done.status, done.stdout) == (status, ""), done.stderr
    *_, error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    for word in words:
        assert word in error + hint


class Verifier:
    """Runs of `k3rs verify` on one directory, with a cache directory of its own."""

    def __init__(self, runner: ForkingRunner, place: Path) -> None:
        self._runner = runner
        self.cache = place / "cache"
        self.model = place / "a model"

    def start(self, *arguments: str | Path) -> Running:
        cache = str(self.cache)
        return self._runner.start("verify", self.model, *arguments, XDG_CACHE_HOME=cache)

    def run(self, *arguments: str | Path) -> Completed:
        return self.start(*arguments).wait()

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Puts `files` into the directory."""
        for path, content in files.items():
            file = self.model / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def write_list(path: Path, files: Mapping[str, bytes]) -> None:
    """Puts a manifest of `files` there, as `--write-manifest` would."""
    listed = [
        {"path": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in sorted(files.items())
    ]
    path.write_text(json.dumps({"repo": None, "revision": None, "files": listed}))


def flip(path: Path, place: int) -> None:
    """Changes one bit and nothing that a directory listing shows."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def assert_found(done: Completed, *paths: str) -> None:
    """Status 1, and exactly these files to be fetched again, each with what was found."""
    assert done.status == 1
    listed = done.stdout.split("to be fetched again:\n")[1].splitlines()
    named = [line.split("`")[1] for line in listed if line.startswith("  `")]
    assert named == sorted(paths)
    assert f"found {len(paths)} that have to be fetched again\nhint: " in done.stderr
