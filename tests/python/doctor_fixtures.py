"""Examinations of a machine that is not there: a plugin for the tests of `k3rs doctor`."""

import json
from pathlib import Path

import pytest
from doctor_machine import DEVICE, Examine, machine_files

import k3rs
from k3rs import _k3rs, doctor


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The `/proc` and `/sys` of a machine with 100 GB of free memory."""
    return machine_files(tmp_path / "root", {})


@pytest.fixture
def examine(root: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examines on that machine, whose memory reads 10 GB/s and whose device is known."""
    speeds = {key: getattr(DEVICE, key) for key in ("tiles_gb_s", "experts_gb_s", "direct", "why")}
    monkeypatch.setattr(_k3rs, "memory_read_gb_s", lambda: 10.0)
    monkeypatch.setattr(_k3rs, "measure_device", lambda *_: json.dumps({**speeds, "sparse": False}))

    def run(model: Path | None = None, directory: Path = Path()) -> doctor.Report:
        probe = doctor.Probe(0.01, 2_000_000 if model is None else None)
        return doctor.examine(model, directory, probe=probe, root=root)

    return run


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the config and the sizes of the released one, made of holes."""
    directory = tmp_path_factory.mktemp("released") / "model"
    k3rs.synthesize(directory, sparse=True)
    return directory


@pytest.fixture
def partly_released(released: Path, tmp_path: Path) -> Path:
    """Its files without the shards of layers 2 to 92, and a part of another file."""
    directory = tmp_path / "partly released"
    directory.mkdir()
    for source in released.iterdir():
        if (
            source.suffix != ".safetensors"
            or source.name < "model-00003"
            or "-00094-" in source.name
        ):
            (directory / source.name).symlink_to(source)
    return directory
