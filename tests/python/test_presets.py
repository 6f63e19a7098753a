import pytest

from k3rs.exceptions import InputError
from k3rs.presets import PRESETS, MemoryRequest, find_preset, request_memory


def test_the_presets_are_the_documented_ones() -> None:
    assert {preset.name: preset.memory_bytes // 10**9 for preset in PRESETS} == {
        "pocket": 2,
        "laptop": 8,
        "desktop": 32,
        "workstation": 96,
        "server": 128,
        "max": 224,
    }


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="found `palmtop`") as refused:
        find_preset("palmtop")
    assert "pocket, laptop" in str(refused.value.hint)


def test_a_request_takes_one_budget() -> None:
    assert request_memory() == MemoryRequest()
    assert request_memory("8GB") == MemoryRequest(memory_bytes=8 * 10**9)
    assert request_memory(preset="pocket") == MemoryRequest(memory_bytes=2 * 10**9)
    assert request_memory(trunk_bytes=5) == MemoryRequest(trunk_bytes=5)
    assert request_memory(trunk_bytes=0, cache_bytes=6) == MemoryRequest(None, 0, 6)


def test_two_budgets_are_refused() -> None:
    with pytest.raises(InputError, match="found several"):
        request_memory("8GB", preset="laptop")
    with pytest.raises(InputError, match="found several"):
        request_memory("8GB", cache_bytes=0)
    with pytest.raises(InputError, match="found several"):
        request_memory(preset="laptop", trunk_bytes=1)
