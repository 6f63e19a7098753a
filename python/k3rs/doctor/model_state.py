"""How far a model directory is from one that can be run, and the sizes of what is in it."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from k3rs.checkpoint import inspect, plan
from k3rs.doctor.estimate import RELEASE, ModelSizes, Residency, release_residency
from k3rs.exceptions import CheckpointError, K3Error, MemoryBudgetError
from k3rs.hub.manifest import MANIFEST_FILE, Manifest
from k3rs.hub.release import RELEASED_SHARD_BYTES
from k3rs.hub.transfer import partial_path
from k3rs.hub.verification import saved_manifest
from k3rs.presets import MemoryRequest

__all__ = ["ModelState", "missing_release_bytes", "read_model", "release_directory"]

_UNBOUNDED_BYTES: Final = 2**62
"""With this much a plan keeps the whole model, and so tells its sizes."""

_RELEASED_SHAPE: Final = (93, 7168, 163_840, 896, 16)


@dataclass(frozen=True)
class ModelState:
    """A model directory. `facts` are those of `inspect`, `error` is why there are none."""

    directory: Path
    facts: dict[str, Any] | None
    error: K3Error | None
    manifest: Manifest | None
    """What a download has left."""
    manifest_error: K3Error | OSError | None = None
    """Why that cannot be read, which a model that is run does not need."""

    @property
    def is_complete(self) -> bool:
        """Whether the whole model can be run."""
        return self.facts is not None and bool(self.facts["complete"])

    @property
    def is_broken(self) -> bool:
        """Whether it is neither a model nor on the way to become one."""
        if self.facts is None:
            return not (isinstance(self.error, CheckpointError) and self.is_download)
        shards_to_come = self.facts["missing_shards"] or self.facts["broken_shards"]
        return not (self.is_complete or self.runnable_layers or shards_to_come)

    @property
    def runnable_layers(self) -> int:
        """How many of the first layers could be run."""
        return 0 if self.facts is None else int(self.facts["runnable_layers"])

    @property
    def is_download(self) -> bool:
        """Whether `k3rs download` knows how to go on with it."""
        return self.manifest is not None and self.manifest.repo is not None

    @property
    def is_release(self) -> bool:
        """Whether it is the released model, or will be."""
        if self.facts is None:
            listed = () if self.manifest is None else self.manifest.files
            return any(RELEASED_SHARD_BYTES.get(file.path) == file.size_bytes for file in listed)
        model, moe = self.facts["model"], self.facts["config"]["moe"]
        if moe is None:
            return False
        shape = (model["layers"], model["hidden"], model["vocab"])
        return (*shape, moe["experts"], moe["experts_per_token"]) == _RELEASED_SHAPE

    @property
    def missing_bytes(self) -> int | None:
        """What a download has still to fetch, where that is known; `None` for nothing."""
        if self.is_complete:
            return None
        if self.is_release:
            return missing_release_bytes(self.directory)
        if not self.is_download or self.manifest is None:
            return None
        listed = ((file.path, file.size_bytes) for file in self.manifest.files)
        return _missing_bytes(self.directory, listed) or None

    @property
    def layers(self) -> int | None:
        """The layers that would be run; `None` for all."""
        return None if self.is_complete else self.runnable_layers

    def sizes(self) -> ModelSizes | None:
        """What a token costs here: the model's sizes, or those of what it will be.

        An incomplete model other than the released one has those of the layers that can be run;
        `None` where there are none.
        """
        if not self.is_complete and self.is_release:
            return RELEASE
        if self.facts is None or not self.runnable_layers:
            return None
        layers = self.facts["layers"][: self.layers]
        with_experts = [layer for layer in layers if layer["feed_forward"] == "experts"]
        moe = self.facts["config"]["moe"] or {"experts": 0, "experts_per_token": 0}
        experts = len(with_experts) * moe["experts"]
        expert_bytes = sum(layer["experts"]["bytes"] for layer in with_experts)
        whole = plan(self.directory, MemoryRequest(_UNBOUNDED_BYTES), layers=self.layers)["plan"]
        part = "" if self.is_complete else f"the first {self.layers} layers of "
        return ModelSizes(
            name=f"{part}{self.directory}",
            trunk_bytes=whole["pinned_bytes"],
            expert_bytes=expert_bytes // experts if experts else 0,
            expert_layers=len(with_experts),
            layer_experts=moe["experts"],
            experts_per_token=moe["experts_per_token"],
        )

    def residency(self, memory_bytes: int) -> Residency | None:
        """What would be kept in memory of `sizes`; `None` where it would not fit."""
        if not self.is_complete and self.is_release:
            return release_residency(memory_bytes)
        try:
            kept = plan(self.directory, MemoryRequest(memory_bytes), layers=self.layers)["plan"]
        except MemoryBudgetError:
            return None
        return Residency(kept["pinned_bytes"], kept["expert_slots"])


def read_model(directory: Path) -> ModelState:
    """The state of `directory`, whatever is or is not there."""
    facts: dict[str, Any] | None = None
    error: K3Error | None = None
    manifest: Manifest | None = None
    manifest_error: K3Error | OSError | None = None
    try:
        facts = inspect(directory)
    except K3Error as found:
        error = found
    if directory.is_dir():
        try:
            manifest = saved_manifest(directory)
        except (K3Error, OSError) as found:
            manifest_error = found
    return ModelState(directory, facts, error, manifest, manifest_error)


def release_directory(directory: Path) -> Path:
    """Where `k3rs download` would put the released model: `directory`, if it was begun there."""
    begun = (directory / MANIFEST_FILE).exists() or any(
        (directory / name).exists() or partial_path(directory, name).exists()
        for name in RELEASED_SHARD_BYTES
    )
    return directory if begun else directory / "Kimi-K3"


def missing_release_bytes(directory: Path) -> int:
    """The bytes of the released shards that are not in `directory` yet."""
    return _missing_bytes(directory, RELEASED_SHARD_BYTES.items())


def _missing_bytes(directory: Path, files: Iterable[tuple[str, int]]) -> int:
    """What is to come of `files`, by name and size, behind what a download has begun of them."""
    missing_bytes = 0
    for name, size_bytes in files:
        if _size(directory / name) != size_bytes:
            begun_bytes = _size(partial_path(directory, name)) or 0
            # One that has become too long is fetched again.
            missing_bytes += size_bytes - (begun_bytes if begun_bytes <= size_bytes else 0)
    return missing_bytes


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
