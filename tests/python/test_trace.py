"""Expert requests: what `--trace` writes, what `trace replay` reads and refuses."""

import struct
from pathlib import Path

import numpy as np
import pytest
from harness import Prompt, RunK3rs, file_names, joined

import k3rs
from k3rs.exceptions import InputError, K3Error, TraceError
from k3rs.trace import read_trace, replay

ROUTED_LAYERS = [1, 2, 3, 4, 5, 6]
EXPERTS_PER_TOKEN = 3
RELEASED_TRACE = Path(__file__).parents[3] / "shared" / "data" / "k3_router_trace_12tok.u16"


def write_pairs(path: Path, *pairs: tuple[int, int]) -> Path:
    path.write_bytes(b"".join(struct.pack("<HH", *pair) for pair in pairs))
    return path


@pytest.mark.parametrize("options", [(), ("--prefill-chunk", 2)])
def test_generate_writes_the_routes_of_every_token(
    options: tuple[str | int, ...],
    run_k3rs: RunK3rs,
    model: k3rs.Model,
    model_path: Path,
    prompts: list[Prompt],
    tmp_path: Path,
) -> None:
    prompt = prompts[-1]
    ids = ("--ids", joined(prompt.ids), "-n", 4, "--ignore-stop", "--quiet")
    done = run_k3rs("generate", model_path, *ids, "--trace", "out.trace", *map(str, options))
    assert done.status == 0, done.stderr
    assert file_names(tmp_path) == ["out.trace"]

    # The last generated token is not fed to the model.
    fed = prompt.ids + prompt.greedy[:3]
    _, seen = model.session().forward(fed, capture=("router",))
    expected = [
        (token, layer, expert)
        for token in range(len(fed))
        for layer, (experts, _) in zip(ROUTED_LAYERS, seen["router"], strict=True)
        for expert in experts[token].tolist()
    ]
    assert read_trace(tmp_path / "out.trace").requests.tolist() == [list(row) for row in expected]
    first_lines = (tmp_path / "out.trace").read_text(encoding="ascii").splitlines()[:2]
    assert first_lines[0] == "k3rs-trace 1"
    assert first_lines[1].split(" ")[:2] == ["0", "1"]


def test_replay_agrees_with_the_engine(
    run_k3rs: RunK3rs, model_path: Path, prompts: list[Prompt]
) -> None:
    done = run_k3rs(
        "generate", model_path, "--ids", str(prompts[0].ids[0]), "-n", 12, "--ignore-stop",
        "--trunk-gb", "1", "--cache-gb", "0.0003", "--trace", "out.trace", "--json", "-",
    )  # fmt: skip
    assert done.status == 0, done.stderr
    slots = done.facts["plan"]["expert_slots"]
    experts = done.facts["experts"]
    assert EXPERTS_PER_TOKEN <= slots < len(ROUTED_LAYERS) * 8
    replayed = run_k3rs("trace", "replay", "out.trace", "--slots", slots, "--json")
    ours = {result["policy"]: result["hit_rate"] for result in replayed.facts["results"]}
    assert replayed.facts["requests"] == experts["requests"]
    assert ours["default"] == experts["hits"] / experts["requests"]


def test_without_incremental_every_prefix_is_traced(
    run_k3rs: RunK3rs, model_path: Path, tmp_path: Path
) -> None:
    ids = ("--ids", "3,4", "-n", 2, "--ignore-stop", "--no-incremental")
    assert run_k3rs("generate", model_path, *ids, "--trace", "out.trace").status == 0
    requests = read_trace(tmp_path / "out.trace").requests
    prefix = 2 * len(ROUTED_LAYERS) * EXPERTS_PER_TOKEN
    assert requests[-1, 0] + 1 == 2 + 3
    assert np.array_equal(requests[:prefix, 1:], requests[prefix : 2 * prefix, 1:])


def test_a_trace_that_cannot_be_written_is_an_error_at_once(
    run_k3rs: RunK3rs, model_path: Path
) -> None:
    done = run_k3rs("generate", model_path, "--ids", "3", "--trace", "missing/out.trace")
    assert (done.status, done.stdout) == (1, "")
    assert "missing" in done.stderr


def test_hit_rates_by_hand(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    # Expert 0 in every token, and one that changes; with two slots the optimum keeps 0.
    pairs = [(layer, e) for token in range(4) for layer, e in ((1, 0), (2, token))]
    write_pairs(tmp_path / "t.u16", *pairs)
    done = run_k3rs("trace", "replay", "t.u16", "--slots", "1,2,8", "--skip", 1, "--json")
    assert done.status == 0, done.stderr
    assert done.facts == {
        "tokens": 4,
        "requests": 8,
        "counted_tokens": 3,
        "counted_requests": 6,
        "results": [
            {"slots": slots, "policy": policy, "hit_rate": rate}
            for slots, rates in ((1, (0, 0, 0)), (2, (0.5, 0.5, 0.5)), (8, (0.5, 0.5, 0.5)))
            for policy, rate in zip(("lru", "belady", "default"), rates, strict=True)
        ],
    }


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "t.u16", (1, 9), (1, 4), (3, 9), (1, 9), (1, 5), (3, 0))
    text = tmp_path / "t.trace"
    text.write_bytes(b"k3rs-trace 1\n0 1 9 4\n0 3 9\n1 1 9 5\n1 3 0\n")
    assert read_trace(pairs).requests.tolist() == read_trace(text).requests.tolist()
    assert read_trace(text).tokens == 2
    assert replay(read_trace(text)) == replay(read_trace(pairs))


def test_the_table_has_policies_side_by_side(run_k3rs: RunK3rs, tmp_path: Path) -> None:
    write_pairs(tmp_path / "t.u16", *[(layer, 0) for _ in range(3) for layer in (1, 2)])
    done = run_k3rs("trace", "replay", "t.u16", "--slots", "2,1000", "--skip", 1)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "3 tokens, 6 requests for experts",
        "hit rates of tokens 2 to 3",
        "    slots      lru   belady  default",
        "        2   100.0%   100.0%   100.0%",
        "    1,000   100.0%   100.0%   100.0%",
    ]


def test_default_sizes_follow_the_experts_of_a_token(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "t.u16", *[(layer, e) for layer in (1, 2) for e in range(8)])
    sizes = [result["slots"] for result in replay(read_trace(path))["results"]]
    assert sizes[::3] == [2, 4, 8, 16, 32, 64]


def test_released_routing_has_the_known_hit_rates(run_k3rs: RunK3rs) -> None:
    if not RELEASED_TRACE.exists():
        pytest.skip(f"there is no {RELEASED_TRACE}")
    sizes = "228,455,911,1472,1823,2944"
    done = run_k3rs("trace", "replay", RELEASED_TRACE, "--slots", sizes, "--skip", 4, "--json")
    rates: dict[str, list[float]] = {"lru": [], "belady": [], "default": []}
    for result in done.facts["results"]:
        rates[result["policy"]].append(round(100 * result["hit_rate"], 1))
    assert (done.facts["tokens"], done.facts["requests"]) == (12, 12 * 92 * 16)
    assert rates["lru"] == [0.0, 0.0, 0.0, 26.8, 39.5, 47.7]
    assert rates["belady"] == [15.4, 29.5, 45.2, 52.1, 55.1, 56.5]
    shares = [8.9, 16.3, 28.0, 39.5, 42.6, 49.0]
    assert all(ours >= least for ours, least in zip(rates["default"], shares, strict=True))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "expected the first line `k3rs-trace 1`, found ''"),
        (b"k3rs-trace 1", "expected the first line"),
        (b"k3rs-trace 2\n", "found 'k3rs-trace 2'"),
        (b"k3rs-trace 1\n", "expected requests for experts, found none"),
        (b"k3rs-trace 1\n0 1 2 3\n0 2 4", "line 3: expected a line end"),
        (b"k3rs-trace 1\n0 1\n", "line 2: expected token, layer and experts"),
        (b"k3rs-trace 1\r\n0 1 2\r\n", "found 'k3rs-trace 1\\r'"),
        (b"k3rs-trace 1\n0 1 2\n0 2 -1\n", "line 3: expected token"),
        (b"k3rs-trace 1\n0 1 " + b"9" * 5000 + b"\n", "line 2: expected token"),
        (b"k3rs-trace 1\n0 1 \xd9\xa3\n", "line 2: expected token"),
        (b"k3rs-trace 1\n\n", "line 2: expected token"),
        (b"k3rs-trace 1\n1 1 2\n", "expected token 0 first, found 1"),
        (b"k3rs-trace 1\n0 1 2\n2 1 2\n", "expected token 0 or the next, found 2"),
        (b"k3rs-trace 1\n0 2 2\n0 1 2\n", "token 0, layer 1: expected a layer above 2"),
        (b"k3rs-trace 1\n0 1 2 2\n", "token 0, layer 1: expected every expert once, found 2"),
    ],
)
def test_broken_text_is_refused(data: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "broken.trace").write_bytes(data)
    with pytest.raises(TraceError) as caught:
        replay(read_trace(tmp_path / "broken.trace"))
    assert problem in str(caught.value)
    assert str(tmp_path / "broken.trace") in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "expected requests for experts, found none"),
        (b"\x01\x00\x00", "a multiple of 4 bytes, found 3 bytes"),
        (b"\x01\x00\x00\x00\x02\x00", "a multiple of 4 bytes, found 6 bytes"),
        (b"\x01\x00\x05\x00" * 2, "token 0, layer 1: expected every expert once, found 5 twice"),
    ],
)
def test_broken_pairs_are_refused(
    data: bytes, problem: str, run_k3rs: RunK3rs, tmp_path: Path
) -> None:
    (tmp_path / "broken.u16").write_bytes(data)
    done = run_k3rs("trace", "replay", "broken.u16")
    assert (done.status, done.stdout) == (1, "")
    assert done.stderr.startswith("error: broken.u16: ")
    assert problem in done.stderr
    assert "\nhint: " in done.stderr


def test_numbers_of_any_size_cost_no_memory(tmp_path: Path) -> None:
    pairs = [(layer, 65535) for layer in range(0, 65536, 64)]
    path = write_pairs(tmp_path / "wide.u16", *pairs)
    text = tmp_path / "wide.trace"
    text.write_bytes(b"k3rs-trace 1\n0 999999999 999999999\n1 0 999999999\n")
    for trace in (read_trace(path), read_trace(text)):
        results = replay(trace, [1, 10**12])["results"]
        assert {result["hit_rate"] for result in results} == {0.0}


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (("missing.u16",), 1, "missing.u16"),
        ((".",), 1, "cannot use `.`"),
        (("t.u16", "--slots", "0"), 2, "at least 1, found `0`"),
        (("t.u16", "--slots", "4,,5"), 2, "at least 1, found ``"),
        (("t.u16", "--slots", "9" * 30), 2, "at most"),
        (("t.u16", "--skip", "1"), 2, "fewer than the 1 tokens of the trace, found 1"),
        (("t.u16", "--skip", "-1"), 2, "at least 0, found `-1`"),
        ((), 2, "TRACE"),
    ],
)
def test_wrong_usage(
    arguments: tuple[str, ...], status: int, problem: str, run_k3rs: RunK3rs, tmp_path: Path
) -> None:
    write_pairs(tmp_path / "t.u16", (1, 0))
    done = run_k3rs("trace", "replay", *arguments)
    assert (done.status, done.stdout) == (status, "")
    assert done.stderr.startswith("error: ")
    assert problem in done.stderr


def test_sizes_without_a_slot_are_refused(tmp_path: Path) -> None:
    trace = read_trace(write_pairs(tmp_path / "t.u16", (1, 0)))
    for slots in ([], [0], [4, -1]):
        with pytest.raises(InputError, match="at least 1 slot"):
            replay(trace, slots)


def test_a_trace_error_is_a_value_error() -> None:
    assert issubclass(TraceError, K3Error)
    assert issubclass(TraceError, ValueError)
