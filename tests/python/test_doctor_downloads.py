"""`k3rs doctor` on models that are not complete, and on places for one to come."""

import shlex
from pathlib import Path

import pytest
from doctor_machine import Examine, check, with_free_bytes, write_manifest

import k3rs
from k3rs.cli.parser import build_parser
from k3rs.doctor.estimate import RELEASE
from k3rs.hub.manifest import MANIFEST_FILE
from k3rs.hub.release import RELEASED_SHARD_BYTES

pytest_plugins = ["doctor_fixtures"]

RELEASED_BYTES = 1_560_936_091_448


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
    assert check(report, "space").found.endswith("the released model needs 1.56 TB more")
    assert report.next == [f"k3rs download {tmp_path}"]
    # The directory that is suggested above it, with a part of another shard.
    (tmp_path / "above").mkdir()
    place = tmp_path / "above" / "Kimi-K3"
    place.mkdir()
    for moved in (name, MANIFEST_FILE):
        (tmp_path / moved).rename(place / moved)
    with (place / "model-00002-of-000096.safetensors.partial").open("wb") as part:
        part.truncate(10**10)
    free_bytes = RELEASED_BYTES - RELEASED_SHARD_BYTES[name] - 10**10
    with_free_bytes(monkeypatch, free_bytes)
    for above, asked in ((tmp_path / "above", place), (place, place)):
        report = examine(None, above)
        assert check(report, "space").status == "ok"
        assert check(report, "space").found.endswith("the released model needs 1.55 TB more")
        assert report.next == [f"k3rs download {asked}"]
    with_free_bytes(monkeypatch, free_bytes - 1)
    report = examine(None, tmp_path / "above")
    assert check(report, "space").status == "warning"
    assert report.next == ['k3rs generate --prompt "In the beginning"']


def test_a_release_that_is_all_there_is_examined_next(examine: Examine, tmp_path: Path) -> None:
    place = tmp_path / "Kimi-K3"
    place.mkdir()
    for name, size_bytes in RELEASED_SHARD_BYTES.items():
        with (place / name).open("wb") as file:
            file.truncate(size_bytes)
    assert examine(None, tmp_path).next == [f"k3rs doctor {place}"]


def test_shards_without_a_list_of_files_are_a_download_too(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = tmp_path / "model-00002-of-000096.safetensors.partial"
    with part.open("wb") as file:
        file.truncate(10**10)
    with_free_bytes(monkeypatch, RELEASED_BYTES - 10**10)
    assert examine(None, tmp_path).next == [f"k3rs download {tmp_path}"]


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
    run = f'k3rs generate {copied} --layers 5 --preset workstation --prompt "In the beginning"'
    assert report.next == [run, f"k3rs inspect {copied}"]
    write_manifest(copied, "some/model", {})
    report = examine(copied)
    assert report.next == [run, f"k3rs download some/model {copied}"]
    assert {check.name for check in report.checks}.isdisjoint({"space"})


def test_the_rest_of_a_download_is_suggested_where_it_fits(
    examine: Examine, monkeypatch: pytest.MonkeyPatch, copied: Path
) -> None:
    name = "model-00004-of-000006.safetensors"
    (copied / name).rename(copied / f"{name}.partial")
    begun_bytes = (copied / f"{name}.partial").stat().st_size
    write_manifest(copied, "some/model", {name: begun_bytes + 1000})
    run, download = examine(copied).next
    assert download == f"k3rs download some/model {copied}"
    with_free_bytes(monkeypatch, 1000)
    report = examine(copied)
    assert check(report, "space").found == "1.00 kB free, the model needs 1.00 kB more"
    assert report.next == [run, download]
    with_free_bytes(monkeypatch, 999)
    report = examine(copied)
    assert "larger disk" in str(check(report, "space").advice)
    assert report.next == [run]
    # What is too long for the file is fetched again.
    write_manifest(copied, "some/model", {name: begun_bytes - 1})
    with_free_bytes(monkeypatch, begun_bytes - 2)
    assert check(examine(copied), "space").status == "warning"


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
    run = f"k3rs generate '{partly_released}' --layers 2 --preset workstation --ids 1,2,3"
    assert report.next == [run, f"k3rs download '{partly_released}'"]
    with_free_bytes(monkeypatch, missing_bytes - 1)
    report = examine(partly_released)
    assert check(report, "space").status == "warning"
    assert "larger disk" in str(check(report, "space").advice)
    assert report.next == [run]
    # The shard of the embedding, without which nothing runs.
    (partly_released / "model-00094-of-000096.safetensors").unlink()
    assert examine(partly_released).next == ['k3rs generate --prompt "In the beginning"']


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


@pytest.mark.parametrize("content", ["", "{", '{"files": 1}', None])
def test_a_damaged_list_of_files_is_a_warning(
    examine: Examine,
    monkeypatch: pytest.MonkeyPatch,
    copied: Path,
    partly_released: Path,
    content: str | None,
) -> None:
    with_free_bytes(monkeypatch, RELEASED_BYTES)
    for directory in (copied, partly_released):
        if content is None:
            (directory / MANIFEST_FILE).mkdir()
        else:
            (directory / MANIFEST_FILE).write_text(content, encoding="utf-8")
    report = examine(copied)
    assert report.failures == []
    assert check(report, "model").status == "ok"
    assert check(report, "manifest").status == "warning"
    assert MANIFEST_FILE in check(report, "manifest").found
    assert "remove it" in str(check(report, "manifest").advice)
    run = f'k3rs generate {copied} --preset workstation --prompt "In the beginning"'
    assert report.next == [run]
    # It would stop a download.
    assert examine(partly_released).next[1:] == [f"k3rs inspect '{partly_released}'"]


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
