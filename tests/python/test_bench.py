"""The device in `k3rs bench`: measured beside the memory, by a file or by a model."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT_S, Completed, RunK3rs, command_environment, file_names

from k3rs import _k3rs
from k3rs.cli.main import main

KERNEL = {
    "name": "bf16 7168x12288",
    "tokens": 1,
    "weights_gb_s": 9.0,
    "gflop_s": 18.0,
    "of_read": 0.9,
    "of_fma": 0.1,
}
DEVICE = {
    "tiles_gb_s": 2.5,
    "experts_gb_s": 1.25,
    "direct": True,
    "why": "direct reads at a multiple of 512 bytes",
    "sparse": False,
}

# The command, which says when the core begins to measure.
TELLING = """
import sys
from k3rs import _k3rs
from k3rs.cli.main import main
measure = _k3rs.bench
def bench(**options):
    print("begun", flush=True)
    return measure(**options)
_k3rs.bench = bench
sys.exit(main(["bench"]))
"""


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that reads 10 GB/s of memory and has a device of known speed."""
    facts = {
        "limits": {"read_gb_s": 10.0, "fma_gflop_s": 100.0, "threads": 2},
        "kernels": [KERNEL],
        "small_work": [],
        "foreign_cpu": None,
        "busy_thread_slowdown": 1.0,
    }
    monkeypatch.setattr(_k3rs, "bench", lambda **_: json.dumps(facts))
    monkeypatch.setattr(_k3rs, "measure_device", lambda *_: json.dumps(DEVICE))


def bench(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Completed:
    status = main(["bench", "--quick", *map(str, arguments)])
    return Completed(status, *capsys.readouterr())


def test_the_device_is_measured_where_the_command_runs(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    done = run_k3rs("bench", "--quick", "--json", "--threads", "1")
    assert (done.status, file_names(tmp_path)) == (0, [])
    limits = done.facts["limits"]
    assert limits.keys() == {"read_gb_s", "fma_gflop_s", "threads", "device", "device_why"}
    assert limits["device_why"] is None
    device = limits["device"]
    assert device.keys() == {*DEVICE, "path", "file_bytes"}
    assert device["tiles_gb_s"] > 0
    assert device["experts_gb_s"] > 0
    assert device["file_bytes"] == 16_000_000


def test_the_table_has_the_device_as_shares_of_the_memory_read(
    known_machine: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lines = bench(capsys, "--directory", tmp_path).stdout.splitlines()
    first = lines.index("| device, direct reads | GB/s | of memory read |")
    assert lines[first + 1 : first + 5] == [
        "|---|---|---|",
        "| tiles | 2.50 | 0.250 |",
        "| experts | 1.25 | 0.125 |",
        "",
    ]
    # A table that is pasted needs empty lines around it.
    assert lines[first - 1] == ""
    assert "| bf16 7168x12288 | 1 | 9.00 | 18.0 | 0.90 | 0.10 |" in lines
    other = json.dumps({**DEVICE, "direct": False, "sparse": True})
    monkeypatch.setattr(_k3rs, "measure_device", lambda *_: other)
    lines = bench(capsys, "--directory", tmp_path).stdout.splitlines()
    assert "| device, buffered reads | GB/s | of memory read |" in lines
    assert "the files are mostly holes: the device is not what was measured" in lines


def test_a_model_is_measured_by_its_shards(
    known_machine: None, capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    before = file_names(copied)
    device = bench(capsys, copied, "--json").facts["limits"]["device"]
    shards = copied.glob("*.safetensors")
    assert device["path"] == str(copied)
    assert device["file_bytes"] == sum(path.stat().st_size for path in shards)
    assert file_names(copied) == before


@pytest.mark.parametrize("place", ["model", "directory"])
def test_a_device_that_cannot_be_measured_does_not_hold_up_the_rest(
    known_machine: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    gone = tmp_path / "gone"
    arguments = [gone] if place == "model" else ["--directory", gone]
    done = bench(capsys, *arguments, "--json")
    limits = done.facts["limits"]
    assert (done.status, limits["device"], limits["read_gb_s"]) == (0, None, 10.0)
    assert limits["device_why"].startswith(f"{gone}: expected a")
    table = bench(capsys, *arguments).stdout
    assert f"device not measured: {limits['device_why']}\n" in table
    assert "| bf16 7168x12288 |" in table


def test_a_model_and_a_directory_are_one_too_many(
    capsys: pytest.CaptureFixture[str], copied: Path
) -> None:
    done = bench(capsys, copied, "--directory", copied)
    assert done.status == 2
    assert "not allowed with argument" in done.stderr


def test_ctrl_c_ends_it_while_the_core_measures(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TELLING],
        cwd=tmp_path,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    time.sleep(0.3)
    sent_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIME_LIMIT_S)
    # The whole measurement takes three times as long.
    assert time.monotonic() - sent_at < 4
    assert (process.returncode, stdout, stderr) == (130, b"", b"error: interrupted\n")
    assert file_names(tmp_path) == []
