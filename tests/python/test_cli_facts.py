"""The commands that print facts: as a table for a person, as JSON for a program."""

from pathlib import Path

from harness import PLAN_KEYS, RunK3rs

import k3rs


def test_plan_divides_the_budget(run_k3rs: RunK3rs, model_path: Path) -> None:
    facts = run_k3rs("plan", model_path, "--memory", "1GB", "--json").facts
    assert facts["plan"].keys() >= PLAN_KEYS
    assert facts["plan"]["budget_bytes"] == 10**9
    assert sum(entry["bytes"] for entry in facts["plan"]["entries"]) <= 10**9
    table = run_k3rs("plan", model_path, "--memory", "1GB").stdout
    for entry in facts["plan"]["entries"]:
        assert entry["name"] in table


def test_presets(run_k3rs: RunK3rs) -> None:
    facts = run_k3rs("presets", "--json").facts
    assert [preset["name"] for preset in facts["presets"]] == [
        preset.name for preset in k3rs.PRESETS
    ]
    assert run_k3rs("presets").stdout.splitlines()[0].split()[:3] == ["pocket", "2.00", "GB"]


def test_bench_measures_every_kernel_beside_the_limits(run_k3rs: RunK3rs) -> None:
    facts = run_k3rs("bench", "--quick", "--json", "--threads", "1").facts
    assert facts["limits"]["threads"] == 1
    assert facts["limits"]["read_gb_s"] > 0
    assert facts["limits"]["fma_gflop_s"] > 0
    names = {kernel["name"] for kernel in facts["kernels"]}
    expected = {"bf16 7168x12288", "mxfp4 3584x3072", "f32 7168x12288", "bf16 7168x163840"}
    assert names >= expected
    for kernel in facts["kernels"]:
        # The limits are measured again beside each kernel, on a machine that others use.
        for speed, share, limit in [
            ("weights_gb_s", "of_read", "read_gb_s"),
            ("gflop_s", "of_fma", "fma_gflop_s"),
        ]:
            beside = kernel[speed] / kernel[share]
            assert 0.05 < beside / facts["limits"][limit] < 20, (kernel, facts["limits"])
    table = run_k3rs("bench", "--quick", "--threads", "1").stdout
    assert all(name in table for name in names)
