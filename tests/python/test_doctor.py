"""`k3rs doctor`: what it finds on a machine, what it computes, and what it says to do next."""

import dataclasses
import importlib.metadata
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from checkpoint_edit import edit_config, rename_tensor
from doctor_machine import machine_files
from harness import Completed, RunK3rs, file_names

import k3rs
from k3rs import _k3rs, doctor
from k3rs.cli.main import main
from k3rs.cli.parser import build_parser
from k3rs.device import Device
from k3rs.doctor.estimate import RELEASE
from k3rs.hub.manifest import MANIFEST_FILE, HashKind, ListedFile, Manifest
from k3rs.hub.release import RELEASED_SHARD_BYTES

GB = 10**9
RELEASED_BYTES = 1_560_936_091_448
DEVICE = Device("there", 2.0, 1.0, True, "direct reads", False, 10**9)
FACTS = {
    "checks",
    "machine",
    "device",
    "model",
    "estimated",
    "estimates",
    "recommended",
    "next",
}

Examine: TypeAlias = Callable[..., doctor.Report]


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
        return doctor.examine(model, directory, probe=doctor.Probe(0.01, 2_000_000), root=root)

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


def check(report: doctor.Report, name: str) -> doctor.Check:
    (found,) = (entry for entry in report.checks if entry.name == name)
    return found


def with_free_bytes(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))


def write_manifest(directory: Path, repo: str | None, files: dict[str, int]) -> None:
    listed = tuple(
        ListedFile(name, size, HashKind.SHA256, "0" * 64) for name, size in files.items()
    )
    Manifest(repo, None if repo is None else "1" * 40, listed).write(directory / MANIFEST_FILE)


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Completed:
    probe = ["--probe-size", "2MB", "--seconds", "0.01"]
    status = main(["doctor", *probe, *map(str, arguments)])
    return Completed(status, *capsys.readouterr())


@pytest.mark.parametrize(
    ("kind", "words"), [("ext4", None), ("nfs4", "network"), ("tmpfs", "take memory")]
)
def test_file_systems_that_are_no_disk_of_the_machine_are_pointed_out(
    examine: Examine, root: Path, tmp_path: Path, kind: str, words: str | None
) -> None:
    machine_files(root, {"proc/self/mountinfo": f"1 0 8:1 / / rw - {kind} x rw\n"})
    found = check(examine(None, tmp_path), "file system")
    assert found.found == f"{kind}, mounted at /"
    assert found.status == ("ok" if words is None else "warning")
    assert words is None or words in str(found.advice)


def test_too_little_memory_is_a_warning_and_no_preset_fits(
    examine: Examine, root: Path, model_path: Path
) -> None:
    machine_files(root, {"proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable: 1900000 kB\n"})
    report = examine(model_path)
    assert check(report, "memory").status == "warning"
    assert check(report, "memory").found == "1.95 GB available of 4.10 GB"
    assert (report.estimates, report.recommended, report.failures) == ([], None, [])
    assert report.next == ['k3rs generate --prompt "In the beginning"']


def test_a_limit_decides_which_presets_fit(examine: Examine, root: Path, model_path: Path) -> None:
    assert examine(model_path).recommended == "workstation"
    limit = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": f"{9 * GB}\n",
        "sys/fs/cgroup/a/memory.current": "0\n",
    }
    machine_files(root, limit)
    report = examine(model_path)
    assert report.recommended == "laptop"
    presets = [entry.budget for entry in report.estimates if entry.budget != "auto"]
    assert presets == ["pocket", "laptop"]
    assert "9.00 GB, 9.00 GB of it left (/sys/fs/cgroup/a)" in check(report, "memory limit").found


def test_another_system_than_linux_is_a_failure(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, model_path: Path
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Plan 9")
    report = examine(model_path)
    assert [failure.name for failure in report.failures] == ["platform"]
    assert report.next == []


def test_old_libraries_are_pointed_out(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, model_path: Path
) -> None:
    demands = ["numpy>=1.26", "rich>=13.7", "tokenizers>=0.22", 'matplotlib>=3.8; extra == "plot"']
    versions = {"numpy": "1.26.0rc1", "tokenizers": "0.9.10"}
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: demands)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    found = check(examine(model_path), "python")
    assert found.status == "warning"
    assert found.found.endswith(", numpy 1.26.0rc1, tokenizers 0.9.10")
    assert "made for tokenizers 0.22 or newer" in str(found.advice)
    versions["tokenizers"] = "0.22.0"
    assert check(examine(model_path), "python").status == "ok"


def test_a_place_with_room_is_where_the_release_goes(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_free_bytes(monkeypatch, RELEASED_BYTES)
    report = examine(None, tmp_path / "root")
    space = check(report, "space")
    assert (space.status, space.found) == (
        "ok",
        "1.56 TB free, the released model needs 1.56 TB",
    )
    assert report.next == [f"k3rs download {tmp_path / 'root' / 'Kimi-K3'}"]
    assert report.sizes == RELEASE
    assert [entry.budget for entry in report.estimates if entry.budget != "auto"] == [
        "pocket",
        "laptop",
        "desktop",
        "workstation",
    ]
    assert report.recommended == "workstation"
    entry = report.estimates[0]
    assert entry.disk_seconds == pytest.approx(
        entry.trunk_read_bytes / 2e9 + entry.expert_read_bytes / 1e9
    )
    with_free_bytes(monkeypatch, RELEASED_BYTES - 1)
    report = examine(None, tmp_path / "root")
    assert (check(report, "space").status, report.failures) == ("warning", [])
    assert report.next == ['k3rs generate --prompt "In the beginning"']


def test_a_download_that_was_begun_there_goes_on(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "model-00001-of-000096.safetensors"
    write_manifest(tmp_path, "moonshotai/Kimi-K3", RELEASED_SHARD_BYTES)
    with (tmp_path / name).open("wb") as file:
        file.truncate(RELEASED_SHARD_BYTES[name])
    with_free_bytes(monkeypatch, RELEASED_BYTES - RELEASED_SHARD_BYTES[name])
    report = examine(None, tmp_path)
    assert check(report, "space").status == "ok"
    assert report.next == [f"k3rs download {tmp_path}"]


def test_the_shipped_model_is_all_right(run_k3rs: RunK3rs) -> None:
    shipped = k3rs.shipped_model()
    before = file_names(shipped)
    done = run_k3rs("doctor", shipped, "--seconds", "0.05", "--json")
    assert (done.status, done.stderr) == (0, "")
    facts = done.facts
    assert facts.keys() == FACTS
    verdicts = {entry["name"]: entry["status"] for entry in facts["checks"]}
    for name in ("platform", "cpu", "memory read", "python", "model", "tokenizer", "device"):
        assert verdicts[name] == "ok", name
    assert "space" not in verdicts
    for entry in facts["checks"]:
        assert entry.keys() == {"name", "status", "found", "advice"}
    assert facts["model"] == {
        "path": str(shipped),
        "complete": True,
        "runnable_layers": 9,
        "missing_shards": [],
    }
    assert facts["machine"]["memory_read_gb_s"] > 0
    assert facts["device"]["file_bytes"] == sum(
        path.stat().st_size for path in shipped.glob("*.safetensors")
    )
    for entry in facts["estimates"]:
        # All of it stays in memory: nothing is left to read.
        assert (entry["hit_rate"], entry["disk_seconds"], entry["reason"]) == (1.0, 0.0, "memory")
        assert entry["seconds_per_token"] == entry["memory_seconds"] > 0
    assert facts["recommended"] in {preset.name for preset in k3rs.PRESETS}
    assert facts["next"] == [
        f'k3rs generate {shipped} --preset {facts["recommended"]} --prompt "In the beginning"'
    ]
    assert file_names(shipped) == before


def test_the_command_without_a_model_leaves_nothing(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    done = run_k3rs("doctor", "--probe-size", "2MB", "--seconds", "0.05")
    assert (done.status, done.stderr, file_names(tmp_path)) == (0, "", [])
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("next: "))
    assert any(line.startswith("ok       device ") for line in lines)
    assert any(line.startswith("  pocket  ") for line in lines)
    assert lines[-1].startswith("next: k3rs ")


def test_models_of_a_download_are_verified_first(
    examine: Examine, copied: Path, without_tokenizer: Path
) -> None:
    write_manifest(copied, "some/model", {})
    generate = f'k3rs generate {copied} --preset workstation --prompt "In the beginning"'
    assert examine(copied).next == [f"k3rs verify {copied}", generate]
    # A name that the shell would cut, and no texts.
    report = examine(without_tokenizer)
    assert report.next == [f"k3rs generate '{without_tokenizer}' --preset workstation --ids 1,2,3"]
    assert check(report, "tokenizer").status == "warning"


def test_of_an_incomplete_model_it_is_said_what_is_missing(examine: Examine, copied: Path) -> None:
    (copied / "model-00004-of-000006.safetensors").unlink()
    report = examine(copied)
    found = check(report, "model")
    assert found.status == "warning"
    assert found.found == (
        "incomplete, with 1 missing shard, 140 missing tensors; the first 5 of 7 layers can be run"
    )
    assert report.failures == []
    assert report.sizes is not None
    assert report.sizes.name == f"the first 5 layers of {copied}"
    assert report.sizes.expert_layers == 4
    facts = k3rs.inspect(copied)
    held = sum(layer["experts"]["bytes"] for layer in facts["layers"][:5])
    assert report.sizes.expert_bytes == held // (4 * facts["config"]["moe"]["experts"])
    assert {check.name for check in report.checks}.isdisjoint({"space"})
    assert report.next == [f"k3rs inspect {copied}"]
    write_manifest(copied, "some/model", {})
    assert examine(copied).next == [f"k3rs download some/model {copied}"]


def test_a_part_of_the_release_is_judged_by_the_whole(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, partly_released: Path
) -> None:
    there = list(partly_released.glob("*.safetensors"))
    assert len(there) == 3
    missing_bytes = RELEASED_BYTES - sum(path.stat().st_size for path in there)
    with_free_bytes(monkeypatch, missing_bytes)
    report = examine(partly_released)
    assert report.sizes == RELEASE
    assert check(report, "space").status == "ok"
    assert check(report, "space").found.endswith("needs 1.54 TB more")
    assert "the first 2 of 93 layers can be run" in check(report, "model").found
    assert report.next == [f"k3rs download '{partly_released}'"]
    with_free_bytes(monkeypatch, missing_bytes - 1)
    assert check(examine(partly_released), "space").status == "warning"


def test_a_download_without_a_shard_is_no_failure(
    examine: Examine, tmp_path: Path, copied: Path
) -> None:
    for shard in copied.glob("*.safetensors*"):
        shard.unlink()
    (copied / "model.safetensors.index.json").unlink(missing_ok=True)
    assert [failure.name for failure in examine(copied).failures] == ["model"]
    write_manifest(copied, "some/model", {"model.safetensors": 10})
    report = examine(copied)
    assert report.failures == []
    assert check(report, "model").found == "a download that was begun: no shards yet"
    assert check(report, "device").status == "warning"
    assert report.next == [f"k3rs download some/model {copied}"]
    assert report.estimates == []
    write_manifest(copied, "some/model", RELEASED_SHARD_BYTES)
    assert examine(copied).sizes == RELEASE


def test_holes_tell_nothing_of_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holes = tmp_path / "holes"
    k3rs.synthesize(holes, layers=4, experts=64, vocab=512, sparse=True)
    monkeypatch.setattr(_k3rs, "memory_read_gb_s", lambda: 10.0)
    done = run_doctor(capsys, holes)
    assert done.status == 0
    assert "warning  device" in done.stdout
    assert "mostly holes" in done.stdout
    # Of the time that a token takes, either.
    assert re.search(r"\n  pocket  .* unknown\s*\n", done.stdout)


def test_a_slow_disk_is_told_in_plain_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = dataclasses.asdict(DEVICE) | {"tiles_gb_s": 0.1, "experts_gb_s": 0.05}
    for key in ("path", "file_bytes"):
        del slow[key]
    monkeypatch.setattr(_k3rs, "memory_read_gb_s", lambda: 10.0)
    monkeypatch.setattr(_k3rs, "measure_device", lambda *_: json.dumps(slow))
    done = run_doctor(capsys, "--directory", tmp_path)
    # 110.8 GB of trunk at 0.1 GB/s, and 25.7 GB of experts at 0.05 GB/s.
    assert re.search(r"\n  pocket  .* 136 GB +1,621 +disk\n", done.stdout)
    assert "17.5 s at 10.0 GB/s of memory" in " ".join(done.stdout.split())


def spoil(directory: Path, how: str) -> None:
    if how == "no config":
        (directory / "config.json").unlink()
    elif how == "config":
        edit_config(directory, lambda config: config.update(num_hidden_layers="x"))
    elif how == "tensor":
        name = "language_model.model.layers.0.input_layernorm.weight"
        rename_tensor(directory, name, f"{name}s")
    elif how == "all":
        shutil.rmtree(directory)
    else:
        (directory / MANIFEST_FILE).write_text("{", encoding="utf-8")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no config", "config.json"),
        ("config", "num_hidden_layers"),
        ("tensor", "layers.0.input_layernorm.weight"),
        ("all", "expected a model directory"),
        ("manifest", MANIFEST_FILE),
    ],
)
def test_a_broken_model_is_a_failure(
    copied: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    words: str,
) -> None:
    monkeypatch.setattr(_k3rs, "memory_read_gb_s", lambda: 10.0)
    spoil(copied, how)
    done = run_doctor(capsys, copied, "--json")
    assert done.status == 1
    assert done.stderr.startswith("error: expected no check to fail, found: model\n")
    failures = [entry for entry in done.facts["checks"] if entry["status"] == "failure"]
    assert [entry["name"] for entry in failures] == ["model"]
    assert words in failures[0]["found"]
    assert done.facts["estimates"] == []
    assert done.facts["next"] == ([f"k3rs inspect {copied}"] if how == "tensor" else [])
    text = run_doctor(capsys, copied)
    assert text.status == 1
    assert "failure  model" in text.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--probe-size", "7"],
        ["--directory", "nowhere"],
        ["there", "--directory", "."],
    ],
)
def test_wrong_arguments_are_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_an_unmeasured_device_is_a_warning_and_its_times_unknown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_k3rs, "memory_read_gb_s", lambda: 10.0)
    monkeypatch.setattr(Path, "mkdir", refuse)
    done = run_doctor(capsys, "--directory", tmp_path)
    assert done.status == 0
    words = " ".join(done.stdout.split())
    assert "warning device not measured: " in words
    assert "Permission denied" in words
    assert re.search(r"\n  pocket  .* unknown\s*\n", done.stdout)
    assert "how fast the disk is, is not known" in words


def test_what_is_to_be_typed_next_can_be_typed(
    examine: Examine, copied: Path, without_tokenizer: Path, partly_released: Path, tmp_path: Path
) -> None:
    write_manifest(copied, "some/model", {})
    for report in (
        examine(None, tmp_path),
        examine(copied),
        examine(without_tokenizer),
        examine(partly_released),
    ):
        assert report.next
        for command in report.next:
            program, *arguments = shlex.split(command)
            assert program == "k3rs"
            build_parser().parse_args(arguments)
