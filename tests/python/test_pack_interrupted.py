"""`k3rs pack` that was killed, stopped, or ran out of room, and goes on; and what damages a trunk.

What a continued pack leaves is, byte for byte, what an uninterrupted one would have written.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_edit import larger_checkpoint
from harness import TIME_LIMIT_S, RunK3rs, command_environment, file_names, run_python
from packed_trunks import (
    PARTIAL,
    PIECE_BYTES,
    PROGRESS,
    TRUNK,
    TensorFile,
    assert_refused,
    file_digest,
    flip_bit,
)
from terminal import ERASED_LINE, drawn_lines, watch

import k3rs

KILLS = 20
RECORD_BYTES = 16
# With them the trunk is 151 MB long.
LARGE_SIZES = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "kv_lora_rank": 256,
    "moe_intermediate_size": 512,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "q_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "routed_expert_hidden_size": 288,
    "v_head_dim": 64,
    "vocab_size": 24_000,
}


@pytest.fixture(scope="module")
def large_path(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random checkpoint with a trunk of nine pieces."""
    parent = tmp_path_factory.mktemp("large")
    larger_checkpoint(model_path, parent, LARGE_SIZES, head_dim=128, heads=12)
    yield parent / "model"
    shutil.rmtree(parent)


@pytest.fixture(scope="module")
def large_trunk(large_path: Path) -> Path:
    """The trunk of it, packed without an interruption."""
    directory = large_path.parent / "trunk"
    facts = k3rs.pack_trunk(large_path, directory)
    assert facts["resumed_bytes"] == 0
    assert facts["file_bytes"] == (directory / TRUNK).stat().st_size > 8 * PIECE_BYTES
    return directory


@pytest.fixture(scope="module")
def large_digest(large_trunk: Path) -> str:
    return file_digest(large_trunk / TRUNK)


def start_pack(model: Path, directory: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "k3rs", "pack", str(model), str(directory)],
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for_a_piece(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Until the record, which begins with 16 bytes, tells of one, or the process ended."""
    end = time.monotonic() + TIME_LIMIT_S
    while process.poll() is None and time.monotonic() < end:
        if recorded_bytes(directory) > 16:
            return
        time.sleep(0.001)


def recorded_bytes(directory: Path) -> int:
    try:
        return (directory / PROGRESS).stat().st_size
    except FileNotFoundError:
        return 0


def kill_after_a_piece(model: Path, directory: Path) -> None:
    """Leaves a pack behind that has written something, but not all."""
    for _ in range(20):
        process = start_pack(model, directory)
        wait_for_a_piece(process, directory)
        process.kill()
        process.communicate(timeout=TIME_LIMIT_S)
        if not (directory / TRUNK).exists():
            return
        shutil.rmtree(directory)
    raise AssertionError("every pack was done before it could be killed")


def test_killed_at_any_moment_it_goes_on_to_the_same_file(
    large_path: Path, large_digest: str, tmp_path: Path
) -> None:
    moments = random.Random(11)
    directory = tmp_path / "trunk"
    started = time.monotonic()
    k3rs.pack_trunk(large_path, directory)
    seconds = time.monotonic() - started
    shutil.rmtree(directory)
    kills, resumed = 0, []
    for _ in range(4 * KILLS):
        if kills == KILLS:
            break
        process = start_pack(large_path, directory)
        while process.poll() is None and not (directory / PARTIAL).exists():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, seconds))
        process.kill()
        process.communicate(timeout=TIME_LIMIT_S)
        kills += process.returncode == -signal.SIGKILL
        # Several kills in a row now and then.
        if (directory / TRUNK).exists() or moments.random() < 0.5:
            facts = k3rs.pack_trunk(large_path, directory)
            if process.returncode:
                resumed.append(facts["resumed_bytes"])
            assert file_digest(directory / TRUNK) == large_digest
            assert file_names(directory) == [TRUNK]
            shutil.rmtree(directory)
    assert kills == KILLS
    assert sum(size > 0 for size in resumed) > len(resumed) // 4, resumed


@pytest.mark.parametrize("damage", ["data", "record", "no data"])
def test_what_a_killed_pack_wrote_is_not_trusted(
    large_path: Path, large_digest: str, tmp_path: Path, damage: str
) -> None:
    directory = tmp_path / "trunk"
    kill_after_a_piece(large_path, directory)
    if damage == "data":
        start = TensorFile.of(large_path.parent / "trunk" / TRUNK).start
        for piece in range(9):
            flip_bit(directory / PARTIAL, start + piece * PIECE_BYTES + 7)
    elif damage == "record":
        for offset in range(16, recorded_bytes(directory), 16):
            flip_bit(directory / PROGRESS, offset)
    else:
        (directory / PARTIAL).unlink()
    assert k3rs.pack_trunk(large_path, directory)["resumed_bytes"] == 0
    assert file_digest(directory / TRUNK) == large_digest


def test_one_damaged_byte_costs_one_piece(
    large_path: Path, large_trunk: Path, large_digest: str, tmp_path: Path
) -> None:
    directory, copy = tmp_path / "trunk", tmp_path / "copy"
    kill_after_a_piece(large_path, directory)
    shutil.copytree(directory, copy)
    record = (directory / PROGRESS).read_bytes()
    finished = [
        number
        for number in range(len(record) // RECORD_BYTES - 1)
        if any(record[(number + 1) * RECORD_BYTES : (number + 2) * RECORD_BYTES])
    ]
    start, size = TensorFile.of(large_trunk / TRUNK).start, (large_trunk / TRUNK).stat().st_size
    lengths = [min(PIECE_BYTES, size - start - piece * PIECE_BYTES) for piece in finished]
    flip_bit(copy / PARTIAL, start + finished[0] * PIECE_BYTES + 4711)
    for place, resumed in ((directory, sum(lengths)), (copy, sum(lengths[1:]))):
        assert k3rs.pack_trunk(large_path, place)["resumed_bytes"] == resumed
        assert file_digest(place / TRUNK) == large_digest


def test_what_another_model_left_is_not_used(
    large_path: Path, model_path: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "trunk"
    kill_after_a_piece(large_path, directory)
    assert k3rs.pack_trunk(model_path, directory)["resumed_bytes"] == 0
    k3rs.pack_trunk(model_path, tmp_path / "fresh")
    assert file_digest(directory / TRUNK) == file_digest(tmp_path / "fresh" / TRUNK)
    assert file_names(directory) == [TRUNK]


def test_ctrl_c_ends_it_and_it_goes_on(large_path: Path, large_digest: str, tmp_path: Path) -> None:
    directory = tmp_path / "trunk"
    for _ in range(20):
        process = start_pack(large_path, directory)
        wait_for_a_piece(process, directory)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        stdout, stderr = process.communicate(timeout=TIME_LIMIT_S)
        assert time.monotonic() - started < 5
        if process.returncode != 0:
            break
        shutil.rmtree(directory)  # it was faster
    assert (process.returncode, stdout, stderr) == (130, b"", b"error: interrupted\n")
    assert file_names(directory) == [PARTIAL, PROGRESS]
    assert k3rs.pack_trunk(large_path, directory)["resumed_bytes"] > 0
    assert file_digest(directory / TRUNK) == large_digest


# Disks


def test_a_limit_of_file_sizes_is_a_full_disk(
    large_path: Path, large_digest: str, tmp_path: Path
) -> None:
    directory = tmp_path / "trunk"
    kill_after_a_piece(large_path, directory)
    limited = (
        "import resource, sys; from k3rs.cli.main import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, 2 * ({4 * PIECE_BYTES},)); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = run_python(tmp_path, "-c", limited, "pack", large_path, directory)
    assert_refused(done, str(directory / PARTIAL), "room")
    assert k3rs.pack_trunk(large_path, directory)["resumed_bytes"] > 0
    assert file_digest(directory / TRUNK) == large_digest


def on_tmpfs(options: str, place: Path, script: str, *arguments: str | Path) -> str:
    """What a shell script prints on a new tmpfs at `place`, seen by it alone; `k3rs` is defined."""
    namespace = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    begin = (
        'mount -t tmpfs -o "$1" none "$2" || exit 77; cd "$2"; python=$3; shift 3; '
        'k3rs() { "$python" -m k3rs "$@"; echo "status $?"; }; '
    )
    try:
        done = subprocess.run(
            [
                *namespace, "sh", "-c", begin + script, "sh", options, place, sys.executable,
                *arguments,
            ],
            env=command_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIME_LIMIT_S,
            check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("there is no `unshare` here to mount a file system with")
    printed = done.stdout.decode()
    if printed.startswith("unshare") or done.returncode == 77:
        pytest.skip(f"a file system cannot be mounted here: {printed}")
    return printed


def test_too_little_room_is_seen_before_anything_is_written(
    large_path: Path, large_trunk: Path, tmp_path: Path
) -> None:
    size = (large_trunk / TRUNK).stat().st_size
    script = 'k3rs pack "$1" "$PWD"; du -s . | cut -f 1'
    printed = on_tmpfs(f"size={size - 4096}", tmp_path, script, large_path).splitlines()
    assert f"expected {size} bytes of free space, found " in printed[0]
    assert printed[1].startswith("hint: ")
    assert printed[2:] == ["status 1", "0"]


def test_a_disk_that_fills_up_is_an_error_and_it_goes_on_with_more(
    large_path: Path, large_trunk: Path, large_digest: str, tmp_path: Path
) -> None:
    """There is room for the trunk, but not for the record beside it."""
    size = (large_trunk / TRUNK).stat().st_size
    script = """
        k3rs pack "$1" "$PWD"
        mount -o remount,size=$2 "$PWD"
        k3rs pack "$1" "$PWD" --json
        sha256sum *
    """
    printed = on_tmpfs(f"size={size}", tmp_path, script, large_path, str(2 * size)).splitlines()
    assert "No space left on device" in printed[0]
    assert printed[1].startswith("hint: ")
    assert printed[2] == "status 1"
    assert printed[-2:] == ["status 0", f"{large_digest}  {TRUNK}"]


def test_a_read_only_target_is_an_error_with_a_hint(model_path: Path, tmp_path: Path) -> None:
    for place in ("$PWD", "$PWD/trunk"):
        script = f'k3rs pack "$1" "{place}"'
        error, hint, status = on_tmpfs("ro", tmp_path, script, model_path).splitlines()
        assert re.match("error: .*Read-only file system", error)
        assert hint.startswith("hint: ")
        assert status == "status 1"


# What a person sees


def test_progress_at_a_terminal(large_path: Path, tmp_path: Path) -> None:
    status, shown = watch(tmp_path, "pack", large_path, "trunk")
    assert status == 0
    lines = drawn_lines(shown)
    assert all(len(line) <= 80 for line in lines)
    assert any(re.search(r"^packing .* \d+%", line) for line in lines)
    # The bar is gone at the end.
    left = shown.rsplit(ERASED_LINE, 1)[1].splitlines()
    assert [line for line in left if line] == [
        "90 matrices, 151 MB",
        "use it with --trunk trunk",
    ]
    status, shown = watch(tmp_path, "pack", large_path, "trunk", "--check")
    assert status == 0
    assert shown.rsplit(ERASED_LINE, 1)[1].strip() == "the trunk is that of the model to the byte"


def test_check_finds_one_flipped_bit_and_says_where(
    run_k3rs: RunK3rs, large_path: Path, large_trunk: Path, tmp_path: Path
) -> None:
    done = run_k3rs("pack", large_path, large_trunk, "--check", "--json")
    assert done.status == 0
    assert done.facts == {"directory": str(large_trunk), "intact": True}
    trunk = TensorFile.of(large_trunk / TRUNK)
    size = trunk.path.stat().st_size
    for offset in (trunk.start, trunk.start + 3 * PIECE_BYTES + 12345, size - 1):
        flip_bit(trunk.path, offset)
        done = run_k3rs("pack", large_path, large_trunk, "--check")
        flip_bit(trunk.path, offset)
        piece = (offset - trunk.start) // PIECE_BYTES
        assert_refused(done, str(trunk.path), f"from byte {trunk.start + piece * PIECE_BYTES}")
    k3rs.verify_trunk(large_path, large_trunk)
