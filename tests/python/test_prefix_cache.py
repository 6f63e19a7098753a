"""What was computed of a text is not computed again, and gives the bits of computing it again."""

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from harness import TIME_LIMIT_S, command_environment, file_names

import k3rs
from k3rs.exceptions import InputError, SessionFileError
from k3rs.prefix_cache import CHECKPOINTS_MAX, PrefixCache

A, B, C = [3, 4, 5, 6], [7, 8, 9], [10, 11]
HOLDER = (
    "import k3rs, sys\n"
    "from k3rs.prefix_cache import PrefixCache\n"
    "cache = PrefixCache(k3rs.Model.open(sys.argv[1], memory='1GB', threads=1), sys.argv[2])\n"
    "cache.session([1, 2]).forward(()); cache.keep()\n"
    "print('kept', flush=True)\n"
    "sys.stdin.read()\n"
    "cache.close()\n"
)


@pytest.fixture
def cache(model: k3rs.Model, tmp_path: Path) -> Iterator[PrefixCache]:
    with PrefixCache(model, tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def files(cache: PrefixCache, tmp_path: Path) -> Path:
    """Where the checkpoints of `cache` are."""
    (directory,) = (tmp_path / "cache").iterdir()
    return directory


def read(cache: PrefixCache, model: k3rs.Model, ids: list[int]) -> int:
    """Computes the text `ids`, which must give the right bits; how many of them were computed."""
    session = cache.session(ids)
    count = len(session.pending)
    assert session.ids == ids
    expected = model.session().forward(ids)
    assert np.array_equal(session.forward(()).view(np.uint32), expected.view(np.uint32))
    return count


def read_and_keep(cache: PrefixCache, model: k3rs.Model, ids: list[int]) -> int:
    count = read(cache, model, ids)
    cache.keep()
    return count


def test_a_text_costs_what_it_adds(cache: PrefixCache, model: k3rs.Model) -> None:
    assert read(cache, model, A) == len(A)
    assert read(cache, model, A + B) == len(B)


def test_the_same_text_costs_nothing(cache: PrefixCache, model: k3rs.Model) -> None:
    read_and_keep(cache, model, A)
    assert read(cache, model, A) == 0
    read(cache, model, B)
    assert read(cache, model, A) == 0


def test_the_longest_beginning_wins(cache: PrefixCache, model: k3rs.Model) -> None:
    for text in (A, A + B, [1, *A]):
        read_and_keep(cache, model, text)
    assert read(cache, model, A + B + C) == len(C)
    assert read(cache, model, A + C) == len(C)
    # The live session has computed `A + C` and no checkpoint as much.
    assert read(cache, model, A + C + B) == len(B)
    read(cache, model, A)
    # The live session has only computed `A`, a checkpoint more.
    assert read(cache, model, A + B + C) == len(C)


def test_what_goes_on_behind_a_text_is_not_used_for_it(
    cache: PrefixCache, model: k3rs.Model
) -> None:
    read_and_keep(cache, model, A + B)
    assert read(cache, model, A) == len(A)
    read_and_keep(cache, model, A + B)
    assert read(cache, model, [*A, 99, 8, 9]) == len(A + B)


def test_ids_that_were_not_computed_are_not_counted(cache: PrefixCache, model: k3rs.Model) -> None:
    read(cache, model, A)
    session = cache.session(A + B)
    cache.keep()
    assert session.pending == B
    assert read(cache, model, A + C) == len(C)
    read(cache, model, [1])
    assert read(cache, model, A) == 0


def test_nothing_is_kept_of_a_text_that_was_not_begun(cache: PrefixCache, files: Path) -> None:
    cache.keep()
    cache.session(A)
    cache.keep()
    assert (cache.checkpoint_count, file_names(files)) == (0, [])


def test_ids_must_be_of_the_vocabulary(cache: PrefixCache) -> None:
    with pytest.raises(InputError):
        cache.session([-1])


def test_the_newest_checkpoints_are_kept(
    cache: PrefixCache, model: k3rs.Model, files: Path
) -> None:
    texts = [[first, 1, 2] for first in range(CHECKPOINTS_MAX + 2)]
    for text in texts:
        read_and_keep(cache, model, text)
        cache.keep()
    assert cache.checkpoint_count == len(file_names(files)) == CHECKPOINTS_MAX
    assert [read(cache, model, text) for text in texts] == [3, 3] + [0] * CHECKPOINTS_MAX


def test_closing_leaves_nothing(model: k3rs.Model, tmp_path: Path) -> None:
    with PrefixCache(model, tmp_path) as cache:
        read_and_keep(cache, model, A)
        assert len(file_names(tmp_path)) == 1
    cache.close()
    assert (file_names(tmp_path), cache.checkpoint_count) == ([], 0)


def test_a_checkpoint_that_cannot_be_read_only_costs_time(
    cache: PrefixCache, model: k3rs.Model, files: Path
) -> None:
    for text in (A, A + B, A + B + C):
        read_and_keep(cache, model, text)
    read(cache, model, [1])
    _, longer, longest = sorted(files.iterdir())
    longest.unlink()
    content = bytearray(longer.read_bytes())
    content[-1] ^= 1
    longer.write_bytes(content)
    # The shortest is still good, and the others are made again.
    assert read_and_keep(cache, model, A + B + C) == len(B + C)
    read(cache, model, [1])
    assert read(cache, model, A + B + C) == 0
    read(cache, model, [1])
    for file in files.iterdir():
        file.unlink()
    assert read(cache, model, A + B + C) == len(A + B + C)


def test_a_full_disk_loses_nothing(cache: PrefixCache, model: k3rs.Model, files: Path) -> None:
    read_and_keep(cache, model, A)
    read(cache, model, A + B)
    session = cache.session(A + B + C)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SessionFileError, match="cannot save the session"):
            cache.keep()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert session.pending == C
    assert cache.checkpoint_count == len(file_names(files)) == 1
    assert read_and_keep(cache, model, A + B + C) == len(C)
    assert read(cache, model, A + C) == len(C)
    assert read(cache, model, A + B + C) == 0


def test_an_interrupted_session_is_not_used(cache: PrefixCache, model: k3rs.Model) -> None:
    def interrupt(_done: int, _layers: int) -> None:
        raise KeyboardInterrupt

    read_and_keep(cache, model, A)
    read(cache, model, A + B)
    with pytest.raises(KeyboardInterrupt):
        cache.session(A + B + [1] * 50_000).forward((), progress=interrupt)
    cache.keep()
    assert cache.checkpoint_count == 1
    assert read(cache, model, A + B + C) == len(B + C)


def test_a_session_from_elsewhere_goes_on(
    cache: PrefixCache, model: k3rs.Model, tmp_path: Path
) -> None:
    session = model.session()
    session.forward(A)
    session.append(B)
    session.save(tmp_path / "file")
    cache.load(tmp_path / "file")
    assert read(cache, model, A + C) == len(C)


def test_what_killed_processes_left_is_removed_and_nothing_else(
    model: k3rs.Model, model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    seen: set[str] = set(file_names(tmp_path))
    holders: list[tuple[subprocess.Popen[bytes], str]] = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, model_path, tmp_path],
            env=command_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"kept\n"
        (own,) = set(file_names(tmp_path)) - seen
        seen.add(own)
        holders.append((process, own))
    (killed, abandoned), (living, held) = holders
    killed.kill()
    killed.communicate(timeout=TIME_LIMIT_S)
    assert file_names(tmp_path / abandoned)
    with PrefixCache(model, tmp_path):
        names = file_names(tmp_path)
        assert abandoned not in names
        assert {held, "other"} < set(names)
        assert file_names(tmp_path / held)
    living.communicate(timeout=TIME_LIMIT_S)
    assert living.returncode == 0
    assert file_names(tmp_path) == ["other"]


def test_many_can_begin_at_once(model: k3rs.Model, tmp_path: Path) -> None:
    """A directory that was just made must not look abandoned."""

    def begin(_number: int) -> None:
        with PrefixCache(model, tmp_path) as cache:
            cache.session(A).forward(())
            cache.keep()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, range(200)))
    assert file_names(tmp_path) == []


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_files_go_into_the_cache_of_the_user(
    model: k3rs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    # An empty variable counts as none.
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv(variable, str(tmp_path))
    place = tmp_path / "k3rs" if variable == "XDG_CACHE_HOME" else tmp_path / ".cache" / "k3rs"
    with PrefixCache(model):
        assert len(file_names(place)) == 1
    assert file_names(place) == []


def test_without_a_place_there_are_sessions_and_no_checkpoints(
    model: k3rs.Model, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with PrefixCache(model, tmp_path / "file") as cache:
        session = cache.session([1, 2])
        logits = session.forward(())
        with pytest.raises(SessionFileError, match=r"no directory for checkpoints: .*file"):
            cache.keep()
        assert cache.session([1, 2, 3]).pending == [3]
        assert np.array_equal(logits, model.session().forward([1, 2]))


def test_of_too_many_the_one_goes_whose_loss_costs_least(model: k3rs.Model, tmp_path: Path) -> None:
    lengths = [5, 10, 11, 20, 25, 30, 35, 40, 45]
    with PrefixCache(model, tmp_path) as cache:
        for length in lengths:
            cache.session(range(length)).forward(())
            cache.keep()
        assert cache.checkpoint_count == CHECKPOINTS_MAX
        # All but that of 11 ids, which is one id behind that of 10.
        for length in reversed(lengths):
            expected = [10] if length == 11 else []
            assert cache.session([*range(length), 99]).pending == [*expected, 99]
