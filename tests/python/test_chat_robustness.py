"""What people, terminals and disks do to a chat: nothing that was said is lost by it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_edit import copy_checkpoint, edited_tensor
from harness import TIME_LIMIT_S, Completed, command_environment
from scripted_sampler import Scripted
from terminal import watch

import k3rs
from k3rs import chat
from k3rs.chat import Dialogue
from k3rs.exceptions import InputError, SessionFileError
from k3rs.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(k3rs.shipped_model())
WORDS = TOKENIZER.encode("and the king said unto him")
SHORT = ("--think", "off", "--temperature", "0", "-n", "8")


@pytest.fixture(scope="module")
def shipped() -> Iterator[k3rs.Model]:
    with k3rs.Model.open(
        k3rs.shipped_model(), memory="1GB", threads=1, tokenizer=TOKENIZER
    ) as opened:
        yield opened


def start(place: Path, *arguments: str | Path, **extra: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "k3rs", "chat", *map(str, arguments)],
        cwd=place,
        env=command_environment(XDG_CACHE_HOME=str(place / "cache"), **extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def say(place: Path, lines: str, *arguments: str | Path, **extra: str) -> Completed:
    process = start(place, *arguments, **extra)
    stdout, stderr = process.communicate(lines.encode(), timeout=TIME_LIMIT_S)
    return Completed(process.returncode, stdout.decode(), stderr.decode())


def test_a_user_that_does_not_exist_is_an_error_of_one_command(tmp_path: Path) -> None:
    done = say(tmp_path, "/save ~nobody-of-this-name/x\nHello\n", *SHORT)
    assert done.status == 0
    assert "error: cannot use `~nobody-of-this-name/x`" in done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminal_that_is_closed_loses_nothing(tmp_path: Path, ending: signal.Signals) -> None:
    process = start(tmp_path, *SHORT, "--save-state", "kept")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    assert process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(ending)
    _, stderr = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 130, stderr
    done = say(tmp_path, "/stats\n", "--load-state", "kept")
    assert "1 turn, " in done.stderr


def test_a_closed_terminal_that_is_to_be_ignored_is_ignored(tmp_path: Path) -> None:
    """As `nohup` starts programs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(tmp_path, *SHORT)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    assert process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    stdout, stderr = process.communicate(b"And?\n", timeout=TIME_LIMIT_S)
    assert process.returncode == 0, stderr
    assert stdout.strip()


def test_nothing_does_not_replace_a_conversation(tmp_path: Path) -> None:
    assert say(tmp_path, "Hello\n", *SHORT, "--save-state", "kept").status == 0
    before = (tmp_path / "kept").read_bytes()
    done = say(tmp_path, "/quit\n", *SHORT, "--save-state", "kept")
    assert (done.status, (tmp_path / "kept").read_bytes()) == (0, before)
    assert "(nothing was said: kept is as it was)" in done.stderr
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600


def test_a_fenced_command_is_a_message(tmp_path: Path) -> None:
    done = say(tmp_path, '"""/quit"""\n/stats\n', *SHORT)
    assert "1 turn, " in done.stderr


def test_a_numerical_fault_ends_the_chat(tmp_path: Path) -> None:
    directory = copy_checkpoint(k3rs.shipped_model(), tmp_path / "infinite")
    with edited_tensor(directory, "language_model.lm_head.weight") as tensor:
        tensor.data[:] = b"\xff" * len(tensor.data)
    done = say(tmp_path, "Hello\nnever said\n", directory, *SHORT)
    assert (done.status, done.stdout) == (4, "")
    assert done.stderr.count("numerical fault") == 1


def test_without_a_home_or_a_cache_there_is_still_a_chat(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no directory")
    done = say(tmp_path, "Hello\n", *SHORT)
    assert done.status == 0, done.stderr
    assert done.stdout.strip()
    assert "(going back will cost time: there is no directory for checkpoints: " in done.stderr


def test_a_longer_conversation_than_planned_for_is_refused(
    shipped: k3rs.Model, tmp_path: Path
) -> None:
    with Dialogue(shipped, cache_directory=tmp_path / "cache") as dialogue:
        list(dialogue.ask("Hello", max_tokens=5, sampler=Scripted(WORDS)))
        dialogue.save(tmp_path / "kept")
        length = dialogue.position
    with Dialogue(shipped, context=length, cache_directory=tmp_path / "cache") as small:
        with pytest.raises(InputError, match=f"fewer than {length} ids"):
            small.load(tmp_path / "kept")
        assert small.conversation.messages == []
    with Dialogue(shipped, context=length + 1, cache_directory=tmp_path / "cache") as enough:
        enough.load(tmp_path / "kept")
        assert enough.position == length


def test_another_reply_ends_the_one_that_is_open(shipped: k3rs.Model, tmp_path: Path) -> None:
    with Dialogue(shipped, thinking="off", cache_directory=tmp_path) as dialogue:
        first = dialogue.ask("one", max_tokens=6, sampler=Scripted(WORDS))
        next(first)
        second = dialogue.ask("two", max_tokens=6, sampler=Scripted(WORDS))
        said = [message["content"] for message in dialogue.conversation.messages]
        assert said == ["one", "and"]
        next(second)
        assert list(first) == []
        dialogue.reset()
        assert list(second) == []
        assert dialogue.conversation.messages == []


def test_a_session_of_another_model_leaves_the_present_one(
    shipped: k3rs.Model, model: k3rs.Model, tmp_path: Path
) -> None:
    other = model.session()
    other.forward([1])
    other.save(tmp_path / "other", note="x")
    (tmp_path / "no directory").touch()
    with Dialogue(shipped, thinking="off", cache_directory=tmp_path / "no directory") as dialogue:
        list(dialogue.ask("Hello", max_tokens=3, sampler=Scripted(WORDS)))
        with pytest.raises((SessionFileError, InputError)):
            dialogue.load(tmp_path / "other")
        list(dialogue.ask("And?", max_tokens=3, sampler=Scripted(WORDS)))
        alone = len(chat.encode([{"role": "user", "content": "And?"}], TOKENIZER, thinking="off"))
        # With what ends the first reply, and not with all that was said.
        assert dialogue.prompt_tokens <= alone + 15


def test_half_a_surrogate_pair_in_a_call_can_stand_in_history() -> None:
    call = {"function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    ids = chat.encode([message], TOKENIZER, generation_prompt=False)
    text = TOKENIZER.decode(ids)
    assert r'json type="object"<|sep|>{"a": "\ud800"}<|close|>json' in text


def test_a_note_that_is_no_text_is_refused(shipped: k3rs.Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="half a surrogate pair"):
        shipped.session().save(tmp_path / "file", note="\ud800")


def test_a_terminal_gets_no_escape_sequence_of_the_model(tmp_path: Path) -> None:
    arguments = ("generate", "--prompt", "hi", "-n", "44", "--temperature", "1000", "--seed", "3")
    status, shown = watch(tmp_path, *arguments, "--ignore-stop", "--quiet")
    assert status == 0
    assert "\u241b" in shown
    assert "\x1b" not in shown
