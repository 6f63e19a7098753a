"""The fixture checkpoint and the `k3rs` command, as a user has them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_edit import copy_checkpoint
from forking_runner import ForkingRunner
from harness import TINY_K3, Completed, Prompt, RunK3rs, run_python
from hub_client import REPO, Client, checkpoint, hub_and_runner, place_without_waits
from hub_server import HubServer, Repository

import k3rs


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The directory of the fixture checkpoint."""
    return TINY_K3 / "model"


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """The prompts of the fixture, the shortest first."""
    expected = json.loads((TINY_K3 / "expected.json").read_text(encoding="utf-8"))
    return [
        Prompt(prompt["ids"], prompt["argmax"], prompt["greedy"]) for prompt in expected["prompts"]
    ]


@pytest.fixture(scope="session")
def model(model_path: Path) -> Iterator[k3rs.Model]:
    """The fixture checkpoint, open."""
    with k3rs.Model.open(model_path, memory="1GB", threads=1) as opened:
        yield opened


@pytest.fixture
def run_k3rs(tmp_path: Path) -> RunK3rs:
    """Runs `python -m k3rs` with the given arguments, away from the source checkout."""

    def run(*arguments: str | Path, **extra: str) -> Completed:
        return run_python(tmp_path, "-m", "k3rs", *arguments, **extra)

    return run


@pytest.fixture
def copied(model_path: Path, tmp_path: Path) -> Path:
    """A copy of the fixture checkpoint to be spoilt."""
    return copy_checkpoint(model_path, tmp_path / "copy")


@pytest.fixture
def without_tokenizer(model_path: Path, tmp_path: Path) -> Path:
    """The fixture checkpoint without its vocabulary files."""
    directory = tmp_path / "no tokenizer"
    directory.mkdir()
    for source in model_path.iterdir():
        if source.name not in ("tiktoken.model", "tokenizer_config.json"):
            (directory / source.name).symlink_to(source)
    return directory


@pytest.fixture(scope="session")
def hub_services(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[HubServer, ForkingRunner]]:
    """A hub on this machine, and runs of the command that know no other one."""
    with hub_and_runner(tmp_path_factory.mktemp("no login")) as both:
        yield both


@pytest.fixture
def hub(hub_services: tuple[HubServer, ForkingRunner]) -> HubServer:
    """The hub with one repository."""
    hub = hub_services[0]
    hub.reset()
    hub.repositories[REPO] = Repository(checkpoint())
    return hub


@pytest.fixture
def client(hub_services: tuple[HubServer, ForkingRunner]) -> Iterator[Client]:
    """Downloads into a directory of their own."""
    with place_without_waits() as place:
        yield Client(hub_services[1], place)
