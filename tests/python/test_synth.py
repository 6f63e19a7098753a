"""`k3rs synth`: made-up checkpoints, from the command line to generated tokens."""

import gzip
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT_S, RunK3rs, command_environment, file_names

import k3rs

SHARED = Path(__file__).parents[3] / "shared" / "data"
FACTS = {
    "sparse",
    "seed",
    "layers",
    "experts",
    "vocabulary",
    "shards",
    "tensors",
    "tensor_bytes",
    "file_bytes",
    "unknown_config_keys",
    "disk_bytes",
}


@pytest.fixture
def config(model_path: Path) -> Path:
    """A config with small sizes."""
    return model_path / "config.json"


def test_the_release_is_written_as_holes_within_seconds(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    directory = tmp_path / "release"
    done = run_k3rs("synth", directory, "--sparse", "--json")
    assert (done.status, done.stderr) == (0, "")
    facts = done.facts
    assert set(facts) == FACTS
    assert (facts["layers"], facts["experts"], facts["shards"]) == (93, 896, 96)
    assert (facts["tensors"], facts["tensor_bytes"]) == (497_220, 1_560_860_324_864)
    sizes = {path.name: path.stat().st_size for path in directory.glob("*.safetensors")}
    assert sum(sizes.values()) == facts["file_bytes"] == 1_560_936_091_448
    on_disk = sum(512 * path.stat().st_blocks for path in directory.iterdir())
    assert facts["disk_bytes"] == on_disk <= 150_000_000

    if not SHARED.is_dir():
        pytest.skip(f"there is no {SHARED} to compare names and sizes with")
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    assert index == json.loads(gzip.decompress((SHARED / "k3_index.json.gz").read_bytes()))
    published = (SHARED / "k3_shard_sizes.txt").read_text().split()
    assert sizes == dict(zip(published[::2], map(int, published[1::2]), strict=True))


def test_random_weights_give_texts_that_depend_on_the_seed(
    run_k3rs: RunK3rs, tmp_path: Path, config: Path
) -> None:
    generated = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        directory = tmp_path / name
        made = run_k3rs("synth", directory, "--config", config, "--seed", seed)
        assert (made.status, made.stderr) == (0, "")
        *_, weights, following = made.stdout.splitlines()
        assert weights == f"weights: random, seed {seed}"
        assert following == f"next: k3rs generate {directory} --ids 3,4,5,6,7 -n 2"
        done = run_k3rs(
            "generate", directory, "--ids", "3,4,5,6,7", "--ignore-stop", "--json", "-", "--quiet"
        )
        assert done.status == 0, done.stderr
        generated[name] = done.facts["generated_ids"]
    assert generated["first"] == generated["again"] != generated["other"]
    assert len(set(generated["first"])) > 3


def test_zeros_are_a_model_too(run_k3rs: RunK3rs, tmp_path: Path, config: Path) -> None:
    directory = tmp_path / "zeros"
    assert run_k3rs("synth", directory, "--config", config, "--sparse").status == 0
    done = run_k3rs("generate", directory, "--ids", "3,4", "-n", "3")
    assert (done.status, done.stdout) == (0, "0,0,0\n")


def test_sizes_can_be_chosen(tmp_path: Path) -> None:
    directory = tmp_path / "small"
    facts = k3rs.synthesize(directory, layers=4, experts=16, vocab=320, sparse=True)
    assert (facts["layers"], facts["experts"], facts["vocabulary"]) == (4, 16, 320)
    assert facts["seed"] is None
    assert k3rs.inspect(directory)["model"]["layers"] == 4


def test_progress_is_reported(tmp_path: Path, config: Path) -> None:
    calls: list[tuple[int, int]] = []
    k3rs.synthesize(
        tmp_path / "model",
        config=config,
        vocab=1_000_000,
        progress=lambda done, steps: calls.append((done, steps)),
    )
    assert calls == sorted(calls)
    assert len(calls) > 1
    assert all(0 < done <= steps == calls[0][1] for done, steps in calls)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--experts", "15"], "at least 16 experts, found 15"),
        (["--layers", "94"], "from 1 to 93, found 94"),
        (["--vocab", "319"], "at least 320 ids, found 319"),
        (["--seed", "-1"], "expected `seed` from 0 to"),
        (["--layers", "0"], "expected a whole number of at least 1"),
    ],
)
def test_unusable_sizes_are_wrong_usage(
    run_k3rs: RunK3rs, tmp_path: Path, arguments: list[str], words: str
) -> None:
    done = run_k3rs("synth", tmp_path / "model", *arguments)
    assert (done.status, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: ")
    assert file_names(tmp_path) == []


def test_a_directory_with_something_in_it_is_refused(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    done = run_k3rs("synth", tmp_path, "--sparse")
    assert (done.status, done.stdout) == (2, "")
    assert "expected a new or an empty directory, found files in it" in done.stderr
    assert "hint: " in done.stderr
    assert file_names(tmp_path) == ["letter"]


def test_a_config_that_is_not_understood_is_refused(
    run_k3rs: RunK3rs, tmp_path: Path, config: Path
) -> None:
    facts = json.loads(config.read_bytes())
    facts["text_config"]["hidden_act"] = "relu"
    broken = tmp_path / "config.json"
    broken.write_text(json.dumps(facts))
    done = run_k3rs("synth", tmp_path / "model", "--config", broken)
    assert (done.status, done.stdout) == (2, "")
    assert "`text_config.hidden_act` must be" in done.stderr


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    with subprocess.Popen(
        [sys.executable, "-m", "k3rs", "synth", directory, "--layers", "2", "--experts", "16"],
        cwd=tmp_path,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        deadline = time.monotonic() + TIME_LIMIT_S
        while not any(tmp_path.glob("model/.*.partial")):
            assert process.poll() is None, process.stderr and process.stderr.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=TIME_LIMIT_S)
    assert (process.returncode, stdout, stderr.decode()) == (130, b"", "error: interrupted\n")
    assert file_names(tmp_path) == []
