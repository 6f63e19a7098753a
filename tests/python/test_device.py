"""Measuring the device below a directory: what is measured, and that nothing is left behind."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import TIME_LIMIT_S, command_environment, file_names, run_python

from k3rs import _k3rs
from k3rs.device import Device, measure_directory, measure_shards
from k3rs.exceptions import CheckpointError, InputError, ReadError

PROBE_BYTES = 2_000_000

# A process that may not write files of more than a million bytes, like one on a full disk.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
from k3rs.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def with_free_bytes(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))


def probe_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that are asked for from now on; small ones are written."""
    sizes: list[int] = []
    write = _k3rs.write_probe_file

    def remember(path: str, size_bytes: int) -> None:
        sizes.append(size_bytes)
        write(path, PROBE_BYTES)

    monkeypatch.setattr(_k3rs, "write_probe_file", remember)
    return sizes


def test_a_directory_is_measured_by_a_file_that_is_gone_afterwards(tmp_path: Path) -> None:
    device = measure_directory(tmp_path, probe_bytes=PROBE_BYTES, seconds=0.02)
    assert (device.path, device.file_bytes) == (str(tmp_path), PROBE_BYTES)
    assert device.tiles_gb_s > 0
    assert device.experts_gb_s > 0
    assert device.why
    assert not device.sparse
    assert file_names(tmp_path) == []


@pytest.mark.parametrize(
    ("free_bytes", "probe_bytes"), [(10**13, 1 << 30), (4 << 30, 1 << 30), (64_000_000, 16_000_000)]
)
def test_the_file_has_a_gibibyte_or_a_quarter_of_the_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_bytes: int, probe_bytes: int
) -> None:
    with_free_bytes(monkeypatch, free_bytes)
    sizes = probe_sizes(monkeypatch)
    measure_directory(tmp_path, seconds=0.01)
    assert sizes == [probe_bytes]


def test_without_room_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_free_bytes(monkeypatch, 4 * (1 << 20) - 1)
    sizes = probe_sizes(monkeypatch)
    with pytest.raises(ReadError, match=r"at least 4\.19 MB of room .* 4\.19 MB free") as refused:
        measure_directory(tmp_path)
    assert refused.value.hint == "make room, or name another directory"
    assert (sizes, file_names(tmp_path)) == ([], [])
    with_free_bytes(monkeypatch, 4 * (1 << 20))
    measure_directory(tmp_path, seconds=0.01)
    assert sizes == [1 << 20]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (1000, "expected a temporary file of at least 1.05 MB .* found a size of 1.00 kB"),
        ((1 << 20) - 1, "expected a temporary file of at least 1.05 MB"),
        (5_000_001, "expected a temporary file that fits, .* of 5.00 MB where 5.00 MB are free"),
    ],
)
def test_a_size_that_cannot_be_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: int, words: str
) -> None:
    with_free_bytes(monkeypatch, 5_000_000)
    sizes = probe_sizes(monkeypatch)
    with pytest.raises(InputError, match=words):
        measure_directory(tmp_path, probe_bytes=asked)
    assert (sizes, file_names(tmp_path)) == ([], [])


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=r"gone: expected a directory that takes .* No such file"):
        measure_directory(tmp_path / "gone", probe_bytes=PROBE_BYTES)


def test_the_file_is_removed_after_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[str]] = []

    def fail(paths: list[str], seconds: float) -> str:
        seen.append([path for path in paths if Path(path).stat().st_size == PROBE_BYTES])
        raise ReadError("broken", "repair it")

    monkeypatch.setattr(_k3rs, "measure_device", fail)
    with pytest.raises(ReadError, match="broken"):
        measure_directory(tmp_path, probe_bytes=PROBE_BYTES)
    assert len(seen[0]) == 1
    assert file_names(tmp_path) == []


def test_a_full_disk_is_a_warning_and_leaves_no_file(tmp_path: Path) -> None:
    done = run_python(
        tmp_path, "-c", LIMITED, "doctor", "--probe-size", "64MB", "--seconds", "0.01", "--json"
    )
    assert (done.status, done.stderr) == (0, "")
    assert done.facts["device"] is None
    (check,) = (check for check in done.facts["checks"] if check["name"] == "device")
    assert check["status"] == "warning"
    assert check["found"].startswith("not measured: ")
    assert file_names(tmp_path) == []


@pytest.mark.parametrize(
    ("size", "seconds", "later_s"),
    [("8MB", "100", 0.5), ("400MB", "1", 0.0)],
    ids=["measuring", "writing"],
)
def test_the_file_is_removed_after_ctrl_c(
    tmp_path: Path, size: str, seconds: str, later_s: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "k3rs", "doctor", "--probe-size", size, "--seconds", seconds],
        cwd=tmp_path,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + TIME_LIMIT_S
    while not any(tmp_path.iterdir()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(later_s)
    sent_at = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=TIME_LIMIT_S)
    assert time.monotonic() - sent_at < 5
    assert (process.returncode, stdout, stderr) == (130, b"", b"error: interrupted\n")
    assert file_names(tmp_path) == []


def test_the_shards_of_a_model_are_measured_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, copied: Path
) -> None:
    def refuse(path: str, size_bytes: int) -> None:
        pytest.fail(f"{path} is written")

    monkeypatch.setattr(_k3rs, "write_probe_file", refuse)
    before = file_names(copied)
    device = measure_shards(copied, seconds=0.01)
    sizes = [path.stat().st_size for path in copied.glob("*.safetensors")]
    assert len(sizes) == 6
    assert device == Device(
        str(copied),
        device.tiles_gb_s,
        device.experts_gb_s,
        device.direct,
        device.why,
        False,
        sum(sizes),
    )
    assert device.tiles_gb_s > 0
    assert file_names(copied) == before


def test_holes_are_noticed(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10_000_000)
    assert measure_shards(tmp_path, seconds=0.01).sparse


def test_a_directory_without_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-000096.safetensors").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match=r"expected .*safetensors.* found none"):
        measure_shards(tmp_path)
