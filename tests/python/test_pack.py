"""`k3rs pack` and `--trunk`: the same bits from another disk, and packs that were interrupted."""

import fcntl
import os
import random
import re
import shlex
import shutil
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from checkpoint_edit import copy_checkpoint, edited_tensor
from harness import (
    Completed,
    Prompt,
    RunK3rs,
    file_names,
    joined,
    smallest_budget,
)
from numpy.typing import NDArray
from packed_trunks import PARTIAL, TRUNK, TensorFile, assert_refused, file_digest, flip_bit
from safetensors import safe_open

import k3rs
from k3rs import _k3rs
from k3rs.exceptions import CheckpointError, K3Error

Stored: TypeAlias = tuple[str, list[int], bytes]

POSITIONS = 64
# More than the ring holds ahead of the matrix in use.
READ_AHEAD = 12
O_PROJ = "language_model.model.layers.4.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def packed(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the trunk of the fixture checkpoint."""
    directory = tmp_path_factory.mktemp("packed")
    k3rs.pack_trunk(model_path, directory)
    return directory


@pytest.fixture
def trunk_copy(packed: Path, tmp_path: Path) -> Path:
    """One to be spoilt."""
    return Path(shutil.copytree(packed, tmp_path / "trunk"))


@pytest.fixture(scope="module")
def text(prompts: list[Prompt]) -> list[int]:
    return prompts[-1].ids


def bits(logits: NDArray[np.float32]) -> str:
    """A digest of the float32 bits: -0 differs from 0."""
    assert logits.dtype == np.float32
    return sha256(logits.tobytes()).hexdigest()


# The same bits


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ample", [False, True], ids=["smallest", "ample"])
def test_no_bit_depends_on_where_the_trunk_is(
    model: k3rs.Model,
    model_path: Path,
    packed: Path,
    text: list[int],
    direct: bool | None,
    threads: int,
    ample: bool,
) -> None:
    truth = bits(model.session().forward(text, all_positions=True))
    smallest = smallest_budget(model_path, POSITIONS, threads=threads)
    seen = []
    for trunk in (None, str(packed)):
        engine = _k3rs.Engine.open(
            str(model_path),
            memory_bytes=10**9 if ample else smallest,
            positions=POSITIONS,
            threads=threads,
            direct=direct,
            trunk=trunk,
        )
        opened = k3rs.Model(model_path, engine, tokenizer=None)
        assert opened.plan["pinned_fraction"] == (1 if ample else 0)
        session = opened.session()
        rows = [session.forward(text[:7], all_positions=True)]
        rows += [session.forward([token])[np.newaxis] for token in text[7:]]
        assert bits(np.concatenate(rows)) == truth
        seen.append(opened.report()["io"])
    assert seen[0]["trunk_bytes_read"] == seen[1]["trunk_bytes_read"] > 0


def test_the_trunk_is_read_from_there(
    model_path: Path, packed: Path, copied: Path, model: k3rs.Model, text: list[int]
) -> None:
    """With other matrices in the checkpoint, but for their ends, the bits are the trunk's."""
    with edited_tensor(copied, O_PROJ) as tensor:
        tensor.data[256:-256] = b"\xff" * (len(tensor.data) - 512)
    with k3rs.Model.open(copied, memory="1GB", trunk=packed) as opened:
        found = bits(opened.session().forward(text, all_positions=True))
    assert found == bits(model.session().forward(text, all_positions=True))


@pytest.mark.parametrize("index", [0, -1])
def test_the_trunk_of_other_weights_is_refused(copied: Path, packed: Path, index: int) -> None:
    with edited_tensor(copied, O_PROJ) as tensor:
        tensor.data[index] ^= 1
    with pytest.raises(CheckpointError, match="expected the trunk of the model"):
        k3rs.Model.open(copied, memory="1GB", trunk=packed)


def test_the_command_generates_the_same(
    run_k3rs: RunK3rs, without_tokenizer: Path, packed: Path, prompts: list[Prompt], tmp_path: Path
) -> None:
    prompt = prompts[1]
    done = run_k3rs(
        "generate", without_tokenizer, "--ids", joined(prompt.ids), "-n", 5, "--ignore-stop",
        "--quiet", "--trunk", packed,
    )  # fmt: skip
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout.strip() == joined(prompt.greedy[:5])


def test_the_text_is_scored_the_same(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    nano, file = k3rs.shipped_model(), tmp_path / "text"
    file.write_text("In the beginning God created the heaven and the earth.", encoding="utf-8")
    k3rs.pack_trunk(nano, tmp_path / "trunk")
    arguments = ["score", nano, file, "--json"]
    assert run_k3rs(*arguments, "--trunk", tmp_path / "trunk") == run_k3rs(*arguments)


# The file


def test_the_file_holds_the_bytes_of_the_checkpoint(model_path: Path, packed: Path) -> None:
    assert file_names(packed) == [TRUNK]
    checkpoint: dict[str, Stored] = {}
    for shard in model_path.glob("*.safetensors"):
        checkpoint.update(TensorFile.of(shard).tensors())
    trunk = TensorFile.of(packed / TRUNK)
    found = trunk.tensors()
    assert found == {name: entry for name, entry in checkpoint.items() if is_streamed(name, entry)}
    assert len(found) == 90
    assert trunk.start % 4096 == 0


def is_streamed(name: str, stored: Stored) -> bool:
    """A matrix of the text; embedding rows are read one by one, and experts when they wake."""
    _, shape, _ = stored
    is_matrix = len(shape) == 2 and shape[0] > 1
    is_text = name.startswith("language_model.")
    return is_matrix and is_text and "embed_tokens" not in name and ".experts." not in name


def test_the_library_of_the_format_opens_it(packed: Path) -> None:
    path = packed / TRUNK
    with safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        seen = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    stored = TensorFile.of(path).tensors()
    assert seen == {name: (dtype, shape) for name, (dtype, shape, _) in stored.items()}


def test_the_matrices_lie_in_the_order_of_a_sweep(packed: Path) -> None:
    names = TensorFile.of(packed / TRUNK).names()
    assert names[0] == "language_model.model.layers.0.self_attn.q_proj.weight"
    assert names[-1] == "language_model.lm_head.weight"
    layers = [int(name.split(".")[3]) for name in names[:-1]]
    assert layers == sorted(layers)
    assert set(layers) == set(range(7))
    for layer in range(7):
        parts = [name.split(".")[4] for name in names[:-1] if f".layers.{layer}." in name]
        assert parts == sorted(parts, reverse=True), "attention first"


@pytest.mark.parametrize("number", [READ_AHEAD, 20, 42, 61, 89])
def test_a_sweep_reads_it_from_front_to_back(
    model_path: Path, trunk_copy: Path, number: int
) -> None:
    """Of a trunk that ends before a matrix, nothing behind it was asked for before it."""
    trunk = TensorFile.of(trunk_copy / TRUNK)
    end = trunk.begin(trunk.names()[number])
    memory = smallest_budget(model_path, POSITIONS, threads=1)
    with k3rs.Model.open(
        model_path, memory=memory, positions=POSITIONS, threads=1, trunk=trunk_copy
    ) as model:
        session = model.session()
        session.forward([1])
        os.truncate(trunk.path, end)
        with pytest.raises(K3Error) as failed:
            session.forward([2])
        assert f"cannot read `{trunk.path}` at byte {end}: " in str(failed.value)
        assert failed.value.hint


# What is refused


@pytest.mark.parametrize("command", ["generate", "--check"])
def test_what_is_not_the_trunk_of_the_model_is_refused(
    run_k3rs: RunK3rs, model_path: Path, trunk_copy: Path, tmp_path: Path, command: str
) -> None:
    def use(trunk: Path, model: Path = model_path) -> Completed:
        if command == "--check":
            return run_k3rs("pack", model, trunk, "--check")
        return run_k3rs("generate", model, "--ids", "1", "-n", 1, "--quiet", "--trunk", trunk)

    assert_refused(use(tmp_path / "nothing"), "nothing", TRUNK)
    assert_refused(use(trunk_copy, k3rs.shipped_model()), str(trunk_copy))
    os.truncate(trunk_copy / TRUNK, (trunk_copy / TRUNK).stat().st_size - 1)
    assert_refused(use(trunk_copy), str(trunk_copy))
    shutil.copy(next(model_path.glob("*.safetensors")), trunk_copy / TRUNK)
    assert_refused(use(trunk_copy), "k3rs trunk 1")


def test_a_model_that_differs_in_one_small_vector_is_another(packed: Path, copied: Path) -> None:
    """All shapes are the same, and so are the names."""
    with edited_tensor(copied, "language_model.model.norm.weight") as tensor:
        tensor.put(0, 2.0)
    with pytest.raises(CheckpointError, match="the trunk of the model") as refused:
        k3rs.Model.open(copied, memory="1GB", trunk=packed)
    assert refused.value.hint
    with pytest.raises(CheckpointError, match="the trunk of the model"):
        k3rs.pack_trunk(copied, packed)


def test_every_damage_of_the_header_is_refused(model_path: Path, trunk_copy: Path) -> None:
    trunk = TensorFile.of(trunk_copy / TRUNK)
    content = trunk.path.read_bytes()
    for offset in [*range(8), *random.Random(5).sample(range(8, trunk.start), 100)]:
        flip_bit(trunk.path, offset)
        with pytest.raises(CheckpointError) as refused:
            k3rs.Model.open(model_path, memory="1GB", threads=1, trunk=trunk_copy)
        assert refused.value.hint, offset
        flip_bit(trunk.path, offset)
    assert trunk.path.read_bytes() == content


def test_a_trunk_that_is_there_is_left_as_it_is(
    run_k3rs: RunK3rs, model_path: Path, trunk_copy: Path
) -> None:
    path = trunk_copy / TRUNK
    before = path.stat()
    done = run_k3rs("pack", model_path, trunk_copy, "--json")
    assert done.facts == {
        "directory": str(trunk_copy),
        "matrices": 90,
        "file_bytes": before.st_size,
        "resumed_bytes": before.st_size,
    }
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


# Where it writes


def test_names_with_spaces_and_directories_that_do_not_exist_yet(
    run_k3rs: RunK3rs, model_path: Path, packed: Path, tmp_path: Path
) -> None:
    model = copy_checkpoint(model_path, tmp_path / "the model")
    names = file_names(model)
    directory = tmp_path / "a new" / "fast disk"
    done = run_k3rs("pack", model, directory)
    assert done.status == 0, done.stderr
    assert re.fullmatch(r"90 matrices, 1\.23 MB\n", done.stdout)
    # As a shell takes it.
    assert done.stderr == f"use it with --trunk {shlex.quote(str(directory))}\n"
    assert file_digest(directory / TRUNK) == file_digest(packed / TRUNK)
    assert run_k3rs("pack", model, directory, "--check").status == 0
    done = run_k3rs("generate", model, "--ids", "1,2", "-n", 1, "--trunk", directory)
    assert done.status == 0, done.stderr
    assert file_names(model) == names


@pytest.mark.parametrize("below", ["", "trunk"])
def test_nothing_is_written_into_the_model(run_k3rs: RunK3rs, copied: Path, below: str) -> None:
    """Also not on request: without an index the trunk would be taken for a shard."""
    names = file_names(copied)
    done = run_k3rs("pack", copied, copied / below)
    assert (done.status, done.stdout) == (2, "")
    assert "expected a directory outside of the model\nhint: " in done.stderr
    assert file_names(copied) == names


def test_a_target_that_is_no_directory(run_k3rs: RunK3rs, model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    assert_refused(run_k3rs("pack", model_path, file), str(file))
    assert_refused(run_k3rs("pack", model_path, file / "trunk"), str(file))
    assert file.read_text(encoding="utf-8") == "mine"


def test_a_second_pack_into_the_same_directory_waits_for_nobody(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "trunk"
    directory.mkdir()
    with (directory / PARTIAL).open("wb") as partial:
        fcntl.flock(partial, fcntl.LOCK_EX)
        assert_refused(run_k3rs("pack", model_path, directory), str(directory), "another one")
        assert (directory / PARTIAL).stat().st_size == 0
    assert run_k3rs("pack", model_path, directory).status == 0
    assert file_names(directory) == [TRUNK]


def test_a_trunk_rewritten_under_a_running_model_is_an_error_and_no_token(
    model_path: Path, trunk_copy: Path, text: list[int]
) -> None:
    path = trunk_copy / TRUNK
    with k3rs.Model.open(model_path, memory="1GB", trunk=trunk_copy) as model:
        session = model.session()
        session.forward(text[:3])
        flip_bit(path, path.stat().st_size - 1)
        for stale in (session, model.session()):
            with pytest.raises(CheckpointError, match="changed while it was in use") as failed:
                stale.forward(text[3:])
            assert f"{path}: " in str(failed.value)
            assert failed.value.hint


def test_check_finds_two_matrices_that_were_exchanged(
    run_k3rs: RunK3rs, model_path: Path, trunk_copy: Path
) -> None:
    """Their bytes are all there, in the places of each other."""
    file = trunk_copy / TRUNK
    content = file.read_bytes()
    first, second = b"layers.0.self_attn.q_proj", b"layers.0.self_attn.k_proj"
    assert content.count(first) == content.count(second) == 1
    file.write_bytes(
        content.replace(first, b"#")
        .replace(second, first)
        .replace(b"#" + b".weight", second + b".weight")
    )
    assert_refused(run_k3rs("pack", model_path, trunk_copy, "--check"), str(file), "own")


def test_a_trunk_of_the_whole_model_is_not_that_of_its_first_layers(
    run_k3rs: RunK3rs, model_path: Path, packed: Path
) -> None:
    done = run_k3rs("generate", model_path, "--ids", "1", "--trunk", packed, "--layers", 3)
    assert done.status == 2
    assert "expected a packed trunk or a number of layers, found both\nhint: " in done.stderr
