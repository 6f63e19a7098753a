"""Sessions that last: they go on with the bits of never having stopped, or not at all."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from checkpoint_edit import edited_shard, shard_of
from harness import (
    TIME_LIMIT_S,
    Prompt,
    RunK3rs,
    command_environment,
    file_names,
    interrupt_generation,
    joined,
    smallest_budget,
)
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import k3rs
from k3rs.exceptions import InputError, K3Error, SessionError, SessionFileError

NORM = "language_model.model.norm.weight"
# Of the logits of a text under the present version of the arithmetic.
CONTRACT_VERSION = "3"
CONTRACT_BITS = "4f31c2c6fd5a232debc9af3b793bfbc8eafca250b5381c2c455f8156fb53e4c9"


@pytest.fixture(scope="module")
def text(prompts: list[Prompt]) -> list[int]:
    return prompts[-1].ids + prompts[-1].greedy[:6]


@pytest.fixture(scope="module")
def cut(text: list[int]) -> int:
    """Where the text is saved."""
    return len(text) - 5


@pytest.fixture(scope="module")
def saved(
    model: k3rs.Model, text: list[int], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The text up to `cut`, the last two ids appended but not computed, with a note."""
    session = model.session()
    session.forward(text[: cut - 2])
    session.append(text[cut - 2 : cut])
    file = tmp_path_factory.mktemp("saved") / "text.session"
    session.save(file, note='what a caller keeps: "ключ" \\ \u2028')
    return file


@pytest.fixture(scope="module")
def rest(model: k3rs.Model, text: list[int], cut: int) -> NDArray[np.uint32]:
    """The bits after every id behind `cut` of a session that never stopped."""
    return model.session().forward(text, all_positions=True).view(np.uint32)[cut:]


def refusal(model: k3rs.Model, file: Path) -> K3Error:
    with pytest.raises(SessionFileError) as refused:
        model.load_session(file)
    assert refused.value.hint
    assert str(file) in str(refused.value)
    return refused.value


def test_a_loaded_session_goes_on_with_the_same_bits(
    model: k3rs.Model, saved: Path, text: list[int], cut: int, rest: NDArray[np.uint32]
) -> None:
    session = model.load_session(saved)
    assert session.ids == text[:cut]
    assert session.position == cut
    assert session.pending == text[cut - 2 : cut]
    assert session.note == 'what a caller keeps: "ключ" \\ \u2028'
    found = session.forward(text[cut:], all_positions=True)
    assert np.array_equal(found.view(np.uint32), rest)


@pytest.mark.parametrize("backend", k3rs.available_backends())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_budget_threads_and_instruction_set_may_change_in_between(
    model_path: Path,
    saved: Path,
    text: list[int],
    cut: int,
    rest: NDArray[np.uint32],
    threads: int,
    backend: str,
) -> None:
    memory = smallest_budget(model_path, 64, threads)
    with k3rs.Model.open(
        model_path, memory=memory, positions=64, threads=threads, backend=backend
    ) as other:
        session = other.load_session(saved)
        found = [session.forward([token_id]) for token_id in text[cut:]]
    assert np.array_equal(np.stack(found).view(np.uint32), rest)


def test_an_empty_session_can_be_saved(model: k3rs.Model, tmp_path: Path) -> None:
    model.session().save(tmp_path / "empty")
    session = model.load_session(tmp_path / "empty")
    assert (session.ids, session.note) == ([], "")
    assert np.array_equal(session.forward([1, 2]), model.session().forward([1, 2]))


def test_what_was_computed_is_not_computed_again(
    model: k3rs.Model, tmp_path: Path, text: list[int]
) -> None:
    """The first token after a prompt that was saved costs nothing."""
    session = model.session()
    session.forward(text)
    session.save(tmp_path / "prompt")
    loaded = model.load_session(tmp_path / "prompt")
    before = model.report()["io"]["trunk_bytes_used"]
    (token,) = model.generate(session=loaded, max_tokens=1, stop_ids=())
    assert model.report()["io"]["trunk_bytes_used"] == before
    (expected,) = model.generate(text, max_tokens=1, stop_ids=())
    assert token.id == expected.id
    assert loaded.ids == [*text, token.id]


def test_saving_changes_nothing(model: k3rs.Model, tmp_path: Path) -> None:
    session = model.session()
    session.forward([1, 2])
    session.save(tmp_path / "file")
    assert np.array_equal(session.forward([3]), model.session().forward([1, 2, 3]))


def test_reset_leaves_nothing_of_a_loaded_session(model: k3rs.Model, saved: Path) -> None:
    session = model.load_session(saved)
    session.reset()
    assert (session.ids, session.note, session.pending) == ([], "", [])
    assert np.array_equal(session.forward([1]), model.session().forward([1]))


def test_the_file_is_safetensors_with_the_documented_tensors(
    model: k3rs.Model, saved: Path, text: list[int], cut: int
) -> None:
    tensors = load_file(saved)
    assert tensors.pop("ids").tolist() == text[:cut]
    expected = model.session().forward(text[: cut - 2])
    assert np.array_equal(tensors.pop("logits"), expected)
    kda, mla = model.config["kda"], model.config["mla"]
    for layer, kind in enumerate(model.config["layers"]):
        if kind["attention"] == "kda":
            heads, width, taps = kda["heads"], kda["head_dim"], kda["conv_taps"]
            state = tensors.pop(f"layers.{layer}.kda.state")
            assert state.shape == (heads, width, width)
            assert state.dtype == np.float32
            assert np.any(state != 0)
            history = tensors.pop(f"layers.{layer}.kda.conv_history")
            assert history.shape == (heads, 3, taps - 1, width)
        else:
            cache = tensors.pop(f"layers.{layer}.mla.latent_cache")
            # The two ids that were only appended have no latents yet.
            assert cache.shape == (cut - 2, mla["latent_dim"] + mla["rope_dim"])
    assert not tensors


def test_a_label_is_read_without_the_model(model: k3rs.Model, saved: Path, cut: int) -> None:
    label = k3rs.SavedSession.read(saved)
    assert label.fingerprint == model.facts["model"]["fingerprint"]
    assert (label.position, label.pending_count) == (cut, 2)
    assert label.note.startswith("what a caller keeps")


def test_one_flipped_bit_anywhere_is_refused(
    model: k3rs.Model, saved: Path, tmp_path: Path
) -> None:
    content = saved.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    places = [*range(0, header_end, 7), *range(header_end, len(content), 9973), len(content) - 1]
    file = tmp_path / "flipped"
    for place in places:
        spoilt = bytearray(content)
        spoilt[place] ^= 1 << place % 8
        file.write_bytes(spoilt)
        refusal(model, file)
    file.write_bytes(content)
    model.load_session(file)


def test_damage_in_the_data_is_called_damage(
    model: k3rs.Model, saved: Path, tmp_path: Path
) -> None:
    content = bytearray(saved.read_bytes())
    content[-1] ^= 1
    file = tmp_path / "flipped"
    file.write_bytes(content)
    assert "damaged: its checksum does not fit its contents" in str(refusal(model, file))


@pytest.mark.parametrize("length", [0, 7, 8, 500, -1])
def test_a_truncated_file_is_refused(
    model: k3rs.Model, saved: Path, tmp_path: Path, length: int
) -> None:
    file = tmp_path / "cut off"
    file.write_bytes(saved.read_bytes()[:length])
    refusal(model, file)


def test_a_longer_file_is_refused(model: k3rs.Model, saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "longer"
    file.write_bytes(saved.read_bytes() + b"\0")
    assert "bytes instead of" in str(refusal(model, file))


def test_a_rewritten_header_is_refused(model: k3rs.Model, saved: Path, tmp_path: Path) -> None:
    """Also with numbers that would not fit into memory or into 64 bits."""
    content = saved.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    for positions, ids in ((0, 0), (1, 2), (3, 2), (-1, 5), (2**60, 2**60), (2**64, 2**64)):
        header = json.loads(content[8:header_end])
        header["__metadata__"] |= {"positions": str(positions), "ids": str(ids)}
        encoded = json.dumps(header).encode()
        file = tmp_path / "rewritten"
        file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[header_end:])
        assert "damaged" in str(refusal(model, file))


def test_another_safetensors_file_is_refused(model: k3rs.Model, tmp_path: Path) -> None:
    save_file({"ids": np.zeros(3, dtype=np.int32)}, tmp_path / "other")
    assert "found another kind of file" in str(refusal(model, tmp_path / "other"))


def test_what_is_no_file_is_refused(model: k3rs.Model, tmp_path: Path) -> None:
    assert "No such file" in str(refusal(model, tmp_path / "missing"))
    refusal(model, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    # Opening a pipe that nobody writes to would wait for ever.
    done = subprocess.run(
        [sys.executable, "-m", "k3rs", "generate", "--load-state", tmp_path / "pipe"],
        env=command_environment(),
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert b"something that is not a file" in done.stderr


def test_another_model_is_refused(saved: Path, copied: Path) -> None:
    with edited_shard(shard_of(copied, NORM)) as tensors:
        tensors[NORM].put(0, 1.5)
    with k3rs.Model.open(copied, memory="1GB", threads=1) as other:
        error = refusal(other, saved)
    assert "expected a session of the model" in str(error)


def test_another_version_of_the_arithmetic_is_refused(
    model: k3rs.Model, saved: Path, tmp_path: Path
) -> None:
    content = saved.read_bytes()
    found, other = int(CONTRACT_VERSION), int(CONTRACT_VERSION) + 1
    same_length = content.replace(b'"contract":"%d"' % found, b'"contract":"%d"' % other)
    assert same_length != content
    file = tmp_path / "other contract"
    file.write_bytes(same_length)
    error = refusal(model, file)
    expected = f"expected version {found} of the arithmetic, found a session of version {other}"
    assert expected in str(error)


def test_new_arithmetic_has_a_new_version(tmp_path: Path) -> None:
    """If this fails, logits have other bits: raise `CONTRACT`, and then both values here."""
    with k3rs.Model.open(k3rs.shipped_model(), memory="1GB") as model:
        session = model.session()
        bits = session.forward(range(40), all_positions=True).tobytes()
        session.save(tmp_path / "file")
    with safe_open(tmp_path / "file", "np") as file:
        contract = file.metadata()["contract"]
    assert (contract, sha256(bits).hexdigest()) == (CONTRACT_VERSION, CONTRACT_BITS)


def test_an_aborted_session_is_not_saved(model: k3rs.Model, tmp_path: Path) -> None:
    session = model.session()
    session.forward([1])

    def interrupt(_done: int, _layers: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.forward([1] * 50_000, progress=interrupt)
    with pytest.raises(SessionError, match="stopped in the middle of a sweep"):
        session.save(tmp_path / "file")
    assert file_names(tmp_path) == []


def test_an_earlier_file_survives_a_full_disk(
    model: k3rs.Model, saved: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.session"
    file.write_bytes(saved.read_bytes())
    session = model.load_session(file)
    session.forward([1, 2, 3])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(SessionFileError, match="cannot save the session") as refused:
            session.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert refused.value.hint is not None
    assert "an earlier file of this name is as it was" in refused.value.hint
    assert file.read_bytes() == saved.read_bytes()
    assert file_names(tmp_path) == ["text.session"]
    session.save(file)
    assert model.load_session(file).position == session.position


def test_a_killed_process_leaves_the_earlier_file(model_path: Path, tmp_path: Path) -> None:
    """Whenever it is killed: a whole file is there, the old or a new one."""
    file = tmp_path / "text.session"
    script = (
        "import k3rs, sys\n"
        "session = k3rs.Model.open(sys.argv[1], memory='1GB', threads=1).session()\n"
        "while True:\n"
        "    session.forward([1]); session.save(sys.argv[2]); print('saved', flush=True)\n"
    )
    with k3rs.Model.open(model_path, memory="1GB", threads=1) as model:
        for round_number in range(6):
            process = subprocess.Popen(
                [sys.executable, "-c", script, model_path, file], stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.003 * round_number)
            process.kill()
            process.communicate(timeout=TIME_LIMIT_S)
            assert set(model.load_session(file).ids) == {1}


def test_a_place_that_cannot_be_written_is_an_error(model: k3rs.Model, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing" / "file", Path("/dev/null")):
        with pytest.raises(SessionFileError, match="cannot save the session"):
            model.session().save(place)
    assert Path("/dev/null").is_char_device()


def test_a_link_stays_a_link(model: k3rs.Model, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    model.session().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    model.load_session(tmp_path / "real")


def test_the_command_goes_on_where_it_stopped(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path, prompts: list[Prompt]
) -> None:
    prompt = prompts[-1]
    state = tmp_path / "state"
    common = ["generate", model_path, "--ignore-stop", "--json", "-"]
    first = run_k3rs(*common, "--ids", joined(prompt.ids), "-n", "3", "--save-state", state)
    assert first.status == 0, first.stderr
    second = run_k3rs(
        *common, "-n", "4", "--load-state", state, "--save-state", state, "--threads", "2"
    )
    assert second.status == 0, second.stderr
    found = first.facts["generated_ids"] + second.facts["generated_ids"]
    assert found == prompt.greedy[:7]
    assert second.facts["prompt_ids"] == []
    assert second.facts["loaded_positions"] == len(prompt.ids) + 3
    third = run_k3rs(*common, "-n", "1", "--load-state", state, "--ids", "7,8")
    whole = [*prompt.ids, *prompt.greedy[:7], 7, 8]
    expected = run_k3rs(*common, "-n", "1", "--ids", joined(whole))
    assert third.facts["generated_ids"] == expected.facts["generated_ids"]


def test_a_seeded_text_and_penalties_do_not_depend_on_budget_and_threads(
    run_k3rs: RunK3rs, model_path: Path
) -> None:
    sampled = [
        *("generate", model_path, "--ids", "3,4,5", "-n", "24", "--ignore-stop", "--json", "-"),
        *("--temperature", "1.3", "--top-p", "0.95", "--seed", "5", "--repetition-penalty", "1.2"),
    ]
    plain = run_k3rs(*sampled, "--threads", "1")
    small = run_k3rs(
        *sampled, "--memory", f"{smallest_budget(model_path, 64, 3)}B", "--threads", "3"
    )
    assert plain.status == small.status == 0, plain.stderr + small.stderr
    assert plain.facts["generated_ids"] == small.facts["generated_ids"]
    assert plain.facts["options"]["repetition_penalty"] == 1.2


def test_a_state_is_checked_before_the_model_is_opened(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("no session")
    refused = run_k3rs("generate", model_path, "--load-state", tmp_path / "note.txt")
    assert (refused.status, refused.stdout) == (1, "")
    assert "found another kind of file" in refused.stderr
    unwritable = run_k3rs(
        "generate", model_path, "--ids", "1", "--save-state", tmp_path / "no" / "where"
    )
    assert (unwritable.status, unwritable.stdout) == (1, "")
    for kind in ("--load-state", "--save-state"):
        both = run_k3rs(
            *("generate", model_path, "--ids", "1", "--no-incremental", kind, tmp_path / "x")
        )
        assert both.status == 2
        assert "expected either --no-incremental or a state" in both.stderr


def test_ctrl_c_ends_the_token_and_saves(model_path: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = interrupt_generation(
        tmp_path, model_path, "--ids", "3,4,5", "-n", "1000000", "--save-state", state
    )
    assert done.status == 130, done.stderr
    with k3rs.Model.open(model_path, memory="1GB", threads=1) as model:
        session = model.load_session(state)
        assert model.tokenizer is not None
        assert session.ids[:3] == [3, 4, 5]
        assert len(session.pending) == 1
        assert model.tokenizer.decode(session.ids[3:]) + "\n" == done.stdout


def test_ids_to_compute_must_be_of_the_vocabulary(model: k3rs.Model) -> None:
    with pytest.raises(InputError):
        model.session().append([-1])


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(
    model: k3rs.Model, tmp_path: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(TIME_LIMIT_S)
    left = tmp_path / f".text.{dead.pid}.0.partial"
    living = tmp_path / f".text.{os.getppid()}.0.partial"
    others = [tmp_path / ".other.1.0.partial", tmp_path / ".text.x.0.partial"]
    for file in (left, living, *others):
        file.touch()
    model.session().save(tmp_path / "text")
    assert not left.exists()
    assert all(file.exists() for file in (living, *others))


def test_a_new_file_is_its_owners_and_an_old_one_keeps_its_rights(
    model: k3rs.Model, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    model.session().save(file)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    model.session().save(file)
    assert file.stat().st_mode & 0o777 == 0o640


def test_threads_may_save_to_one_place(model: k3rs.Model, tmp_path: Path) -> None:
    file = tmp_path / "text"
    sessions = [model.session() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            list(threads.map(lambda session: session.save(file), sessions))
    assert model.load_session(file).ids == []
    assert file_names(tmp_path) == ["text"]
