"""Checkpoints, directories and prompts that are not as they should be, through the user's door.

Each is refused with its name, or understood exactly; what a broken file means is never guessed.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_edit import (
    StoredTensor,
    copy_checkpoint,
    edit_config,
    edited_tensor,
    rename_tensor,
    shard_of,
    tensor_names,
)
from harness import TIME_LIMIT_S, Prompt, RunK3rs, command_environment
from numpy.typing import NDArray

import k3rs
from k3rs import _k3rs
from k3rs.exceptions import CheckpointError, InputError

LAYERS = "language_model.model.layers"


def bits_of(directory: Path, ids: list[int]) -> NDArray[np.uint32]:
    """The bits of the logits after every id."""
    with k3rs.Model.open(directory, memory="1GB", threads=1) as model:
        return model.session().forward(ids, all_positions=True).view(np.uint32)


def test_a_copy_is_the_same_model(copied: Path, model_path: Path, prompts: list[Prompt]) -> None:
    with edited_tensor(copied, f"{LAYERS}.1.input_layernorm.weight"):
        pass
    ids = prompts[1].ids
    assert (bits_of(copied, ids) == bits_of(model_path, ids)).all()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (f"{LAYERS}.2.self_attn.q_b_proj.weight", f"{LAYERS}.2.self_attn.q_bproj.weight"),
        (f"{LAYERS}.4.input_layernorm.weight", f"{LAYERS}.4.input_layer_norm.weight"),
        (
            f"{LAYERS}.5.block_sparse_moe.experts.7.w2.weight_scale",
            f"{LAYERS}.5.block_sparse_moe.experts.7.w2.weights_scale",
        ),
    ],
)
def test_a_misspelt_name_is_found_out(
    copied: Path, run_k3rs: RunK3rs, right: str, wrong: str
) -> None:
    rename_tensor(copied, right, wrong)
    with pytest.raises(CheckpointError) as refused:
        k3rs.Model.open(copied, memory="1GB")
    said = f"{refused.value}\n{refused.value.hint}"
    assert f"`{right}`" in said
    assert f"`{wrong}`" in said
    done = run_k3rs("generate", copied, "--ids", "1", "-n", 1)
    assert (done.status, done.stdout) == (1, "")
    assert right in done.stderr
    assert wrong in done.stderr


def test_without_a_gate_bound_the_decay_is_the_unbounded_one(
    copied: Path, model_path: Path, tmp_path: Path, prompts: list[Prompt]
) -> None:
    null = copy_checkpoint(model_path, tmp_path / "null")
    edit_config(copied, lambda config: config["linear_attn_config"].pop("gate_lower_bound"))
    edit_config(null, lambda config: config["linear_attn_config"].update(gate_lower_bound=None))
    ids = prompts[1].ids
    absent = bits_of(copied, ids)
    assert (absent == bits_of(null, ids)).all()
    # Read as the release's -5 it would be another model; `forms` has the right values.
    released = bits_of(model_path, ids).view(np.float32)
    assert np.abs(absent.view(np.float32) - released).max() > 1


def cut(tensor: StoredTensor, heads: int) -> None:
    tensor.data = tensor.data[: heads * 4]
    tensor.shape = [heads]


def pad(value: float) -> Callable[[StoredTensor, int], None]:
    def change(tensor: StoredTensor, heads: int) -> None:
        for index in range(heads, tensor.shape[0]):
            tensor.put(index, value)

    return change


@pytest.mark.parametrize(
    "change", [cut, pad(0.0), pad(float("nan")), pad(3e38)], ids=["cut", "zeros", "nan", "huge"]
)
def test_the_padding_of_a_log_is_never_read(
    copied: Path,
    model_path: Path,
    prompts: list[Prompt],
    change: Callable[[StoredTensor, int], None],
) -> None:
    names = [name for name in tensor_names(copied) if name.endswith("A_log")]
    assert len(names) == 4
    for name in names:
        with edited_tensor(copied, name) as tensor:
            assert tensor.shape == [32]
            change(tensor, 3)
    ids = prompts[1].ids
    assert (bits_of(copied, ids) == bits_of(model_path, ids)).all()


def turn(tensor: StoredTensor) -> None:
    tensor.shape = tensor.shape[::-1]


def call_halves(tensor: StoredTensor) -> None:
    tensor.dtype = "F16"


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        (f"{LAYERS}.0.mlp.up_proj.weight", turn, "BF16 with shape [80, 224]"),
        (f"{LAYERS}.6.self_attn.o_proj.weight", call_halves, "F16 with shape [80, 72]"),
        (
            f"{LAYERS}.3.block_sparse_moe.experts.0.w1.weight_packed",
            turn,
            "U8 with shape [48, 64]",
        ),
    ],
)
def test_another_shape_or_type_is_refused(
    copied: Path, name: str, change: Callable[[StoredTensor], None], found: str
) -> None:
    with edited_tensor(copied, name) as tensor:
        change(tensor)
    with pytest.raises(CheckpointError) as refused:
        k3rs.Model.open(copied, memory="1GB")
    assert f"`{name}`" in str(refused.value)
    assert f"found {found}" in str(refused.value)
    assert shard_of(copied, name).name in str(refused.value)


def test_a_truncated_shard_is_refused_before_any_token(copied: Path, run_k3rs: RunK3rs) -> None:
    shard = shard_of(copied, "language_model.lm_head.weight")
    os.truncate(shard, shard.stat().st_size - 1)
    done = run_k3rs("generate", copied, "--ids", "1", "-n", 1)
    assert (done.status, done.stdout) == (1, "")
    assert shard.name in done.stderr
    assert "\nhint: " in done.stderr


def test_missing_shards_are_named_all_at_once(copied: Path, run_k3rs: RunK3rs) -> None:
    missing = [f"model-0000{number}-of-000006.safetensors" for number in (2, 4)]
    for name in missing:
        (copied / name).unlink()
    done = run_k3rs("generate", copied, "--ids", "1", "-n", 1)
    assert (done.status, done.stdout) == (1, "")
    assert all(name in done.stderr for name in missing)
    assert "model-00003-of" not in done.stderr


@pytest.mark.parametrize("ids", [[], [-1], [320], [0, 2**32], [0, 2**63 - 1]])
def test_the_core_checks_ids_itself(model_path: Path, ids: list[int]) -> None:
    session = _k3rs.Engine.open(str(model_path), memory_bytes=10**9).session()
    with pytest.raises(InputError, match=r"vocabulary|no token ids"):
        session.forward(ids)
    assert session.position == 0
    logits, _ = session.forward([319])
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("ids", ["", "-1", "320", "1,2,99999999999999999999", "1, ,2"])
def test_unusable_ids_on_the_command_line(run_k3rs: RunK3rs, model_path: Path, ids: str) -> None:
    done = run_k3rs("generate", model_path, f"--ids={ids}", "-n", 1)
    assert (done.status, done.stdout) == (2, "")
    assert "\nhint: " in done.stderr


@pytest.mark.parametrize("place", ["a b/c d", "Füße 世界/モデル", "-n"])
@pytest.mark.parametrize("written", ["{}", "./{}/"])
def test_relative_paths_with_any_characters(
    run_k3rs: RunK3rs,
    model_path: Path,
    tmp_path: Path,
    prompts: list[Prompt],
    place: str,
    written: str,
) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).symlink_to(model_path, target_is_directory=True)
    done = run_k3rs(
        "generate", "--ids", prompts[0].ids[0], "-n", 2, "--ignore-stop", "--json", "-",
        "--", written.format(place),
    )  # fmt: skip
    assert done.status == 0, done.stderr
    assert done.facts["generated_ids"] == prompts[0].greedy[:2]


def test_help_into_head(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m k3rs --help"
    done = subprocess.run(
        ["bash", "-c", f'{command} | head -1; echo "${{PIPESTATUS[@]}}"'],
        cwd=tmp_path,
        env=command_environment(),
        capture_output=True,
        timeout=TIME_LIMIT_S,
        text=True,
        check=True,
    )
    usage, statuses = done.stdout.splitlines()
    assert usage.startswith("usage: k3rs")
    assert statuses == "0 0"
    assert done.stderr == ""


def snapshot(directory: Path) -> dict[str, Any]:
    """Everything about the files of a directory that a write would change."""
    facts = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.stat()
        facts[str(path)] = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_mode)
    return facts


def test_nothing_is_written_into_a_model(
    run_k3rs: RunK3rs, copied: Path, prompts: list[Prompt]
) -> None:
    for path in [*copied.iterdir(), copied]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(copied)
    for arguments in (
        ["generate", copied, "--ids", prompts[0].ids[0], "-n", 2, "--ignore-stop", "--quiet"],
        ["plan", copied],
        ["inspect", copied],
    ):
        assert run_k3rs(*arguments).status == 0
    assert snapshot(copied) == before
    copied.chmod(0o755)
