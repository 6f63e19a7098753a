"""What is looked at, each with a verdict and, where it is not good, what to do about it."""

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from k3rs.checkpoint import load_tokenizer
from k3rs.device import Device
from k3rs.doctor.estimate import RELEASE
from k3rs.doctor.machine import ROOT, Machine, find_file_system
from k3rs.doctor.model_state import ModelState, missing_release_bytes, release_directory
from k3rs.exceptions import K3Error
from k3rs.hub.release import RELEASED_SHARD_BYTES
from k3rs.presets import PRESETS
from k3rs.sizes import format_size

__all__ = [
    "Check",
    "Status",
    "check_device",
    "check_directory",
    "check_machine",
    "check_memory_read",
    "check_model",
    "check_python",
]

_IN_MEMORY = {"ramfs", "tmpfs"}
_OVER_NETWORK = {"9p", "afs", "ceph", "cifs", "fuse.sshfs", "nfs", "nfs4", "smb3", "virtiofs"}
_LIBRARIES = ("numpy", "tokenizers")


class Status(StrEnum):
    """How bad it is. A failure makes k3rs, or the given model, unusable."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Check:
    """One verdict. `advice` says why it matters or what helps, `None` where all is well."""

    name: str
    status: Status
    found: str
    advice: str | None = None

    @classmethod
    def of(cls, name: str, found: str, advice: str | None, *, unless: bool) -> "Check":
        """A warning with `advice`, unless all is well."""
        return cls(name, Status.OK, found) if unless else cls(name, Status.WARNING, found, advice)


def check_machine(machine: Machine) -> Iterator[Check]:
    """The system, the processor and the memory."""
    is_linux = machine.system == "Linux"
    yield Check(
        "platform",
        Status.OK if is_linux else Status.FAILURE,
        f"{machine.system} {machine.release}, {machine.architecture}",
        None if is_linux else "k3rs needs Linux: it reads past the page cache as Linux does it",
    )
    yield Check.of(
        "cpu",
        ", ".join(machine.backends),
        "without AVX2 the output is the same, but many times slower than estimated below",
        unless=machine.backends[0] != "scalar",
    )
    physical = "unknown" if machine.physical_cores is None else machine.physical_cores
    yield Check.of(
        "cores",
        f"{physical} physical, {machine.logical_cores} logical, {machine.usable_cores} usable",
        "this process may not run on all of them; see `taskset` or the settings of the container",
        unless=machine.usable_cores >= machine.logical_cores,
    )
    time = machine.cpu_limit
    yield Check.of(
        "cpu limit",
        "none" if time is None else f"the time of {time.cores:.3g} cores ({time.path})",
        "the control group gives less time than the cores have, which slows down what is measured "
        "and estimated below as well: raise its limit",
        unless=time is None or time.cores >= machine.usable_cores,
    )
    yield from _check_memory(machine)


def _check_memory(machine: Machine) -> Iterator[Check]:
    """What is free, and what the control group leaves of it."""
    available, smallest = machine.available_bytes, PRESETS[0].memory_bytes
    yield Check.of(
        "memory",
        f"{_size(available)} available of {_size(machine.total_bytes)}",
        f"the smallest preset needs {format_size(smallest)}: end other programs",
        unless=available is not None and available >= smallest,
    )
    limit = machine.memory_limit
    found = (
        "none"
        if limit is None
        else f"{format_size(limit.limit_bytes)}, {format_size(limit.left_bytes)} of it left "
        f"({limit.path})"
    )
    others = (
        "" if limit is None or limit.limit_bytes < smallest else ", or end other programs in it"
    )
    yield Check.of(
        "memory limit",
        found,
        f"the control group leaves less than the {format_size(smallest)} of the smallest preset: "
        f"raise its limit{others}",
        unless=limit is None or limit.left_bytes >= smallest,
    )


def check_python() -> Check:
    """The interpreter and the libraries, beside the oldest that k3rs was made for."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    try:
        demands = importlib.metadata.requires("k3rs") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        demands = []
    old = []
    for demand in demands:
        match = re.match(r"(\w+)>=([0-9.]+)", demand)
        if match is not None and match[1] in versions:
            found = versions[match[1]]
            if _numbers(found) < _numbers(match[2]):
                old.append(f"{match[1]} {match[2]}")
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Check.of(
        "python",
        f"{platform.python_version()}, {libraries}",
        f"k3rs was made for {' and '.join(old)} or newer: `pip install --upgrade k3rs`",
        unless=not old,
    )


def check_memory_read(gb_s: float) -> Check:
    """How fast weights that are in memory can be read."""
    return Check("memory read", Status.OK, f"{gb_s:.1f} GB/s, all cores (measured)")


def check_directory(
    directory: Path, model: ModelState | None, root: Path = ROOT
) -> Iterator[Check]:
    """What the directory lies on, and whether what is still to come has room there."""
    system = find_file_system(directory, root)
    kind = "unknown" if system is None else f"{system.kind}, mounted at {system.mount_point}"
    if system is not None and system.kind in _IN_MEMORY:
        advice = "files there take memory, which the model needs: name a directory on a disk"
    elif system is not None and system.kind in _OVER_NETWORK:
        advice = "every token would pass the network: a disk of this machine is faster"
    else:
        advice = None
    yield Check.of("file system", kind, advice, unless=advice is None)
    yield from _check_space(directory, model)


def _check_space(directory: Path, model: ModelState | None) -> Iterator[Check]:
    """Whether what is still to be fetched has room; nothing where nothing is known to come."""
    if model is None:
        place = release_directory(directory)
        needed_bytes, name = missing_release_bytes(place), "the released model"
        advice = (
            "good for building, testing and the shipped model; for the released one name a larger "
            "disk with --directory"
        )
    else:
        place, name = directory, "the released model" if model.is_release else "the model"
        if model.missing_bytes is None:
            return
        needed_bytes = model.missing_bytes
        advice = "the rest needs a larger disk: move the directory there, and download it then"
    begun = model is not None or needed_bytes < sum(RELEASED_SHARD_BYTES.values())
    free_bytes = shutil.disk_usage(place if place.exists() else directory).free
    yield Check.of(
        "space",
        f"{format_size(free_bytes)} free, {name} needs {format_size(needed_bytes)}"
        f"{' more' if begun else ''}",
        advice,
        unless=free_bytes >= needed_bytes,
    )


def check_device(device: Device | None, why_not: K3Error | None) -> Iterator[Check]:
    """How reads work there, and how fast they are."""
    if device is None:
        found = "not measured" if why_not is None else f"not measured: {why_not}"
        yield Check("device", Status.WARNING, found, None if why_not is None else why_not.hint)
        return
    yield Check.of(
        "direct reads",
        f"{'yes' if device.direct else 'no'}: {device.why}",
        "reads pass the page cache, which costs a copy, and the speed below may be that of "
        "memory: prefer a file system with direct reads, such as ext4 or xfs",
        unless=device.direct,
    )
    small = device.file_bytes < RELEASE.expert_bytes
    yield Check.of(
        "device",
        f"{device.tiles_gb_s:.2f} GB/s tiles, {device.experts_gb_s:.2f} GB/s experts (measured"
        f"{', from files too small to tell what the disk can do' if small else ''})",
        "the files are mostly holes, so this says nothing of the disk",
        unless=not device.sparse,
    )


def check_model(model: ModelState) -> Iterator[Check]:
    """Whether the model is whole, and whether texts can be given to it."""
    if model.manifest_error is not None:
        yield Check(
            "manifest",
            Status.WARNING,
            str(model.manifest_error),
            "models run without it, but `k3rs verify` and `k3rs download` do not: remove it, and "
            "the next download makes another",
        )
    if model.is_broken:
        problem = {} if model.facts is None else model.facts["problem"] or {}
        found = str(model.error) if model.facts is None else problem.get("error", "cannot be run")
        hint = model.error.hint if model.error is not None else problem.get("hint")
        yield Check("model", Status.FAILURE, found, hint)
        return
    if model.facts is None:
        advice = "the same download continues"
        yield Check("model", Status.WARNING, "a download that was begun: no shards yet", advice)
        return
    facts, layers = model.facts, model.facts["model"]["layers"]
    size_bytes = sum(file["bytes"] for file in facts["files"])
    if model.is_complete:
        found = f"complete: {layers} layers, {format_size(size_bytes)}"
        yield Check("model", Status.OK, found)
    else:
        runnable = model.runnable_layers
        part = f"the first {runnable} of {layers} layers" if runnable else "nothing of it"
        yield Check(
            "model",
            Status.WARNING,
            f"incomplete, with {', '.join(_gaps(facts))}; {part} can be run",
            "`k3rs inspect` names what is missing",
        )
    yield _check_tokenizer(model.directory)


def _gaps(facts: Mapping[str, Any]) -> Iterator[str]:
    """What is missing or broken, counted."""
    counts = (
        (len(facts["missing_shards"]), "missing", "shard"),
        (len(facts["broken_shards"]), "broken", "shard"),
        (facts["missing"]["count"], "missing", "tensor"),
    )
    for count, what, noun in counts:
        if count:
            yield f"{count:,} {what} {noun}{'' if count == 1 else 's'}"


def _check_tokenizer(directory: Path) -> Check:
    try:
        tokenizer = load_tokenizer(directory)
    except (K3Error, OSError) as error:
        hint = getattr(error, "hint", None) or "replace the file; prompts can still be --ids"
        return Check("tokenizer", Status.WARNING, str(error), hint)
    return Check.of(
        "tokenizer",
        "none: no tiktoken.model" if tokenizer is None else "tiktoken.model",
        "prompts have to be given as --ids; the file belongs to the model",
        unless=tokenizer is not None,
    )


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_size(size_bytes)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"[0-9]+", version)[:3]))
