"""What a token costs with a given amount of memory, from sizes and measured bandwidths.

Everything here is computed, nothing measured. A token multiplies the whole trunk and, in every
layer that has experts, those that the router wakes. What is not in memory is read for it:
tiles of the trunk while others are multiplied, experts only when the router has spoken, so
that the cores wait for them. `docs/performance.md` has the measurements behind that.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from k3rs.device import Device

__all__ = [
    "RELEASE",
    "Estimate",
    "ModelSizes",
    "Residency",
    "estimate",
    "expected_hit_rate",
    "release_residency",
]

TRUNK_EFFICIENCY: Final = 0.9
EXPERT_EFFICIENCY: Final = 0.5
"""How much of the memory read bandwidth the kernels reach for one token: bfloat16 and MXFP4, by
the table of kernels in `docs/performance.md`."""

_HIT_RATES: Final = (
    (0, 0.0),
    (228, 0.090),
    (455, 0.168),
    (911, 0.284),
    (1472, 0.395),
    (1823, 0.426),
    (2944, 0.491),
)
"""Slots, and the share of requests that found their expert in one, on a recorded trace of the
released router, whose tokens make 1,472 requests (92 layers, 16 experts)."""


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model on which the cost of a token depends."""

    name: str
    trunk_bytes: int
    """What every token reads or has in memory: the tiles of all layers, and the output matrix."""
    expert_bytes: int
    expert_layers: int
    layer_experts: int
    experts_per_token: int

    @property
    def requests(self) -> int:
        """Experts that a token asks for, in all layers."""
        return self.expert_layers * self.experts_per_token


@dataclass(frozen=True)
class Residency:
    """What a memory plan keeps."""

    pinned_bytes: int
    expert_slots: int


@dataclass(frozen=True)
class Estimate:
    """A token with one budget; times are `None` where the device is unknown and needed."""

    budget: str
    memory_bytes: int
    pinned_bytes: int
    expert_slots: int
    hit_rate: float
    trunk_read_bytes: int
    expert_read_bytes: int
    disk_seconds: float | None
    memory_seconds: float
    seconds_per_token: float | None
    reason: str | None
    """`disk` or `memory`, whichever takes longer."""


RELEASE: Final = ModelSizes(
    name="the released model",
    # As `k3rs plan` pins it, tile by tile: 108.8 GB in layers and 2.3 GB of output matrix.
    trunk_bytes=111_334_408_192,
    # Three matrices of 3,584 x 3,072 values of four bits, and a byte of scale for 32 of them.
    expert_bytes=17_547_264,
    expert_layers=92,
    layer_experts=896,
    experts_per_token=16,
)

_RELEASE_SLOT_BYTES = 17_555_456
# What `k3rs plan` gives the released model besides pinned tiles at 4,096 positions and two
# threads: without a ring and slots, and with a ring and the slots of one layer.
_RELEASE_RESIDENT_BYTES = 1_066_803_038
_RELEASE_STREAMING_BYTES = 1_478_000_000
_RELEASE_SMALLEST_BYTES = 1_249_410_398


def release_residency(memory_bytes: int) -> Residency | None:
    """Nearly what a plan of the released model would keep; `None` where it would not fit."""
    if memory_bytes < _RELEASE_SMALLEST_BYTES:
        return None
    slots_bytes = memory_bytes - _RELEASE_RESIDENT_BYTES - RELEASE.trunk_bytes
    slots = max(RELEASE.experts_per_token, slots_bytes // _RELEASE_SLOT_BYTES)
    pinned_bytes = max(0, memory_bytes - _RELEASE_STREAMING_BYTES)
    all_experts = RELEASE.expert_layers * RELEASE.layer_experts
    return Residency(min(pinned_bytes, RELEASE.trunk_bytes), min(slots, all_experts))


def expected_hit_rate(sizes: ModelSizes, slots: int) -> float:
    """The share of requests that find their expert in one of `slots`: an assumption.

    That of the recorded trace, by slots over the requests of a token, with straight lines
    between; beyond the trace a straight line to 1, which is reached when all experts fit.
    """
    experts = sizes.expert_layers * sizes.layer_experts
    if slots >= experts:
        return 1.0
    traced_requests = RELEASE.requests
    curve = [(x * sizes.requests / traced_requests, rate) for x, rate in _HIT_RATES]
    curve = [point for point in curve if point[0] < experts] + [(experts, 1.0)]
    segments = list(pairwise(curve))
    (x0, rate0), (x1, rate1) = segments[bisect([x for x, _ in curve[1:]], slots)]
    return rate0 + (rate1 - rate0) * (slots - x0) / (x1 - x0)


def estimate(
    sizes: ModelSizes,
    budgets: Iterable[tuple[str, int, Residency]],
    *,
    memory_read_gb_s: float,
    device: Device | None,
) -> Iterator[Estimate]:
    """A token of the model for each budget, given by name, bytes and what is kept."""
    expert_bytes = sizes.requests * sizes.expert_bytes
    memory_seconds = (sizes.trunk_bytes / TRUNK_EFFICIENCY + expert_bytes / EXPERT_EFFICIENCY) / (
        memory_read_gb_s * 1e9
    )
    for name, memory_bytes, kept in budgets:
        hit_rate = expected_hit_rate(sizes, kept.expert_slots)
        trunk_read = max(0, sizes.trunk_bytes - kept.pinned_bytes)
        expert_read = round(expert_bytes * (1 - hit_rate))
        times = _times(trunk_read, expert_read, memory_seconds, device)
        yield Estimate(
            name,
            memory_bytes,
            kept.pinned_bytes,
            kept.expert_slots,
            hit_rate,
            trunk_read,
            expert_read,
            times[0],
            memory_seconds,
            *times[1:],
        )


def _times(
    trunk_read: int, expert_read: int, memory_seconds: float, device: Device | None
) -> tuple[float | None, float | None, str | None]:
    """Seconds of the disk, seconds of the token, and which of disk and memory takes longer."""
    if trunk_read + expert_read == 0:
        return 0.0, memory_seconds, "memory"
    if device is None:
        return None, None, None
    trunk_seconds = trunk_read / (device.tiles_gb_s * 1e9)
    expert_seconds = expert_read / (device.experts_gb_s * 1e9)
    disk_seconds = trunk_seconds + expert_seconds
    # The trunk is read while it is multiplied; for experts the cores wait.
    seconds = max(trunk_seconds, memory_seconds) + expert_seconds
    return disk_seconds, seconds, "disk" if disk_seconds > memory_seconds else "memory"
