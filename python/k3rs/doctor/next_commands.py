"""What to type next, as it has to be typed."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from k3rs.doctor.checks import Check, Status
from k3rs.doctor.model_state import ModelState, missing_release_bytes, release_directory

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
        place = release_directory(directory)
        doing = "download" if missing_release_bytes(place) else "doctor"
        return [f"k3rs {doing} {_word(place)}"]
    budget = "" if preset is None else f" --preset {preset}"
    layers = "" if model.layers is None else f" --layers {model.layers}"
    prompt = _PROMPT if "tokenizer" in fine else "--ids 1,2,3"
    generate = f"k3rs generate {_word(model.directory)}{layers}{budget} {prompt}"
    if not model.is_complete:
        runs = [generate] if fits and model.runnable_layers else []
        if any(check.name == "space" for check in checks) and "space" not in fine:
            return runs or [_SHIPPED]
        return [*runs, *_complete(model)]
    commands = []
    if model.manifest is not None:
        commands.append(f"k3rs verify {_word(model.directory)}")
    return [*commands, generate if fits else _SHIPPED]


def _complete(model: ModelState) -> list[str]:
    """How to get what is missing of `model`; a damaged manifest would stop a download."""
    place = _word(model.directory)
    if model.is_download and model.manifest is not None:
        return [f"k3rs download {shlex.quote(str(model.manifest.repo))} {place}"]
    if model.facts is None:
        return []
    can_begin = model.is_release and model.manifest_error is None
    return [f"k3rs download {place}" if can_begin else f"k3rs inspect {place}"]


def _word(path: Path) -> str:
    return shlex.quote(str(path))
