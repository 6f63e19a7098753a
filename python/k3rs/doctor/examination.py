"""The examination: looks at the machine, measures memory and device, and computes from these.

The device is that below a model, or below a directory where one could go. From what it delivers
and the model's sizes follows what a token would take with every budget that fits.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3rs import _k3rs
from k3rs.checkpoint import plan
from k3rs.device import Device, interruptible, measure_directory, measure_shards
from k3rs.doctor.checks import (
    Check,
    Status,
    check_device,
    check_directory,
    check_machine,
    check_memory_read,
    check_model,
    check_python,
)
from k3rs.doctor.estimate import RELEASE, Estimate, ModelSizes, estimate, release_residency
from k3rs.doctor.machine import ROOT, Machine, read_machine
from k3rs.doctor.model_state import ModelState, read_model
from k3rs.doctor.next_commands import next_commands
from k3rs.exceptions import InputError, K3Error
from k3rs.presets import PRESETS
from k3rs.shipped_model import shipped_model
from k3rs.sizes import format_size

__all__ = ["Probe", "Report", "examine"]

_LONGEST_S = 600


@dataclass(frozen=True)
class Probe:
    """How the device is measured: by seconds a kind of read and, without a model, a file."""

    seconds: float = 1.0
    size_bytes: int | None = None
    """The size of the temporary file; `None` for 1 GiB, or a quarter of the room."""

    def __post_init__(self) -> None:
        """Refuses times that are none, or that nobody would wait for."""
        if not 0 < self.seconds <= _LONGEST_S:
            raise InputError(
                f"expected seconds above 0 and up to {_LONGEST_S}, found {self.seconds}",
                "leave them out for the default",
            )


@dataclass(frozen=True)
class Report:
    """What was found. `estimates` are computed, `device` and `memory_read_gb_s` measured."""

    checks: list[Check]
    machine: Machine
    memory_read_gb_s: float
    device: Device | None
    model: ModelState | None
    sizes: ModelSizes | None
    estimates: list[Estimate]
    recommended: str | None
    next: list[str]

    @property
    def failures(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.status is Status.FAILURE]

    @property
    def facts(self) -> dict[str, Any]:
        """All of it for JSON.

        `checks` have `name`, `status` (`ok`, `warning`, `failure`), `found` and `advice`;
        `machine` and `device` what was measured here, `device` null where it could not be;
        `model` is null without one; `estimates` are computed, one for each budget that fits, of
        the model whose sizes are `estimated`; `recommended` is the preset to use, or null; and
        `next` are commands to type, in order.
        """
        model = self.model
        machine = {**asdict(self.machine), "memory_read_gb_s": self.memory_read_gb_s}
        return {
            "checks": [asdict(check) for check in self.checks],
            "machine": machine,
            "device": None if self.device is None else asdict(self.device),
            "model": None
            if model is None
            else {
                "path": str(model.directory),
                "complete": model.is_complete,
                "runnable_layers": model.runnable_layers,
                "missing_shards": [] if model.facts is None else model.facts["missing_shards"],
            },
            "estimated": None if self.sizes is None else asdict(self.sizes),
            "estimates": [asdict(entry) for entry in self.estimates],
            "recommended": self.recommended,
            "next": self.next,
        }


def examine(
    model_directory: Path | None = None,
    directory: Path = Path(),
    *,
    probe: Probe | None = None,
    root: Path = ROOT,
) -> Report:
    """Examines the machine and a model, or `directory` as a place for the released one.

    Nothing is ever written to `model_directory`; in `directory` there is a temporary file while
    the device is measured. What is not good becomes a check that says so, not an exception.
    `root` has the `/proc` and `/sys` to read. Takes some seconds. Raises `InputError` where
    `directory` is none, and for a size of the temporary file that cannot be, or beside a model.
    """
    probe = probe or Probe()
    if model_directory is not None and probe.size_bytes is not None:
        raise InputError(
            f"expected no size of a temporary file beside `{model_directory}`, whose own files are "
            f"read, found {format_size(probe.size_bytes)}",
            "leave out the size (--probe-size), or the model",
        )
    if not directory.is_dir():
        raise InputError(
            f"expected a directory, found `{directory}`", "name one that exists, or make it"
        )
    machine = read_machine(root)
    model = None if model_directory is None else read_model(model_directory)
    place = model_directory or directory
    memory_read_gb_s = interruptible(_k3rs.memory_read_gb_s)
    checks = [*check_machine(machine), check_python(), check_memory_read(memory_read_gb_s)]
    if model is not None:
        checks += check_model(model)
    device: Device | None = None
    if model is None or not model.is_broken:
        checks += check_directory(place, model, root)
        device, why_not = _measure(model, place, probe)
        checks += check_device(device, why_not)
    sizes = RELEASE if model is None else model.sizes()
    estimates = _estimates(machine, model, sizes, memory_read_gb_s, device)
    fitting = {entry.budget for entry in estimates}
    presets = [preset.name for preset in PRESETS if preset.name in fitting]
    recommended = presets[-1] if presets else None
    return Report(
        checks,
        machine,
        memory_read_gb_s,
        device,
        model,
        sizes,
        estimates,
        recommended,
        next_commands(model, directory, checks, fits=bool(estimates), preset=recommended),
    )


def _measure(
    model: ModelState | None, place: Path, probe: Probe
) -> tuple[Device | None, K3Error | None]:
    try:
        if model is not None:
            return measure_shards(place, seconds=probe.seconds), None
        size_bytes = probe.size_bytes
        return measure_directory(place, probe_bytes=size_bytes, seconds=probe.seconds), None
    except InputError:
        raise
    except K3Error as error:
        return None, error


def _estimates(
    machine: Machine,
    model: ModelState | None,
    sizes: ModelSizes | None,
    memory_read_gb_s: float,
    device: Device | None,
) -> list[Estimate]:
    """A token with every budget that fits the memory, the largest preset last but `auto`."""
    if sizes is None or (model is not None and model.is_broken):
        return []
    usable_bytes = machine.usable_bytes or 0
    budgets = [(preset.name, preset.memory_bytes) for preset in PRESETS]
    auto_bytes = _automatic_budget()
    if auto_bytes is not None:
        budgets.append(("auto", auto_bytes))
    kept = [
        (name, size_bytes, residency)
        for name, size_bytes in budgets
        if size_bytes <= usable_bytes
        and (residency := (model.residency if model else release_residency)(size_bytes))
    ]
    # What comes out of holes says nothing of what will come off the disk.
    known = None if device is None or device.sparse else device
    return list(estimate(sizes, kept, memory_read_gb_s=memory_read_gb_s, device=known))


def _automatic_budget() -> int | None:
    """What `--memory auto` would give any model now."""
    try:
        budget_bytes: int = plan(shipped_model())["plan"]["budget_bytes"]
    except K3Error:
        return None
    return budget_bytes
