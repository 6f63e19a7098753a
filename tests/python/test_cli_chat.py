"""`k3rs chat`, as a program that pipes text through it and a person at a terminal see it."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from harness import (
    TIME_LIMIT_S,
    Completed,
    command_environment,
    file_names,
    smallest_budget,
)

import k3rs
from k3rs import chat

GREEDY = ("--temperature", "0", "-n", "12")
PLAIN = ("--think", "off", *GREEDY)
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"
# Makes the terminal the one whose Ctrl-C the process gets.
AT_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, '-m', 'k3rs', 'chat', *sys.argv[1:]])"
)

Piped: TypeAlias = Callable[..., Completed]


def environment(directory: Path) -> dict[str, str]:
    """Of a command that keeps what it keeps within `directory`."""
    return command_environment(
        XDG_CACHE_HOME=str(directory / "cache"),
        XDG_STATE_HOME=str(directory / "state"),
        TERM="xterm",
        # The terminal of the tests does not say where its cursor is.
        PROMPT_TOOLKIT_NO_CPR="1",
    )


@pytest.fixture
def piped(tmp_path: Path) -> Piped:
    """Runs `k3rs chat` with lines on standard input, away from the source checkout."""

    def run(lines: str | bytes, *arguments: str | Path, **extra: str) -> Completed:
        done = subprocess.run(
            [sys.executable, "-m", "k3rs", "chat", *map(str, arguments)],
            cwd=tmp_path,
            env=environment(tmp_path) | extra,
            input=lines.encode() if isinstance(lines, str) else lines,
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
        if done.returncode == 0:
            assert file_names(tmp_path / "cache" / "k3rs") == []
        return Completed(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


class Person:
    """Somebody at a terminal of 80 columns, who types and reads."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 80))
        self._process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *arguments],
            cwd=directory,
            env=environment(directory),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self._unread = ""
        self.seen = ""

    def types(self, keys: str) -> None:
        """Reads the echo meanwhile: a terminal that is full of it takes no more keys."""
        data = keys.encode()
        while data:
            readable, writable, _ = select.select([self._ours], [self._ours], [], TIME_LIMIT_S)
            if readable:
                assert self._receive()
            elif writable:
                data = data[os.write(self._ours, data[:256]) :]

    def says(self, text: str) -> None:
        """Types a message or a command, and Enter."""
        self.types(f"{text}\r")

    def reads(self, text: str) -> str:
        """Waits for `text` behind what was read before; returns all up to its end."""
        deadline = time.monotonic() + TIME_LIMIT_S
        while text not in self._unread:
            assert time.monotonic() < deadline, f"no {text!r} in {self._unread!r}"
            assert self._receive(), f"no {text!r} in {self._unread!r}"
        before, found, self._unread = self._unread.partition(text)
        return before + found

    def reads_prompt(self) -> str:
        """Waits until something can be typed."""
        return self.reads("\x1b[?2004h") + self.reads("> ")

    def leaves(self) -> int:
        """The status of the process, which ends by itself."""
        while self._receive():
            pass
        return self._process.wait(TIME_LIMIT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(TIME_LIMIT_S)
        os.close(self._ours)

    def _receive(self) -> bool:
        """More of what is shown; whether there was any."""
        ready, _, _ = select.select([self._ours], [], [], TIME_LIMIT_S)
        try:
            data = os.read(self._ours, 1 << 16) if ready else b""
        except OSError:  # how a terminal says that nobody writes to it any more
            data = b""
        text = data.decode(errors="replace").replace("\r\n", "\n")
        self._unread += text
        self.seen += text
        return bool(data)


Sit: TypeAlias = Callable[..., Person]


@pytest.fixture
def sit(tmp_path: Path) -> Iterator[Sit]:
    """Starts `k3rs chat` at a terminal."""
    people: list[Person] = []

    def begin(*arguments: str) -> Person:
        people.append(Person(tmp_path, *arguments))
        return people[-1]

    yield begin
    for person in people:
        person.close()


@pytest.fixture(scope="module")
def shipped() -> Iterator[k3rs.Model]:
    with k3rs.Model.open(k3rs.shipped_model(), memory="1GB", threads=1) as opened:
        yield opened


def greedy(model: k3rs.Model, text: str, thinking: str, count: int = 12) -> str:
    """What the model writes first when it is told `text`."""
    assert model.tokenizer is not None
    prompt = chat.encode([{"role": "user", "content": text}], model.tokenizer, thinking=thinking)
    return "".join(token.text for token in model.generate(prompt, max_tokens=count))


def plain(shown: str) -> str:
    """The words of it, without what only moves the cursor or changes colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", shown).split())


def said(file: Path) -> list[str]:
    """What the user said in a conversation that was saved."""
    turns = json.loads(k3rs.SavedSession.read(file).note)["turns"]
    messages = [turn["message"] for turn in turns]
    return [each["content"] for each in messages if each["role"] == "user"]


def test_answers_alone_go_to_stdout(piped: Piped, shipped: k3rs.Model) -> None:
    done = piped("Hello\n/stats\n", *PLAIN)
    assert done.status == 0
    assert done.stdout == greedy(shipped, "Hello", "off") + "\n"
    lines = done.stderr.splitlines()
    assert re.fullmatch(
        r"nano: 9 layers, memory \S+ GB, room for 8192 ids; /help lists commands", lines[0]
    )
    assert lines[1:4] == [
        "thinking off; greedy",
        "(this small model continues texts; it was never taught to chat)",
        "(cut off: --max-tokens or the context is used up)",
    ]
    assert re.fullmatch(r"1 turn, \d+ of 8192 ids; last answer 12 tokens", lines[4])
    assert re.fullmatch(r"read \S+ .?B of weights, peak memory \S+ .B", lines[5])
    assert "\x1b" not in done.stderr


def test_reasoning_is_no_answer(piped: Piped, shipped: k3rs.Model) -> None:
    done = piped("Hello\n/reasoning\n", *GREEDY)
    assert done.stdout == ""
    assert greedy(shipped, "Hello", "max") in done.stderr
    assert "(the reply ends within the reasoning: there is no answer)" in done.stderr


def test_quiet_is_the_answers_alone(piped: Piped) -> None:
    done = piped("Hello\nAnd\n", *PLAIN, "--quiet")
    assert (done.status, done.stderr) == (0, "")
    assert done.stdout == piped("Hello\nAnd\n", *PLAIN).stdout
    assert len(done.stdout.strip()) > 20


COMMANDS = {
    "/help": "/save FILE                keep the conversation",
    "/system": "system: (none)\n",
    "/system Be brief": "system: Be brief\n",
    "/system -": "system: (none)\n",
    "/think low": "thinking low; greedy\n",
    "/think": "thinking low; greedy\n",
    "/think hard": "expected /think with one of off, low, high, max, found `hard`\n",
    "/fold": "reasoning is folded\n",
    "/fold ": "reasoning is shown\n",
    "/reasoning": "(no reasoning)\n",
    "/retry": "expected a reply to replace, found none\n",
    "/undo": "expected a turn to take back, found none\n",
    "/reset": "(a new conversation)\n",
    "/save": "expected the name of a file, found none\n",
    "/save no/where": "cannot save the session",
    "/load missing": "No such file",
    "/stats": "0 turns, ",
    "/other thing": "expected a command, found `/other`\nhint: /help lists them",
    "/": "expected a command, found `/`",
    "/think\toff": "thinking off; greedy\n",
}


def test_commands_answer(piped: Piped) -> None:
    done = piped("\n".join([*COMMANDS, "/quit", "never said"]), *GREEDY)
    assert (done.status, done.stdout) == (0, "")
    notes = [line for line in done.stderr.splitlines() if not line.startswith(("error", "hint"))]
    assert max(map(len, notes)) <= 80
    rest = done.stderr.partition("never taught to chat)\n")[2]
    for command, expected in COMMANDS.items():
        assert expected in rest, command
        rest = rest.partition(expected)[2]


def test_commands_change_the_conversation(
    piped: Piped, shipped: k3rs.Model, tmp_path: Path
) -> None:
    talk = "One\n/retry\nTwo\n/undo\n/save a\nThree\n/load a\n/save b\n/reset\nFour\n/save c\n"
    done = piped(talk, *PLAIN)
    assert done.status == 0
    # Greedily, another answer to the same message is the same.
    assert done.stdout.startswith(f"{greedy(shipped, 'One', 'off')}\n" * 2)
    assert done.stdout.endswith(f"{greedy(shipped, 'Four', 'off')}\n")
    assert "(taken back: Two)" in done.stderr
    assert "(loaded 1 turn, " in done.stderr
    assert re.search(r"\(saved to a, \d+ kB; /load or --load-state goes on\)", done.stderr)
    assert [said(tmp_path / name) for name in "abc"] == [["One"], ["One"], ["Four"]]


def test_what_was_taken_back_is_shown_short(piped: Piped) -> None:
    done = piped(f"{'ab ' * 40}\n/undo\n/stats\n", *PLAIN)
    assert f"(taken back: {'ab ' * 19}...)" in done.stderr
    assert "0 turns" in done.stderr


@pytest.mark.parametrize(("end", "last"), [("no line end", "no line end"), ('"""\nopen', "open")])
def test_what_is_typed_is_what_is_said(piped: Piped, tmp_path: Path, end: str, last: str) -> None:
    typed = '//usr is full\n"""\na\n\n  b\n"""\n"""c"""\n\n  \n x \nКлюч 🙂\n' + end
    done = piped(typed, *PLAIN, "--save-state", "file")
    assert done.status == 0, done.stderr
    assert said(tmp_path / "file") == ["/usr is full", "a\n\n  b", "c", " x ", "Ключ 🙂", last]


def test_what_is_no_text_is_refused_and_the_chat_goes_on(piped: Piped, tmp_path: Path) -> None:
    done = piped(
        b"\xff\xfe\nHello\n", *PLAIN, "--save-state", "file", PYTHONIOENCODING="utf-8:strict"
    )
    assert done.status == 0
    assert "error: message.content: expected text, found half a surrogate pair" in done.stderr
    assert said(tmp_path / "file") == ["Hello"]


def test_without_standard_input_there_is_nothing_to_say(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m k3rs chat <&-', sys.executable],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_context_that_is_too_small_is_said(piped: Piped) -> None:
    done = piped("Hello\n/stats\n", *GREEDY, "--context", "100")
    assert (done.status, done.stdout) == (0, "")
    assert "expected a conversation of fewer than 100 ids" in done.stderr
    assert "0 turns, " in done.stderr


def test_wrong_arguments_are_usage_errors(piped: Piped) -> None:
    for arguments in (("--think", "hard"), ("--max-tokens", "0"), ("--temperature", "-1")):
        done = piped("Hello\n", *arguments)
        assert (done.status, done.stdout) == (2, "")
        assert "error: " in done.stderr


def test_by_default_tokens_are_drawn_as_the_makers_recommend(piped: Piped) -> None:
    drawn = re.compile(r"thinking max; temperature 1\.0, top-p 0\.95, seed (\d+)")
    seeds = {match[1] for _ in range(2) if (match := drawn.search(piped("").stderr))}
    assert len(seeds) == 2
    done = piped("", "--top-p", "0.5", "--seed", "3", "--presence-penalty", "1")
    assert "temperature 1.0, top-p 0.5, seed 3, presence-penalty 1.0" in done.stderr


def test_a_seed_gives_the_same_answers_at_any_budget(piped: Piped) -> None:
    common = ("--think", "off", "-n", "16", "--context", "512")
    talk = "Hello\n/retry\n"
    plain = piped(talk, *common, "--seed", "5", "--threads", "1")
    memory = f"{smallest_budget(k3rs.shipped_model(), 512, 2)}B"
    small = piped(talk, *common, "--seed", "5", "--threads", "2", "--memory", memory)
    assert (plain.status, small.status) == (0, 0)
    assert plain.stdout == small.stdout
    assert plain.stdout != piped(talk, *common, "--seed", "6").stdout


def test_a_chat_goes_on_where_it_stopped(piped: Piped, tmp_path: Path) -> None:
    system = ("--system", "Be brief.")
    whole = piped("Hello\nAnd then?\n", *PLAIN, *system, "--threads", "1")
    first = piped("Hello\n", *PLAIN, *system, "--save-state", "talk")
    memory = f"{smallest_budget(k3rs.shipped_model(), 8192, 2)}B"
    second = piped(
        *("And then?\n/system\n", *PLAIN, "--load-state", "talk", "--save-state", "more"),
        *("--threads", "2", "--memory", memory),
    )
    assert (first.status, second.status) == (0, 0), second.stderr
    assert first.stdout + second.stdout == whole.stdout
    assert "system: Be brief." in second.stderr
    assert said(tmp_path / "more") == ["Hello", "And then?"]
    other = piped("/system\n", *PLAIN, "--load-state", "talk", "--system", "Be kind.")
    assert "system: Be kind." in other.stderr


def test_a_state_that_cannot_be_used_is_an_error_before_anything_is_said(
    piped: Piped, shipped: k3rs.Model, tmp_path: Path
) -> None:
    shipped.session().save(tmp_path / "no conversation")
    for arguments, status, words in (
        (("--save-state", "no/where"), 1, "no/where"),
        (("--load-state", "missing"), 1, "No such file"),
        (("--load-state", "no conversation"), 2, "expected a conversation"),
    ):
        done = piped("Hello\n", *PLAIN, *arguments)
        assert (done.status, done.stdout) == (status, "")
        assert words in done.stderr
        assert "lists commands" not in done.stderr


def test_a_person_sees_progress_reasoning_and_what_it_cost(sit: Sit, shipped: k3rs.Model) -> None:
    person = sit(*GREEDY)
    assert "thinking max; greedy" in person.reads_prompt()
    thought = greedy(shipped, "Hello", "max")
    person.says("Hello")
    shown = person.reads(" tokens/s)").rsplit("\x1b[2K", 1)
    words = plain(shown[0])
    assert re.search(r"reading the prompt [━╸ ]+ \d+/\S+ layers", words)
    assert f"\x1b[2m{thought}\x1b[22m\n" in shown[1]
    assert re.search(r"\x1b\[2m\(0:00:\d\d, \d+ ids read, 12 tokens, ", shown[1])
    person.reads_prompt()
    person.says("/fold")
    person.reads("reasoning is folded")
    person.reads_prompt()
    person.says("/retry")
    shown = person.reads(" tokens/s)").rsplit("\x1b[2K", 1)
    assert thought[:20] not in shown[0] + shown[1]
    assert "\x1b[2m(thought; /reasoning shows it)\n\x1b[22m" in shown[1]
    assert ", 0 ids read, " in shown[1]
    person.reads_prompt()
    person.says("/reasoning")
    person.reads(f"\x1b[2m{thought}\x1b[22m")
    person.reads_prompt()
    person.types(CTRL_D)
    assert person.leaves() == 0


def test_while_a_long_prompt_is_read_the_time_to_go_is_shown(sit: Sit) -> None:
    person = sit(*PLAIN)
    person.reads_prompt()
    person.says("🙂" * 500)
    person.reads("reading the prompt")
    shown = plain(person.reads("answering"))
    assert re.search(r"[1-9]\d*/\d+ layers 0:00:\d\d 0:00:\d\d, \d{4} ids read", shown)


def test_ctrl_c_breaks_an_answer_off_and_the_chat_goes_on(sit: Sit, tmp_path: Path) -> None:
    person = sit("--think", "off", "--temperature", "0")
    person.reads_prompt()
    person.says("Hello")
    person.reads("answering, token")
    person.types(CTRL_C)
    person.reads("(broken off; what was said is kept: /undo takes it back, /retry answers again)")
    person.reads_prompt()
    person.says("/save talk")
    person.reads("(saved to talk")
    turns = json.loads(k3rs.SavedSession.read(tmp_path / "talk").note)["turns"]
    assert turns[1]["message"]["content"].split()
    person.reads_prompt()
    person.says("And?")
    person.reads("answering, token")
    person.types(CTRL_C)
    cost = person.reads(" tokens/s)")
    # Only what was said now, and the end of the answer before it.
    assert int(re.findall(r"(\d+) ids read", cost)[-1]) < 60
    person.reads_prompt()
    person.says("/quit")
    assert person.leaves() == 0


def test_ctrl_c_while_the_prompt_is_read_leaves_the_conversation(sit: Sit) -> None:
    person = sit(*PLAIN)
    person.reads_prompt()
    person.says("🙂" * 500)
    person.reads("reading the prompt")
    person.types(CTRL_C)
    person.reads("(broken off before the answer; the conversation is as it was)")
    person.reads_prompt()
    person.says("/stats")
    person.reads("0 turns, ")
    person.reads_prompt()
    person.says("Hello")
    person.reads(" tokens/s)")


def test_ctrl_c_twice_leaves(sit: Sit, tmp_path: Path) -> None:
    person = sit(*PLAIN, "--save-state", "talk")
    person.reads_prompt()
    person.types(CTRL_C)
    person.reads("(Ctrl-C again leaves)")
    person.reads_prompt()
    person.says("Hello")
    person.reads(" tokens/s)")
    for _ in range(2):
        person.reads_prompt()
        person.types(CTRL_C)
    assert person.leaves() == 130
    assert person.seen.count("(Ctrl-C again leaves)") == 2
    assert said(tmp_path / "talk") == ["Hello"]


def test_messages_of_several_lines_can_be_typed(sit: Sit, tmp_path: Path) -> None:
    person = sit(*PLAIN, "--save-state", "talk")
    for typed in (f"a{ALT_ENTER}b", '"""c\r\rd"""', "//e"):
        person.reads_prompt()
        person.says(typed)
        person.reads(" tokens/s)")
    person.reads_prompt()
    person.types("/res\t")
    person.reads("et")
    person.types("\r")
    person.reads("(a new conversation)")
    person.reads_prompt()
    person.says("f")
    person.reads(" tokens/s)")
    person.reads_prompt()
    person.says("/load talk")
    person.reads("No such file")
    person.reads_prompt()
    person.types(CTRL_D)
    assert person.leaves() == 0
    assert said(tmp_path / "talk") == ["f"]
    history = (tmp_path / "state" / "k3rs" / "chat_history").read_text(encoding="utf-8")
    # An entry is a comment, and behind it its lines, each behind a plus sign.
    entries = [entry.partition("\n")[2].strip() for entry in history.split("# ")[1:]]
    assert entries == ["+a\n+b", '+"""c\n+\n+d"""', "+//e", "+/reset", "+f", "+/load talk"]


def test_what_was_typed_can_be_fetched_again_another_day(sit: Sit, tmp_path: Path) -> None:
    person = sit(*PLAIN)
    person.reads_prompt()
    person.says("/system from yesterday")
    person.reads("system: from yesterday")
    person.reads_prompt()
    person.types(CTRL_D)
    assert person.leaves() == 0
    history = tmp_path / "state" / "k3rs" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    person = sit(*PLAIN)
    person.reads_prompt()
    person.types(UP)
    person.reads("/system from yesterday")
    person.types("\r")
    person.reads("system: from yesterday")
