"""Files that change, shrink or vanish under a running model, and file systems of all kinds.

What was computed from a file that is no longer the one that was opened is never a token.
"""

import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from checkpoint_edit import copy_checkpoint, shard_of
from harness import (
    TIME_LIMIT_S,
    Completed,
    Prompt,
    RunK3rs,
    command_environment,
    file_names,
    joined,
    smallest_budget,
)
from numpy.typing import NDArray

import k3rs
from k3rs.exceptions import CheckpointError, ReadError, SessionError

Bits: TypeAlias = NDArray[np.uint32]

SHARED_MEMORY = Path("/dev", "shm")
POSITIONS = 64
MANY_TOKENS = 20_000
PREFIX = "language_model."
OUTPUT_MATRIX = f"{PREFIX}lm_head.weight"
EMBEDDING = f"{PREFIX}model.embed_tokens.weight"
EMBEDDING_ROW_BYTES = 80 * 2
FIRST_MATRIX = f"{PREFIX}model.layers.0.self_attn.q_proj.weight"
MIDDLE_LAYER = f"{PREFIX}model.layers.4.self_attn.o_proj.weight"
EXPERT = f"{PREFIX}model.layers.3.block_sparse_moe.experts.0.w1.weight_packed"


@pytest.fixture(scope="module")
def text(prompts: list[Prompt]) -> list[int]:
    """A prompt that wakes experts of every layer."""
    return prompts[-1].ids


@pytest.fixture(scope="module")
def truth(model: k3rs.Model, text: list[int]) -> Bits:
    """The bits of the fixture checkpoint for `text`."""
    return read(model.session(), text)


def read(session: k3rs.Session, ids: list[int]) -> Bits:
    """The bits of the logits after every id."""
    return session.forward(ids, all_positions=True).view(np.uint32)


def bits_of(directory: Path, ids: list[int]) -> Bits:
    with k3rs.Model.open(directory, memory="1GB", threads=1) as model:
        return read(model.session(), ids)


def open_model(directory: Path, *, ample: bool = False) -> k3rs.Model:
    """With the smallest budget, or with room for all weights."""
    memory = 10**9 if ample else smallest_budget(directory, POSITIONS, threads=1)
    return k3rs.Model.open(directory, memory=memory, positions=POSITIONS, threads=1)


def place_in_file(directory: Path, name: str) -> tuple[int, int]:
    """Where in its shard the data of a tensor begins and ends."""
    content = shard_of(directory, name).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8:start])[name]["data_offsets"]
    return start + begin, start + end


def restore(path: Path, content: bytes, before: os.stat_result) -> None:
    """Gives a file its content and its times back, as a copying program does."""
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def assert_refuses(session: k3rs.Session) -> None:
    """It does not go on, however often it is asked."""
    for _ in range(2):
        with pytest.raises(SessionError, match="cannot continue") as refused:
            session.forward([1])
        assert refused.value.hint == "reset the session or open a new one"


# File systems


def direct_read(path: Path, alignment: int) -> bytes | None:
    """The second block of `alignment` bytes, read past the page cache, if that works at all."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    with mmap.mmap(-1, alignment) as block:
        try:
            return block[: os.preadv(descriptor, [block], alignment)]
        except OSError:
            return None
        finally:
            os.close(descriptor)


def assert_truthful(direct: bool, why: str, shard: Path) -> None:
    """What the report says about direct reads is what the file system does."""
    if not direct:
        assert "direct" in why
        assert direct_read(shard, mmap.PAGESIZE) is None
        return
    said = re.fullmatch(r"direct reads at a multiple of (\d+) bytes", why)
    assert said is not None, why
    alignment = int(said[1])
    assert direct_read(shard, alignment) == shard.read_bytes()[alignment : 2 * alignment]


@pytest.fixture(params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system of each kind."""
    if request.param == "disk":
        yield tmp_path
        return
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    if not any(mount[1:3] == [str(SHARED_MEMORY), "tmpfs"] for mount in mounts):
        pytest.skip(f"{SHARED_MEMORY} is not a tmpfs here")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        yield Path(directory)


def test_the_report_says_how_this_file_system_is_read(
    place: Path, model_path: Path, text: list[int], truth: Bits
) -> None:
    directory = copy_checkpoint(model_path, place / "copy")
    with open_model(directory) as model:
        assert (read(model.session(), text) == truth).all()
        io = model.report()["io"]
    assert io["trunk_bytes_read"] > 0
    assert_truthful(io["direct"], io["why"], shard_of(directory, MIDDLE_LAYER))


def test_a_file_system_without_direct_reads_gives_the_same_ids(
    model_path: Path, tmp_path: Path, prompts: list[Prompt]
) -> None:
    """On ramfs, which refuses them; mounted where only this command sees it."""
    namespace = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    script = 'mount -t ramfs none "$1" && cp "$2"/* "$1" || exit 77; shift 2; exec "$@"'
    prompt = prompts[1]
    try:
        done = subprocess.run(
            [
                *namespace, "sh", "-c", script, "sh", tmp_path, model_path,
                sys.executable, "-m", "k3rs", "generate", tmp_path,
                "--ids", joined(prompt.ids), "-n", "4", "--ignore-stop", "--json", "-",
            ],
            env=command_environment(),
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no `unshare` here to mount a file system with")
    if b"unshare" in done.stderr or done.returncode == 77:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.decode().strip()}")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    assert run["generated_ids"] == prompt.greedy[:4]
    assert run["io"]["direct"] is False
    assert run["io"]["why"].startswith("the file system refuses direct access")


# A shard that becomes shorter


def cut_within(directory: Path, name: str) -> int:
    """Cuts a shard off just behind the first byte of a tensor; returns its new size."""
    size = place_in_file(directory, name)[0] + 1
    os.truncate(shard_of(directory, name), size)
    return size


def assert_names_the_end(message: str, shard: Path, kept: int, size: int) -> None:
    """The error tells the file and a place that it had and has no more."""
    found = re.match(rf"(?:error: )?cannot read `{re.escape(str(shard))}` at byte (\d+): ", message)
    assert found is not None, message
    # A row of the embedding is named by its first byte, which may still be there.
    assert kept - EMBEDDING_ROW_BYTES < int(found[1]) < size


# Not in the first layer, which the ring holds already when a sweep ends.
@pytest.mark.parametrize("name", [MIDDLE_LAYER, EXPERT, OUTPUT_MATRIX, EMBEDDING])
def test_a_truncated_shard_is_an_error_with_file_and_offset(
    copied: Path, text: list[int], truth: Bits, name: str
) -> None:
    shard = shard_of(copied, name)
    content, before = shard.read_bytes(), shard.stat()
    with open_model(copied) as model:
        session = model.session()
        assert (read(session, text[:3]) == truth[:3]).all()
        kept = cut_within(copied, name)
        for cut_off in (session, model.session()):
            with pytest.raises(ReadError) as failed:
                cut_off.forward(text[3:])
            assert_names_the_end(str(failed.value), shard, kept, len(content))
            assert failed.value.hint
            assert_refuses(cut_off)
        restore(shard, content, before)
        with pytest.raises(CheckpointError, match="changed while"):
            model.session().forward(text)
    assert (bits_of(copied, text) == truth).all()


def generate_and_disturb(
    directory: Path, tmp_path: Path, ids: list[int], disturb: Callable[[], object]
) -> Completed:
    """Runs `k3rs generate` on little memory and calls `disturb` at the first byte of its answer."""
    memory = smallest_budget(directory, len(ids) + MANY_TOKENS, threads=1)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "k3rs", "generate", str(directory), "--ids", joined(ids),
            "-n", str(MANY_TOKENS), "--ignore-stop", "--threads", "1", "--memory", f"{memory}B",
            "--json", "run.json", "--logits", "logits.npy", "--quiet",
        ],
        cwd=tmp_path,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )  # fmt: skip
    assert process.stdout is not None
    begin = process.stdout.read(1)
    disturb()
    rest, stderr = process.communicate(timeout=TIME_LIMIT_S)
    return Completed(process.returncode, (begin + rest).decode(), stderr.decode())


def assert_says_changed(message: str, shard: Path) -> None:
    assert f"{shard}: " in message
    assert "changed while it was in use" in message


def assert_failed_without_a_wrong_token(
    done: Completed, model: k3rs.Model, ids: list[int], directory: Path
) -> None:
    """Status 1, an error with a hint, and on stdout only what the whole file says."""
    assert done.status == 1, done.stderr
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    printed = [int(word) for word in done.stdout.strip().split(",")]
    assert 0 < len(printed) < MANY_TOKENS
    expected = model.generate(ids, max_tokens=len(printed), stop_ids=())
    assert printed == [token.id for token in expected]
    assert file_names(directory.parent) == sorted([directory.name, "no tokenizer"])


@pytest.fixture
def copied_ids_only(without_tokenizer: Path, tmp_path: Path) -> Path:
    """A copy of the fixture checkpoint whose answers are printed as ids."""
    return copy_checkpoint(without_tokenizer, tmp_path / "copy")


def test_the_command_fails_at_a_truncated_shard_without_a_wrong_token(
    copied_ids_only: Path, tmp_path: Path, model: k3rs.Model, text: list[int]
) -> None:
    shard = shard_of(copied_ids_only, MIDDLE_LAYER)
    size = shard.stat().st_size
    kept: list[int] = []
    done = generate_and_disturb(
        copied_ids_only,
        tmp_path,
        text,
        lambda: kept.append(cut_within(copied_ids_only, MIDDLE_LAYER)),
    )
    assert_failed_without_a_wrong_token(done, model, text, copied_ids_only)
    # A sweep that had the bytes already notices at its end.
    if "changed while it was in use" in done.stderr:
        assert_says_changed(done.stderr, shard)
    else:
        assert_names_the_end(done.stderr, shard, kept[0], size)


# A shard that becomes another


def negated(data: bytes) -> bytes:
    """Other weights, as good as the old ones."""
    return bytes(byte ^ (0x80 * (index % 2)) for index, byte in enumerate(data))


def spoilt(data: bytes) -> bytes:
    """All NaN."""
    return b"\xff" * len(data)


def rewrite(directory: Path, name: str, change: Callable[[bytes], bytes] = negated) -> None:
    """Gives a tensor other data in its place; the file has its full size at any moment."""
    begin, end = place_in_file(directory, name)
    with shard_of(directory, name).open("r+b") as shard:
        shard.seek(begin)
        data = change(shard.read(end - begin))
        shard.seek(begin)
        shard.write(data)


@pytest.mark.parametrize("name", [MIDDLE_LAYER, OUTPUT_MATRIX])
def test_a_shard_replaced_by_another_file_is_seen_by_those_who_open_it_later(
    copied: Path, tmp_path: Path, text: list[int], truth: Bits, name: str
) -> None:
    other = copy_checkpoint(copied, tmp_path / "other")
    rewrite(other, name)
    changed = bits_of(other, text)
    assert (changed != truth).any()
    with open_model(copied) as model:
        session = model.session()
        assert (read(session, text[:3]) == truth[:3]).all()
        shard_of(other, name).replace(shard_of(copied, name))
        # The open file is the old one, though no name leads to it.
        assert (read(session, text[3:]) == truth[3:]).all()
        assert (read(model.session(), text) == truth).all()
        assert (bits_of(copied, text) == changed).all()
        assert (read(model.session(), text) == truth).all()


@pytest.mark.parametrize("change", [negated, spoilt])
@pytest.mark.parametrize("ample", [False, True], ids=["streamed", "resident"])
def test_a_shard_rewritten_in_place_is_an_error_and_no_token(
    copied: Path,
    text: list[int],
    truth: Bits,
    ample: bool,
    change: Callable[[bytes], bytes],
) -> None:
    shard = shard_of(copied, MIDDLE_LAYER)
    size = shard.stat().st_size
    with open_model(copied, ample=ample) as model:
        session = model.session()
        assert (read(session, text[:3]) == truth[:3]).all()
        rewrite(copied, MIDDLE_LAYER, change)
        assert shard.stat().st_size == size
        for stale in (session, model.session()):
            with pytest.raises(CheckpointError) as failed:
                stale.forward(text[3:])
            assert_says_changed(str(failed.value), shard)
            assert failed.value.hint
            assert_refuses(stale)


def test_a_model_opened_after_a_rewrite_has_the_new_weights(
    copied: Path, text: list[int], truth: Bits
) -> None:
    with open_model(copied) as model:
        assert (read(model.session(), text) == truth).all()
        rewrite(copied, OUTPUT_MATRIX)
        changed = bits_of(copied, text)
        # A negated output matrix negates every logit.
        assert (changed ^ 0x8000_0000 == truth).all()
        with pytest.raises(CheckpointError, match="changed while"):
            model.session().forward(text)


@pytest.mark.parametrize(
    ("ample", "name"),
    [(True, MIDDLE_LAYER), (True, EXPERT), (True, OUTPUT_MATRIX), (False, FIRST_MATRIX)],
)
def test_weights_read_from_a_changed_file_do_not_outlive_the_change(
    copied: Path, text: list[int], truth: Bits, ample: bool, name: str
) -> None:
    """What a sweep over other weights left in memory, or read ahead, is in no later answer."""
    shard = shard_of(copied, name)
    content, before = shard.read_bytes(), shard.stat()
    with open_model(copied, ample=ample) as model:
        rewrite(copied, name)
        with pytest.raises(CheckpointError, match="changed while"):
            model.session().forward(text)
        restore(shard, content, before)
        with pytest.raises(CheckpointError) as refused:
            model.session().forward(text)
        assert_says_changed(str(refused.value), shard)
    assert (bits_of(copied, text) == truth).all()


def test_the_command_fails_at_a_rewritten_shard_without_a_wrong_token(
    copied_ids_only: Path, tmp_path: Path, model: k3rs.Model, text: list[int]
) -> None:
    shard = shard_of(copied_ids_only, MIDDLE_LAYER)
    done = generate_and_disturb(
        copied_ids_only, tmp_path, text, lambda: rewrite(copied_ids_only, MIDDLE_LAYER)
    )
    assert_failed_without_a_wrong_token(done, model, text, copied_ids_only)
    assert_says_changed(done.stderr, shard)


# A shard that is not there


def test_a_dangling_symlink_is_refused_by_name(copied: Path, run_k3rs: RunK3rs) -> None:
    shard = shard_of(copied, MIDDLE_LAYER)
    shard.unlink()
    shard.symlink_to("blob that was never fetched")
    done = run_k3rs("generate", copied, "--ids", "1", "-n", 1)
    assert (done.status, done.stdout) == (1, "")
    assert shard.name in done.stderr.splitlines()[0]
    assert "dangling symlink" in done.stderr
    assert "\nhint: " in done.stderr
