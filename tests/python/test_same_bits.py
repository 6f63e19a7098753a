"""One promise above all: the bits of the output depend on the model and the text alone.

Not on threads, instruction set, memory budget, the way of reading, the split of the prompt,
or what other sessions do meanwhile.
"""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from harness import Prompt, RunK3rs, joined, smallest_budget
from numpy.typing import NDArray

import k3rs
from k3rs import _k3rs

Bits: TypeAlias = NDArray[np.uint32]

POSITIONS = 64
CONTINUED = 8


@pytest.fixture(scope="module")
def text(prompts: list[Prompt]) -> list[int]:
    """The longest prompt and the begin of its continuation."""
    return prompts[-1].ids + prompts[-1].greedy[:CONTINUED]


@pytest.fixture(scope="module")
def truth(model_path: Path, text: list[int]) -> Bits:
    """The logits of `text` computed in the plainest way: scalar, one thread, one by one."""
    with k3rs.Model.open(model_path, memory="1GB", threads=1, backend="scalar") as model:
        return read_in_pieces(model.session(), text, 1)


def bits(logits: NDArray[np.float32]) -> Bits:
    """The float32 bits: -0 differs from 0."""
    assert logits.dtype == np.float32
    return logits.view(np.uint32)


def read_in_pieces(session: k3rs.Session, ids: Sequence[int], size: int) -> Bits:
    """Feeds `ids` in calls of `size`: the bits after every id, [len(ids), vocabulary]."""
    pieces = [
        session.forward(ids[first : first + size], all_positions=True)
        for first in range(0, len(ids), size)
    ]
    return bits(np.concatenate(pieces))


def read_and_continue(model: k3rs.Model, ids: list[int]) -> Bits:
    """The prompt at once, then its continuation one by one, as generation does."""
    session = model.session()
    prompt = bits(session.forward(ids[:-CONTINUED], all_positions=True))
    return np.concatenate([prompt, read_in_pieces(session, ids[-CONTINUED:], 1)])


def same(first: Bits, second: Bits) -> bool:
    return first.shape == second.shape and bool((first == second).all())


@pytest.mark.parametrize("backend", k3rs.available_backends())
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_and_instruction_sets(
    model_path: Path, text: list[int], truth: Bits, backend: str, threads: int
) -> None:
    options: dict[str, Any] = {"threads": threads, "backend": backend}
    with k3rs.Model.open(model_path, memory="1GB", **options) as model:
        assert model.facts["options"].items() >= options.items()
        assert same(read_and_continue(model, text), truth)


@pytest.mark.parametrize("size", [1, 2, 5, 32, 1000])
def test_the_split_into_calls(model: k3rs.Model, text: list[int], truth: Bits, size: int) -> None:
    session = model.session()
    assert same(read_in_pieces(session, text, size), truth)
    assert session.position == len(text)


@pytest.mark.parametrize("chunk", [1, 2, 5, 32])
def test_the_split_into_sweeps(model_path: Path, text: list[int], truth: Bits, chunk: int) -> None:
    with k3rs.Model.open(model_path, memory="1GB", threads=2, prefill_chunk=chunk) as model:
        assert model.facts["options"]["prefill_chunk"] == chunk
        assert same(read_and_continue(model, text), truth)
        # Only the last sweep computes logits, of its last token alone.
        assert same(bits(model.session().forward(text)), truth[-1])


def test_recomputing_every_step(model: k3rs.Model, prompts: list[Prompt], truth: Bits) -> None:
    prompt = prompts[-1]
    rows: list[NDArray[np.float32]] = []
    tokens = model.generate(
        prompt.ids, max_tokens=CONTINUED + 1, stop_ids=(), incremental=False, on_logits=rows.append
    )
    assert [token.id for token in tokens] == prompt.greedy[: CONTINUED + 1]
    assert same(bits(np.stack(rows)), truth[-CONTINUED - 1 :])


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--no-incremental"],
        ["--prefill-chunk", "5", "--threads", "3"],
        ["--backend", "scalar"],
        ["--preset", "pocket"],
    ],
    ids=" ".join,
)
def test_the_command_line(
    run_k3rs: RunK3rs,
    model_path: Path,
    tmp_path: Path,
    prompts: list[Prompt],
    truth: Bits,
    options: list[str],
) -> None:
    ids = joined(prompts[-1].ids)
    done = run_k3rs(
        "generate", model_path, "--ids", ids, "-n", CONTINUED + 1, "--ignore-stop",
        "--logits", "logits.npy", "--quiet", *options,
    )  # fmt: skip
    assert (done.status, done.stderr) == (0, "")
    assert same(bits(np.load(tmp_path / "logits.npy")), truth[-CONTINUED - 1 :])


# Added to the smallest budget. The whole model has 1.8 MB, so these go from three slots for
# experts and no resident trunk to everything resident.
BUDGET_STEPS = [0, 100_000, 500_000, 1_000_000, 2_000_000, 10_000_000]


def test_memory_budgets(model_path: Path, text: list[int], truth: Bits) -> None:
    path = str(model_path)
    minimum = smallest_budget(model_path, POSITIONS)
    pinned, slots = [], []
    for step in BUDGET_STEPS:
        with k3rs.Model.open(path, memory=minimum + step, positions=POSITIONS) as model:
            assert same(read_and_continue(model, text), truth), step
            # Again: now some of it is resident, and other experts than at first.
            assert same(read_and_continue(model, text), truth), step
            pinned.append(model.plan["pinned_fraction"])
            slots.append(model.plan["expert_slots"])
    assert (pinned[0], pinned[-1]) == (0, 1)
    assert (slots[0], slots[-1]) == (3, 6 * 8)
    assert len(set(zip(pinned, slots, strict=True))) == len(BUDGET_STEPS)


@pytest.mark.parametrize(("trunk_bytes", "cache_bytes"), [(0, 0), (0, 10**8), (10**8, 0)])
def test_shares_of_memory(
    model_path: Path, text: list[int], truth: Bits, trunk_bytes: int, cache_bytes: int
) -> None:
    with k3rs.Model.open(
        model_path, trunk_bytes=trunk_bytes, cache_bytes=cache_bytes, threads=2
    ) as model:
        assert model.plan["pinned_fraction"] == (trunk_bytes > 0)
        assert same(read_and_continue(model, text), truth)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("step", [0, 10_000_000])
def test_direct_and_buffered_reads(
    model_path: Path, text: list[int], truth: Bits, direct: bool | None, step: int
) -> None:
    engine = _k3rs.Engine.open(
        str(model_path),
        memory_bytes=smallest_budget(model_path, POSITIONS) + step,
        positions=POSITIONS,
        direct=direct,
    )
    for _ in range(2):
        logits, _ = engine.session().forward(text, all_positions=True)
        assert same(bits(logits), truth)
    if direct is False:
        assert '"direct":false' in engine.report()


@pytest.fixture(params=["smallest", "ample"])
def shared_model(request: pytest.FixtureRequest, model_path: Path) -> k3rs.Model:
    """A model that several sessions use; with the smallest budget they evict each other."""
    minimum = smallest_budget(model_path, POSITIONS)
    memory = minimum if request.param == "smallest" else minimum + 10_000_000
    return k3rs.Model.open(model_path, memory=memory, positions=POSITIONS)


def test_sessions_that_take_turns(
    shared_model: k3rs.Model, prompts: list[Prompt], text: list[int], truth: Bits
) -> None:
    other = prompts[1].ids
    alone = read_in_pieces(shared_model.session(), other, len(other))
    sessions = shared_model.session(), shared_model.session()
    rows: tuple[list[NDArray[np.float32]], ...] = ([], [])
    for turn in itertools.zip_longest(text, other):
        for session, row, token in zip(sessions, rows, turn, strict=True):
            if token is not None:
                row.append(session.forward([token]))
    assert same(bits(np.stack(rows[0])), truth)
    assert same(bits(np.stack(rows[1])), alone)


def test_sessions_of_several_threads(
    shared_model: k3rs.Model, text: list[int], truth: Bits
) -> None:
    def reader(size: int) -> Callable[[], Bits]:
        return lambda: read_in_pieces(shared_model.session(), text, size)

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(reader(size)) for size in (1, 3, 7, len(text))]
    assert all(same(result.result(), truth) for result in results)
