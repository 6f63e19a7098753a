"""What a token is said to cost: by hand, and beside the plans of the released sizes."""

import dataclasses
from pathlib import Path

import pytest

import k3rs
from k3rs.device import Device
from k3rs.doctor.estimate import (
    RELEASE,
    ModelSizes,
    Residency,
    estimate,
    expected_hit_rate,
    release_residency,
)
from k3rs.doctor.model_state import read_model

GB = 10**9
DEVICE = Device("there", 2.0, 1.0, True, "direct reads", False, GB)
SIZES = ModelSizes("a model", 100 * GB, 10**7, 10, 100, 4)


@pytest.mark.parametrize(
    ("slots", "rate"),
    [
        (0, 0.0),
        (114, 0.045),
        (228, 0.09),
        (455, 0.168),
        (911, 0.284),
        (1200, 0.284 + 0.111 * 289 / 561),
        (1472, 0.395),
        (1823, 0.426),
        (2944, 0.491),
        (2944 + (82_432 - 2944) // 2, 0.7455),
        (82_432, 1.0),
        (10**6, 1.0),
    ],
)
def test_the_hit_rate_follows_the_recorded_trace(slots: int, rate: float) -> None:
    assert expected_hit_rate(RELEASE, slots) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize(
    ("slots", "rate"), [(20, 0.1 + 0.14), (40, 0.395), (80, 0.491), (540, 0.7455), (1000, 1.0)]
)
def test_of_another_model_the_slots_count_by_the_requests_of_a_token(
    slots: int, rate: float
) -> None:
    # A token asks for 40 experts, where one of the release asks for 1,472.
    if slots == 20:
        rate = 0.168 + (0.284 - 0.168) * (736 - 455) / (911 - 455)
    assert expected_hit_rate(SIZES, slots) == pytest.approx(rate, abs=1e-12)


def test_a_model_without_experts_misses_none() -> None:
    assert expected_hit_rate(dataclasses.replace(SIZES, expert_layers=0), 0) == 1.0


def test_a_token_takes_what_disk_and_memory_take() -> None:
    budgets = [
        ("small", 60 * GB, Residency(60 * GB, 40)),
        ("large", 110 * GB, Residency(100 * GB, 40)),
        ("all", 120 * GB, Residency(100 * GB, 1000)),
    ]
    small, large, whole = estimate(SIZES, budgets, memory_read_gb_s=10.0, device=DEVICE)
    # 100 GB at 9 GB/s and 0.4 GB at 5 GB/s.
    memory_seconds = 100 / 9 + 0.4 / 5
    for entry in (small, large, whole):
        assert entry.memory_seconds == pytest.approx(memory_seconds)
    # 40 GB of trunk at 2 GB/s, and 60.5 % of 0.4 GB of experts at 1 GB/s.
    assert (small.trunk_read_bytes, small.expert_read_bytes) == (40 * GB, 242_000_000)
    assert small.disk_seconds == pytest.approx(20.242)
    assert small.seconds_per_token == pytest.approx(20.242)
    assert small.reason == "disk"
    # The cores wait for experts, but not for the trunk.
    assert large.trunk_read_bytes == 0
    assert large.disk_seconds == pytest.approx(0.242)
    assert large.seconds_per_token == pytest.approx(memory_seconds + 0.242)
    assert large.reason == "memory"
    assert (whole.expert_read_bytes, whole.disk_seconds) == (0, 0.0)
    assert whole.seconds_per_token == pytest.approx(memory_seconds)
    assert whole.reason == "memory"


def test_without_a_device_only_what_needs_none_is_known() -> None:
    budgets = [("part", GB, Residency(0, 40)), ("all", GB, Residency(100 * GB, 1000))]
    part, whole = estimate(SIZES, budgets, memory_read_gb_s=10.0, device=None)
    assert (part.disk_seconds, part.seconds_per_token, part.reason) == (None, None, None)
    assert whole.seconds_per_token == pytest.approx(100 / 9 + 0.4 / 5)


def test_the_sizes_of_the_release_are_those_of_its_plans(tmp_path: Path) -> None:
    released = tmp_path / "released"
    k3rs.synthesize(released, sparse=True)
    state = read_model(released)
    sizes = state.sizes()
    assert sizes is not None
    assert dataclasses.replace(sizes, name=RELEASE.name) == RELEASE
    assert release_residency(10**9) is state.residency(10**9) is None
    for memory_bytes in (2 * GB, 96 * GB, 128 * GB):
        planned, computed = state.residency(memory_bytes), release_residency(memory_bytes)
        assert planned is not None
        assert computed is not None
        assert computed.pinned_bytes == pytest.approx(planned.pinned_bytes, abs=0.1 * GB)
        assert computed.expert_slots == pytest.approx(planned.expert_slots, abs=5)
