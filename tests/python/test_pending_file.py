from pathlib import Path

import numpy as np
import pytest
from harness import file_names

from k3rs.cli.pending_file import LogitsFile, PendingFile


def test_a_file_appears_on_commit_only(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    target.write_bytes(b"old")
    with PendingFile(str(target)) as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
        file.commit()
    assert target.read_bytes() == b"new"
    assert file_names(tmp_path) == ["run.json"]


def test_without_commit_nothing_changes(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    target.write_bytes(b"old")
    with PendingFile(str(target)) as file:
        file.write(b"new")
    assert target.read_bytes() == b"old"
    assert file_names(tmp_path) == ["run.json"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    with PendingFile(str(tmp_path / "link")) as file:
        file.write(b"new")
        file.commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_a_device_is_written_in_place() -> None:
    with PendingFile("/dev/null") as file:
        file.write(b"gone")
        file.commit()
    assert Path("/dev/null").is_char_device()


def test_a_path_that_cannot_be_written_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as refused:
        PendingFile(str(tmp_path / "absent" / "run.json"))
    assert refused.value.filename == str(tmp_path / "absent" / "run.json")


def test_logits_are_a_matrix_that_numpy_reads(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
    with LogitsFile(str(tmp_path / "logits.npy")) as file:
        for row in rows:
            file.append(row)
        file.commit()
    read = np.load(tmp_path / "logits.npy")
    assert read.dtype == np.float32
    assert np.array_equal(read, rows)


def test_no_logits_are_an_empty_matrix(tmp_path: Path) -> None:
    with LogitsFile(str(tmp_path / "logits.npy")) as file:
        file.commit()
    assert np.load(tmp_path / "logits.npy").shape == (0, 0)
