"""What to type next, as it has to be typed."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from k3rs.doctor.checks import Check, Status
from k3rs.doctor.model_state import ModelState
from k3rs.hub.manifest import MANIFEST_FILE

__all__ = ["next_commands"]

_PROMPT = '--prompt "In the beginning"'
_SHIPPED = f"k3rs generate {_PROMPT}"


def next_commands(
    model: ModelState | None,
    directory: Path,
    checks: Sequence[Check],
    *,
    fits: bool,
    preset: str | None,
) -> list[str]:
    """The commands that lead on from what was found, in order; none where nothing does.

    `fits` says whether any budget fits, and `preset` is the largest one, if it is named.
    """
    fine = {check.name for check in checks if check.status is Status.OK}
    if "platform" not in fine:
        return []
    if model is None:
        if "space" not in fine or not fits:
            return [_SHIPPED]
        begun = (directory / MANIFEST_FILE).exists()
        return [f"k3rs download {_word(directory if begun else directory / 'Kimi-K3')}"]
    if not model.is_complete:
        return _complete(model)
    commands = []
    if model.manifest is not None:
        commands.append(f"k3rs verify {_word(model.directory)}")
    if not fits:
        return [*commands, _SHIPPED]
    budget = "" if preset is None else f" --preset {preset}"
    prompt = _PROMPT if "tokenizer" in fine else "--ids 1,2,3"
    return [*commands, f"k3rs generate {_word(model.directory)}{budget} {prompt}"]


def _complete(model: ModelState) -> list[str]:
    """How to get what is missing of `model`."""
    place = _word(model.directory)
    if model.is_download and model.manifest is not None:
        return [f"k3rs download {shlex.quote(str(model.manifest.repo))} {place}"]
    if model.facts is None:
        return []
    return [f"k3rs download {place}" if model.is_release else f"k3rs inspect {place}"]


def _word(path: Path) -> str:
    return shlex.quote(str(path))
