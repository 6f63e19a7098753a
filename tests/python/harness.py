"""What the tests share: the fixture checkpoint's prompts, and the command as a process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import k3rs

TINY_K3 = Path(__file__).parents[2] / "fixtures" / "tiny_k3"
TIME_LIMIT_S = 60
PLAN_KEYS = {
    "budget_bytes",
    "entries",
    "pinned_bytes",
    "pinned_fraction",
    "ring_bytes",
    "expert_slots",
}


@dataclass(frozen=True)
class Prompt:
    """A prompt of the fixture and what the reference continues it with."""

    ids: list[int]
    argmax: list[int]
    greedy: list[int]


@dataclass(frozen=True)
class Completed:
    """What a run of the command left behind."""

    status: int
    stdout: str
    stderr: str

    @property
    def facts(self) -> dict[str, Any]:
        """Standard output as JSON."""
        facts: dict[str, Any] = json.loads(self.stdout)
        return facts


RunK3rs: TypeAlias = Callable[..., Completed]


def joined(ids: Sequence[int]) -> str:
    """Ids as `--ids` takes them and an answer without a tokenizer shows them."""
    return ",".join(map(str, ids))


def smallest_budget(directory: Path, positions: int, threads: int | None = None) -> int:
    """With it next to nothing stays in memory: every token reads the files again."""
    request = k3rs.MemoryRequest(memory_bytes=10**9)
    facts = k3rs.plan(directory, request, positions=positions, threads=threads)
    minimum: int = facts["minimum_bytes"]
    return minimum


def command_environment(**extra: str) -> dict[str, str]:
    """The environment of a command in which every Python warning is an error."""
    return {**os.environ, "PYTHONWARNINGS": "error", **extra}


def run_python(directory: Path, *arguments: str | Path, **extra: str) -> Completed:
    """Runs this interpreter with `arguments` in `directory`; `extra` goes into its environment."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=directory,
        env=command_environment(**extra),
        capture_output=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    return Completed(done.returncode, done.stdout.decode(), done.stderr.decode())


def interrupt_generation(directory: Path, *arguments: str | Path) -> Completed:
    """Runs `k3rs generate` in `directory` and presses Ctrl-C at the first byte of its answer.

    It has to end within ten seconds.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "k3rs", "generate", *map(str, arguments), "--ignore-stop"],
        cwd=directory,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None
    begin = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    rest, stderr = process.communicate(timeout=TIME_LIMIT_S)
    assert time.monotonic() - started < 10
    return Completed(process.returncode, (begin + rest).decode(), stderr.decode())


def file_names(directory: Path) -> list[str]:
    """What is in `directory`, sorted."""
    return sorted(path.name for path in directory.iterdir())
