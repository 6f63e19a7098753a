"""`k3rs doctor`: what it finds on a machine, what it computes, and what it says to do next."""

import dataclasses
import importlib.metadata
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_edit import edit_config, rename_tensor
from doctor_machine import DEVICE, Examine, check, machine_files
from harness import Completed, RunK3rs, file_names

import k3rs
from k3rs import _k3rs
from k3rs.cli.main import main

pytest_plugins = ["doctor_fixtures"]

GB = 10**9
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


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Completed:
    size = ["--probe-size", "2MB"] if "--directory" in arguments else []
    status = main(["doctor", "--seconds", "0.01", *size, *map(str, arguments)])
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
    else:
        shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("no config", "config.json"),
        ("config", "num_hidden_layers"),
        ("tensor", "layers.0.input_layernorm.weight"),
        ("all", "expected a model directory"),
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
    failures = [entry for entry in done.facts["checks"] if entry["status"] == "failure"]
    assert [entry["name"] for entry in failures] == ["model"]
    assert words in failures[0]["found"]
    error, *hint = done.stderr.splitlines()
    assert error == f"error: the check `model` failed: {failures[0]['found']}"
    assert hint == [f"hint: {failures[0]['advice']}"]
    assert done.facts["estimates"] == []
    assert done.facts["next"] == ([f"k3rs inspect {copied}"] if how == "tensor" else [])
    text = run_doctor(capsys, copied)
    assert text.status == 1
    assert "failure  model" in text.stdout


def test_names_of_files_do_not_command_the_terminal(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_k3rs, "memory_read_gb_s", lambda: 10.0)
    (copied / "config.json").unlink()
    done = run_doctor(capsys, copied.rename(copied.with_name("a\x1b[2J\nb")))
    for text in (done.stdout, done.stderr):
        assert all(line.isprintable() for line in text.split("\n"))
        assert "/a\u241b[2J\u240ab" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--probe-size", "7"],
        ["--probe-size", "1kB"],
        ["--probe-size", "1000TB"],
        [str(k3rs.shipped_model()), "--probe-size", "2MB"],
        ["--directory", "nowhere"],
        ["there", "--directory", "."],
    ],
)
def test_wrong_arguments_are_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_k3rs, "memory_read_gb_s", lambda: 10.0)
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
