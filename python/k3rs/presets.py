"""How much memory to plan with: a size, a named budget, or the shares set by hand."""

from dataclasses import dataclass
from typing import Final

from k3rs.exceptions import InputError
from k3rs.sizes import parse_memory

__all__ = ["PRESETS", "MemoryRequest", "Preset", "find_preset", "request_memory"]


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    """What the memory plan is asked for; all `None` is whatever the machine can give.

    `memory_bytes` bounds the whole process. `trunk_bytes` and `cache_bytes` set
    the resident trunk and the expert cache by hand instead.
    """

    memory_bytes: int | None = None
    trunk_bytes: int | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Preset:
    """A named budget for everything that the process keeps in memory."""

    name: str
    memory_bytes: int
    description: str


PRESETS: Final = (
    Preset("pocket", 2 * 10**9, "a small board or container; nearly everything streams"),
    Preset("laptop", 8 * 10**9, "a laptop that goes on being used for other work"),
    Preset("desktop", 32 * 10**9, "a desktop computer"),
    Preset("workstation", 96 * 10**9, "most of the trunk of the released model stays resident"),
    Preset("server", 128 * 10**9, "the trunk of the released model stays resident"),
    Preset("max", 224 * 10**9, "trunk resident, and a large cache of experts"),
)


def find_preset(name: str) -> Preset:
    """The preset called `name`."""
    for preset in PRESETS:
        if preset.name == name:
            return preset
    names = ", ".join(preset.name for preset in PRESETS)
    raise InputError(
        f"expected the name of a preset, found `{name}`", hint=f"the presets are {names}"
    )


def request_memory(
    memory: str | int = "auto",
    *,
    preset: str | None = None,
    trunk_bytes: int | None = None,
    cache_bytes: int | None = None,
) -> MemoryRequest:
    """One request from the three ways to ask, of which only one may be used.

    `memory` is a size such as `8GB`, a number of bytes, or `auto`.
    """
    memory_bytes = parse_memory(memory)
    shares = trunk_bytes is not None or cache_bytes is not None
    if (memory_bytes is not None) + (preset is not None) + shares > 1:
        raise InputError(
            "expected one memory budget, found several",
            hint="give a size, or a preset, or the trunk and cache shares",
        )
    if preset is not None:
        memory_bytes = find_preset(preset).memory_bytes
    return MemoryRequest(memory_bytes, trunk_bytes, cache_bytes)
