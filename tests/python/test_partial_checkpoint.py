"""`--layers N`: the first layers of a model, and of a checkpoint that has no more.

The truth is a checkpoint that was made with N layers only: another config, other shards.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from checkpoint_edit import (
    INDEX,
    StoredTensor,
    copy_checkpoint,
    edit_config,
    edited_json,
    edited_shard,
    edited_tensor,
    shard_of,
)
from harness import (
    TIME_LIMIT_S,
    Completed,
    Prompt,
    RunK3rs,
    command_environment,
    joined,
    smallest_budget,
)
from numpy.typing import NDArray

import k3rs
from k3rs.exceptions import CheckpointError, InputError, SessionFileError

Bits: TypeAlias = NDArray[np.uint32]

LAYERS = 7
POSITIONS = 64
LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.")
SHARED_OPTIONS: dict[str, Any] = {"positions": POSITIONS, "threads": 1}


@pytest.fixture(scope="module")
def text(prompts: list[Prompt]) -> list[int]:
    return prompts[-1].ids


def layer_of(name: str) -> int:
    """Of a tensor; -1 if it is outside of the layers."""
    found = LAYER.match(name)
    return -1 if found is None else int(found[1])


def cut_to(directory: Path, layers: int) -> None:
    """Makes a checkpoint one with fewer layers, in its config and in its files."""

    def shorten(config: dict[str, Any]) -> None:
        config["num_hidden_layers"] = layers
        attention = config["linear_attn_config"]
        for kind in ("kda_layers", "full_attn_layers"):
            attention[kind] = [number for number in attention[kind] if number <= layers]

    edit_config(directory, shorten)
    for shard in directory.glob("*.safetensors"):
        with edited_shard(shard) as tensors:
            keep_first(tensors, layers)
        if not tensors:
            shard.unlink()
    with edited_json(directory / INDEX) as index:
        keep_first(index["weight_map"], layers)


def keep_first(tensors: dict[str, StoredTensor] | dict[str, str], layers: int) -> None:
    for name in [name for name in tensors if layer_of(name) >= layers]:
        del tensors[name]


def remove_later_shards(directory: Path, layers: int) -> list[str]:
    """Deletes the shards that only later layers need; the index still tells of them."""
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    needed = {shard for name, shard in index.items() if layer_of(name) < layers}
    later = sorted(set(index.values()) - needed)
    for name in later:
        (directory / name).unlink()
    assert later
    return later


def bits(logits: NDArray[np.float32]) -> Bits:
    """-0 differs from 0."""
    assert logits.dtype == np.float32
    return logits.view(np.uint32)


def read(model: k3rs.Model, ids: list[int]) -> Bits:
    return bits(model.session().forward(ids, all_positions=True))


def all_bits(directory: Path, ids: list[int], layers: int | None = None) -> Bits:
    with k3rs.Model.open(directory, memory="1GB", layers=layers, **SHARED_OPTIONS) as model:
        return read(model, ids)


# The same as a model with N layers


@pytest.mark.parametrize("layers", range(1, LAYERS + 1))
def test_the_logits_are_those_of_a_model_with_so_many_layers(
    model_path: Path, copied: Path, text: list[int], layers: int
) -> None:
    cut_to(copied, layers)
    truth = all_bits(copied, text)
    for memory in ("1GB", smallest_budget(model_path, POSITIONS, threads=1)):
        with k3rs.Model.open(model_path, memory=memory, layers=layers, **SHARED_OPTIONS) as model:
            assert model.facts["model"]["layers"] == layers
            found = read(model, text)
            assert (found == truth).all()
            assert len({row.tobytes() for row in found}) == len(text)


def test_every_number_of_layers_is_another_model(model_path: Path, text: list[int]) -> None:
    """Equal logits everywhere would make the comparison above hold."""
    seen = [all_bits(model_path, text, layers).tobytes() for layers in range(1, LAYERS + 1)]
    assert len(set(seen)) == LAYERS
    assert seen[-1] == all_bits(model_path, text).tobytes()


def test_the_hidden_states_are_the_first_of_the_whole_model(
    model_path: Path, model: k3rs.Model, text: list[int]
) -> None:
    _, whole = model.session().forward(text, capture=("hidden", "router"))
    for layers in range(1, LAYERS + 1):
        with k3rs.Model.open(model_path, memory="1GB", layers=layers, **SHARED_OPTIONS) as first:
            _, seen = first.session().forward(text, capture=("hidden", "router"))
        assert seen["hidden"].shape == (layers, *whole["hidden"].shape[1:])
        assert (bits(seen["hidden"]) == bits(whole["hidden"][:layers])).all()
        # The first layer is dense.
        assert len(seen["router"]) == layers - 1
        for (ids, weights), (whole_ids, whole_weights) in zip(
            seen["router"], whole["router"], strict=False
        ):
            assert (ids == whole_ids).all()
            assert (bits(weights) == bits(whole_weights)).all()


def test_the_facts_are_those_of_a_model_with_so_many_layers(model_path: Path, copied: Path) -> None:
    layers = 3
    cut_to(copied, layers)
    with (
        k3rs.Model.open(copied, memory="1GB") as cut,
        k3rs.Model.open(model_path, memory="1GB", layers=layers) as first,
    ):
        assert first.config == cut.config
        paths = {"path": ""}
        assert first.facts["model"] | paths == cut.facts["model"] | paths
    plans = [k3rs.plan(copied, threads=1), k3rs.plan(model_path, threads=1, layers=layers)]
    whole = k3rs.plan(model_path, threads=1)
    assert plans[1]["minimum_bytes"] < whole["minimum_bytes"]
    # The table of shards is a little longer where there are more.
    assert plans[1]["minimum_bytes"] == pytest.approx(plans[0]["minimum_bytes"], rel=1e-3)


# Less than all


@pytest.mark.parametrize("has_index", [True, False], ids=["index", "no index"])
def test_a_part_runs_as_the_whole_does(
    model_path: Path, copied: Path, text: list[int], has_index: bool
) -> None:
    missing = remove_later_shards(copied, 3)
    if not has_index:
        (copied / INDEX).unlink()
    for layers in (1, 2, 3):
        assert (all_bits(copied, text, layers) == all_bits(model_path, text, layers)).all()
    with pytest.raises(CheckpointError) as refused:
        k3rs.Model.open(copied, memory="1GB", layers=4)
    assert "model.layers.3." in str(refused.value)
    assert refused.value.hint
    with pytest.raises(CheckpointError) as refused:
        k3rs.Model.open(copied, memory="1GB")
    assert all(name in str(refused.value) for name in missing)
    assert "--layers N" in str(refused.value.hint)


def test_one_file_without_an_index(model_path: Path, copied: Path, text: list[int]) -> None:
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(copied.glob("*.safetensors")):
        with edited_shard(shard) as some:
            tensors |= some
        shard.unlink()
    (copied / INDEX).unlink()
    keep_first(tensors, 5)
    single = copied / "model.safetensors"
    single.write_bytes((2).to_bytes(8, "little") + b"{}")
    with edited_shard(single) as written:
        written.update(tensors)
    assert (all_bits(copied, text, 5) == all_bits(model_path, text, 5)).all()
    assert (all_bits(copied, text, 2) == all_bits(model_path, text, 2)).all()
    for layers in (None, 6):
        with pytest.raises(CheckpointError, match=r"model\.layers\.5\.") as refused:
            k3rs.Model.open(copied, memory="1GB", layers=layers)
        assert refused.value.hint


def test_a_shard_that_is_needed_is_missed_by_the_names_of_its_tensors(copied: Path) -> None:
    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    shard_of(copied, name).unlink()
    with pytest.raises(CheckpointError) as refused:
        k3rs.Model.open(copied, memory="1GB", layers=2)
    assert "language_model.model.layers." in str(refused.value)
    assert refused.value.hint


def test_what_is_wrong_in_a_later_layer_does_not_matter(
    model_path: Path, copied: Path, text: list[int]
) -> None:
    with edited_tensor(copied, "language_model.model.layers.6.mlp_res_norm.weight") as tensor:
        tensor.data[:] = b"\xff" * len(tensor.data)
    assert (all_bits(copied, text, 6) == all_bits(model_path, text, 6)).all()


# The command line


def test_the_commands_take_it(
    run_k3rs: RunK3rs, without_tokenizer: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    ids = prompts[0].ids
    part = copy_checkpoint(without_tokenizer, tmp_path / "part")
    remove_later_shards(part, 3)
    with k3rs.Model.open(without_tokenizer, memory="1GB", layers=3) as model:
        expected = [token.id for token in model.generate(ids, max_tokens=5, stop_ids=())]
    arguments = ["--ids", joined(ids), "-n", 5, "--ignore-stop", "--quiet"]
    done = run_k3rs("generate", part, *arguments, "--layers", 3, "--json", "-")
    assert done.status == 0, done.stderr
    assert done.facts["generated_ids"] == expected
    assert done.facts["model"]["layers"] == 3
    assert run_k3rs("plan", part, "--memory", "1GB", "--layers", 3).status == 0
    done = run_k3rs("generate", part, *arguments)
    assert (done.status, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert "model-00003-of-000006.safetensors" in error
    assert hint.startswith("hint: ")
    assert "--layers N" in hint


def test_score_and_chat_take_it(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    nano = k3rs.shipped_model()
    file = tmp_path / "text"
    file.write_text("In the beginning God created the heaven and the earth.", encoding="utf-8")
    whole = run_k3rs("score", nano, file, "--json").facts
    first = run_k3rs("score", nano, file, "--json", "--layers", 2).facts
    assert first["tokens"] == whole["tokens"]
    assert first["nll"] > whole["nll"]
    chat = subprocess.run(
        [sys.executable, "-m", "k3rs", "chat", "--layers", "2", "-n", "3", "--seed", "1"],
        input=b"Hello\n",
        capture_output=True,
        env=command_environment(),
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert chat.returncode == 0, chat.stderr
    assert b": 2 layers, " in chat.stderr


@pytest.mark.parametrize("layers", ["0", "-1", "two", "99"])
def test_numbers_that_no_model_has(run_k3rs: RunK3rs, layers: str) -> None:
    assert_wrong_usage(run_k3rs("generate", "--ids", "1", f"--layers={layers}"), layers)


def test_every_command_refuses_more_layers_than_there_are(
    run_k3rs: RunK3rs, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("In the beginning", encoding="utf-8")
    for command in (["score", tmp_path / "text"], ["chat"], ["plan"]):
        assert_wrong_usage(run_k3rs(*command, "--layers", 99), "99")


def assert_wrong_usage(done: Completed, found: str) -> None:
    assert (done.status, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert f"found `{found}`" in error or f"found {found}" in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("layers", [0, -1, LAYERS + 1])
def test_numbers_that_no_model_has_in_python(model_path: Path, layers: int) -> None:
    with pytest.raises(InputError) as refused:
        k3rs.Model.open(model_path, memory="1GB", layers=layers)
    assert str(layers) in str(refused.value)
    with pytest.raises(InputError):
        k3rs.plan(model_path, layers=layers)


# What belongs to another model


def test_sessions_of_the_whole_model_are_refused_and_the_other_way_round(
    model: k3rs.Model, model_path: Path, tmp_path: Path, text: list[int]
) -> None:
    with k3rs.Model.open(model_path, memory="1GB", layers=6) as first:
        for saver, loader in ((model, first), (first, model)):
            session = saver.session()
            session.forward(text)
            file = tmp_path / "text.session"
            session.save(file)
            with pytest.raises(SessionFileError) as refused:
                loader.load_session(file)
            assert refused.value.hint
            file.unlink()


def test_a_session_goes_on_in_the_same_part(
    model_path: Path, tmp_path: Path, text: list[int]
) -> None:
    options: dict[str, Any] = {"memory": "1GB", "layers": 4, **SHARED_OPTIONS}
    with k3rs.Model.open(model_path, **options) as model:
        session = model.session()
        session.forward(text[:-2])
        session.save(tmp_path / "text.session")
    with k3rs.Model.open(model_path, **options) as model:
        loaded = model.load_session(tmp_path / "text.session")
        found = bits(loaded.forward(text[-2:], all_positions=True))
    assert (found == all_bits(model_path, text, 4)[-2:]).all()


def test_a_packed_trunk_of_the_whole_model_is_refused(model_path: Path, tmp_path: Path) -> None:
    k3rs.pack_trunk(model_path, tmp_path)
    with pytest.raises(InputError, match="found both") as refused:
        k3rs.Model.open(model_path, memory="1GB", layers=LAYERS - 1, trunk=tmp_path)
    assert refused.value.hint
