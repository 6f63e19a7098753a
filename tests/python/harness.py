"""What the tests share: the fixture checkpoint's prompts, and the command as a process."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

TINY_K3 = Path(__file__).parents[2] / "fixtures" / "tiny_k3"
TIME_LIMIT_S = 60


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


def command_environment(**extra: str) -> dict[str, str]:
    """The environment of a command in which every Python warning is an error."""
    return {**os.environ, "PYTHONWARNINGS": "error", **extra}


def file_names(directory: Path) -> list[str]:
    """What is in `directory`, sorted."""
    return sorted(path.name for path in directory.iterdir())
