"""The Python interface on the fixture checkpoint, against the reference's values."""

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Prompt

import k3rs
from k3rs.exceptions import (
    CheckpointError,
    ConfigError,
    InputError,
    MemoryBudgetError,
    SessionError,
)


@pytest.fixture(scope="module")
def long_ids(prompts: list[Prompt]) -> list[int]:
    """Enough text to be interrupted in: about a second of work."""
    return (prompts[-1].ids * 100)[:2000]


def test_greedy_tokens_are_those_of_the_reference(model: k3rs.Model, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        tokens = model.generate(prompt.ids, max_tokens=len(prompt.greedy), stop_ids=())
        assert [token.id for token in tokens] == prompt.greedy


def test_the_largest_logit_is_that_of_the_reference_at_every_position(
    model: k3rs.Model, prompts: list[Prompt]
) -> None:
    for prompt in prompts:
        logits = model.session().forward(prompt.ids, all_positions=True)
        assert logits.dtype == np.float32
        assert logits.shape == (len(prompt.ids), model.config["vocab_size"])
        assert logits.argmax(axis=1).tolist() == prompt.argmax


def test_recomputing_every_step_gives_the_same_bits(
    model: k3rs.Model, prompts: list[Prompt]
) -> None:
    rows: dict[bool, list[Any]] = {True: [], False: []}
    for incremental, seen in rows.items():
        tokens = model.generate(
            prompts[-1].ids, max_tokens=4, incremental=incremental, on_logits=seen.append
        )
        assert [token.id for token in tokens] == prompts[-1].greedy[:4]
    assert np.array_equal(np.stack(rows[True]), np.stack(rows[False]))


@pytest.mark.parametrize("chunk", [1, 2, 5, 32])
def test_the_split_of_a_prompt_does_not_change_a_bit(
    model: k3rs.Model, prompts: list[Prompt], chunk: int
) -> None:
    ids = prompts[-1].ids
    whole = model.session().forward(ids, all_positions=True)
    session = model.session()
    parts = [
        session.forward(ids[start : start + chunk], all_positions=True)
        for start in range(0, len(ids), chunk)
    ]
    assert session.position == len(ids)
    assert np.array_equal(np.concatenate(parts), whole)
    assert np.array_equal(model.session().forward(ids), whole[-1])


@pytest.mark.parametrize(
    "options",
    [{"threads": 2}, {"threads": 3}, {"backend": "scalar"}, {"prefill_chunk": 3}],
    ids=str,
)
def test_the_way_of_computing_does_not_change_a_bit(
    model: k3rs.Model, model_path: Path, prompts: list[Prompt], options: dict[str, Any]
) -> None:
    ids = prompts[-1].ids
    with k3rs.Model.open(model_path, memory="1GB", **options) as other:
        found = other.session().forward(ids, all_positions=True)
    assert np.array_equal(found, model.session().forward(ids, all_positions=True))


@pytest.mark.parametrize(
    "options",
    [
        {"trunk_bytes": 0},
        {"trunk_bytes": 0, "cache_bytes": 0},
        {"trunk_bytes": 500_000, "cache_bytes": 100_000},
        {"memory": "smallest"},
    ],
    ids=str,
)
def test_what_stays_in_memory_does_not_change_a_bit(
    model: k3rs.Model, model_path: Path, prompts: list[Prompt], options: dict[str, Any]
) -> None:
    prompt = prompts[-1]
    positions = len(prompt.ids) + 6
    if "memory" in options:
        facts = k3rs.plan(model_path, k3rs.MemoryRequest(10**9), positions=positions)
        options = {"memory": facts["minimum_bytes"]}
    rows: list[list[Any]] = [[], []]
    with k3rs.Model.open(model_path, positions=positions, **options) as other:
        for opened, seen in zip((model, other), rows, strict=True):
            tokens = opened.generate(prompt.ids, max_tokens=6, stop_ids=(), on_logits=seen.append)
            assert [token.id for token in tokens] == prompt.greedy[:6]
    assert np.array_equal(np.stack(rows[0]), np.stack(rows[1]))


def test_sessions_of_one_model_are_independent(model: k3rs.Model, prompts: list[Prompt]) -> None:
    first, second = prompts[-1].ids, prompts[-2].ids
    alone = [model.session().forward(ids) for ids in (first, second)]
    sessions = [model.session(), model.session()]
    together = [np.empty(0, dtype=np.float32)] * 2
    for ids in itertools.zip_longest(first, second):
        for place, token_id in enumerate(ids):
            if token_id is not None:
                together[place] = sessions[place].forward([token_id])
    assert np.array_equal(together[0], alone[0])
    assert np.array_equal(together[1], alone[1])


def test_a_given_session_is_continued(model: k3rs.Model, prompts: list[Prompt]) -> None:
    prompt = prompts[-1]
    session = model.session()
    first = list(model.generate(prompt.ids, max_tokens=3, session=session, stop_ids=()))
    assert session.ids == prompt.ids + prompt.greedy[:3]
    assert session.position == len(session.ids)
    assert session.pending == prompt.greedy[2:3]
    rest = list(model.generate(max_tokens=3, session=session, stop_ids=()))
    assert [token.id for token in first + rest] == prompt.greedy[:6]


def test_a_text_goes_on_behind_what_was_generated(model: k3rs.Model, prompts: list[Prompt]) -> None:
    prompt = prompts[-1]
    session = model.session()
    list(model.generate(prompt.ids, max_tokens=2, session=session, stop_ids=()))
    (token,) = model.generate([7, 8], max_tokens=1, session=session, stop_ids=())
    whole = [*prompt.ids, *prompt.greedy[:2], 7, 8]
    assert token.id == int(np.argmax(model.session().forward(whole)))
    assert session.ids == [*whole, token.id]


def test_an_empty_text_needs_a_prompt(model: k3rs.Model) -> None:
    session = model.session()
    with pytest.raises(InputError, match="found an empty list"):
        model.generate([], session=session)
    with pytest.raises(InputError, match="found empty text"):
        model.generate("", session=session)


def test_the_last_logits_are_given_again(model: k3rs.Model) -> None:
    session = model.session()
    with pytest.raises(InputError, match="expected at least one token id"):
        session.forward([])
    logits = session.forward([1, 2])
    again = session.forward([])
    assert np.array_equal(again, logits)
    again[:] = 0
    assert np.array_equal(session.forward([]), logits)
    every = session.forward([3, 4], all_positions=True)
    assert np.array_equal(session.forward([]), every[-1])
    assert session.position == 4
    session.reset()
    with pytest.raises(InputError, match="expected at least one token id"):
        session.forward([])


def test_appended_ids_are_fed_before_those_of_a_call(model: k3rs.Model) -> None:
    whole, seen_whole = model.session().forward(
        [3, 1, 4, 1], all_positions=True, capture=("hidden", "router")
    )
    session = model.session()
    session.append([3, 1])
    assert (session.position, session.pending) == (2, [3, 1])
    logits, seen = session.forward([4, 1], all_positions=True, capture=("hidden", "router"))
    assert (session.position, session.pending) == (4, [])
    assert np.array_equal(logits, whole[2:])
    assert np.array_equal(seen["hidden"], seen_whole["hidden"][:, 2:])
    for (ids, weights), (ids_whole, weights_whole) in zip(
        seen["router"], seen_whole["router"], strict=True
    ):
        assert np.array_equal(ids, ids_whole[2:])
        assert np.array_equal(weights, weights_whole[2:])


def test_appended_ids_alone_are_what_a_call_computes(model: k3rs.Model) -> None:
    session = model.session()
    session.append([3, 1])
    logits, seen = session.forward([], all_positions=True, capture=("hidden",))
    assert np.array_equal(logits, model.session().forward([3, 1], all_positions=True))
    assert seen["hidden"].shape[1] == 2
    with pytest.raises(InputError, match="expected at least one token id"):
        session.forward([], all_positions=True)


def test_appended_ids_can_be_taken_back(model: k3rs.Model) -> None:
    session = model.session()
    session.forward([3])
    session.append([1])
    session.discard_pending()
    assert session.ids == [3]
    assert np.array_equal(session.forward([4]), model.session().forward([3, 4]))


def test_unusable_ids_are_not_appended(model: k3rs.Model) -> None:
    session = model.session()
    with pytest.raises(InputError, match=r"ids\[1\]: expected an id of the vocabulary"):
        session.append([1, 10**6])
    assert session.ids == []


def test_reset_forgets_the_text(model: k3rs.Model, prompts: list[Prompt]) -> None:
    session = model.session()
    session.forward(prompts[-1].ids)
    session.reset()
    assert session.position == 0
    found = session.forward(prompts[-2].ids)
    assert np.array_equal(found, model.session().forward(prompts[-2].ids))


def test_capture_has_the_documented_shapes(
    model: k3rs.Model, model_path: Path, prompts: list[Prompt]
) -> None:
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))["text_config"]
    ids = prompts[-1].ids
    plain = model.session().forward(ids)
    logits, seen = model.session().forward(ids, capture=("hidden", "router"))
    assert np.array_equal(logits, plain)
    facts = model.facts["model"]
    assert seen["hidden"].dtype == np.float32
    assert seen["hidden"].shape == (facts["layers"], len(ids), facts["hidden"])
    assert len(seen["router"]) == facts["layers"] - 1  # layer 0 is dense
    for experts, weights in seen["router"]:
        assert experts.shape == weights.shape
        assert len(experts) == len(ids)
        assert all(len(set(row)) == len(row) for row in experts.tolist())
        # Renormalised, then scaled.
        scale = np.full(len(ids), config["routed_scaling_factor"])
        assert weights.sum(axis=1) == pytest.approx(scale, abs=1e-5)
    _, only = model.session().forward(ids, capture=("router",))
    assert list(only) == ["router"]


def test_a_prompt_of_text_is_encoded_by_the_model(model: k3rs.Model) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("the quick fox")
    from_ids = [token.id for token in model.generate(ids, max_tokens=4)]
    tokens = list(model.generate("the quick fox", max_tokens=4))
    assert [token.id for token in tokens] == from_ids
    assert "".join(token.text for token in tokens) == model.tokenizer.decode(from_ids)


def test_both_end_tokens_stop(model: k3rs.Model) -> None:
    assert model.tokenizer is not None
    end_of_text = model.tokenizer.special_ids["[EOS]"]
    assert model.stop_ids == {end_of_text, *model.config["eos_token_ids"]}


def test_generation_stops_at_a_stop_id(model: k3rs.Model, prompts: list[Prompt]) -> None:
    prompt = prompts[-1]
    tokens = list(model.generate(prompt.ids, stop_ids={prompt.greedy[2]}))
    last = prompt.greedy.index(prompt.greedy[2])
    assert [token.id for token in tokens] == prompt.greedy[: last + 1]
    assert tokens[-1].stop_reason == "stop"


@pytest.mark.parametrize("ids", [[], [-1], [0, 320], [2**70], [1.5], ["a"], np.array([-3])])
def test_unusable_ids_are_refused_and_change_nothing(model: k3rs.Model, ids: Any) -> None:
    session = model.session()
    with pytest.raises(InputError, match=r"^expected at least one|^ids\[\d\]: expected"):
        session.forward(ids)
    with pytest.raises(InputError):
        model.generate(ids)
    assert session.position == 0


def test_arguments_are_checked_at_the_call(model: k3rs.Model) -> None:
    refused: list[dict[str, Any]] = [
        {"max_tokens": 0},
        {"stop": ("",)},
        {"session": model.session(), "incremental": False},
    ]
    for arguments in refused:
        with pytest.raises(InputError):
            model.generate([1], **arguments)
    with pytest.raises(InputError, match="found empty text"):
        model.generate("")
    with pytest.raises(InputError, match="found 'logits'"):
        model.session().forward([1], capture=("logits",))  # type: ignore[arg-type]


def test_numpy_ids_are_ids(model: k3rs.Model, prompts: list[Prompt]) -> None:
    ids = prompts[-1].ids
    found = model.session().forward(np.array(ids, dtype=np.int32))
    assert np.array_equal(found, model.session().forward(ids))


def test_open_refuses_what_it_cannot_do(model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found nothing there"):
        k3rs.Model.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="found a file"):
        k3rs.Model.open(model_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        k3rs.Model.open(tmp_path)
    with pytest.raises(InputError, match="threads"):
        k3rs.Model.open(model_path, threads=0)
    with pytest.raises((InputError, ConfigError), match="mmx"):
        k3rs.Model.open(model_path, backend="mmx")
    with pytest.raises(CheckpointError, match="expected a packed trunk"):
        k3rs.Model.open(model_path, trunk=tmp_path)
    with pytest.raises(MemoryBudgetError) as refused:
        k3rs.Model.open(model_path, memory="1kB")
    assert refused.value.minimum_bytes is not None
    assert refused.value.minimum_bytes > 1000


@pytest.mark.parametrize("name", ["with space", "Füße 世界", "trailing/"])
def test_a_directory_may_have_any_name(
    model_path: Path, tmp_path: Path, prompts: list[Prompt], name: str
) -> None:
    (tmp_path / name).symlink_to(model_path, target_is_directory=True)
    with k3rs.Model.open(f"{tmp_path}/{name}", memory="1GB") as model:
        tokens = model.generate(prompts[0].ids, max_tokens=2, stop_ids=())
        assert [token.id for token in tokens] == prompts[0].greedy[:2]


def test_a_closed_model_refuses_to_go_on(model_path: Path) -> None:
    with k3rs.Model.open(model_path, memory="1GB") as model:
        pass
    with pytest.raises(SessionError, match="found a closed one"):
        model.session()


def test_progress_rises_to_the_layers_of_all_chunks(model: k3rs.Model, long_ids: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    model.session().forward(long_ids, progress=lambda done, total: seen.append((done, total)))
    done = [done for done, _ in seen]
    (total,) = {total for _, total in seen}
    assert total % model.facts["model"]["layers"] == 0
    assert done == sorted(set(done))
    assert 0 < done[0] <= done[-1] <= total


def test_an_interrupted_session_refuses_to_go_on_until_reset(
    model: k3rs.Model, long_ids: list[int]
) -> None:
    session = model.session()
    calls: list[int] = []

    def interrupt(done: int, _total: int) -> None:
        calls.append(done)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        session.forward(long_ids, progress=interrupt)
    with pytest.raises(SessionError):
        session.forward([1])
    session.reset()
    assert session.position == 0
    assert np.array_equal(session.forward([1]), model.session().forward([1]))


def test_an_error_in_a_progress_callback_is_the_callers(
    model: k3rs.Model, long_ids: list[int]
) -> None:
    def fail(_done: int, _total: int) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        model.session().forward(long_ids, progress=fail)


def test_plan_and_inspect_need_no_engine(model_path: Path) -> None:
    facts = k3rs.plan(model_path, k3rs.MemoryRequest(memory_bytes=10**9), positions=64)
    assert facts["plan"]["budget_bytes"] == 10**9
    assert sum(entry["bytes"] for entry in facts["plan"]["entries"]) <= 10**9
    assert 0 < facts["minimum_bytes"] <= 10**9
    assert k3rs.inspect(model_path)


def test_the_bytes_of_a_ring_that_nothing_needs_serve_the_experts(model_path: Path) -> None:
    def planned(budget: int) -> dict[str, Any]:
        plan: dict[str, Any] = k3rs.plan(model_path, k3rs.MemoryRequest(memory_bytes=budget))[
            "plan"
        ]
        return plan

    everything = planned(10**9)
    assert (everything["pinned_fraction"], everything["ring_bytes"]) == (1.0, 0)
    smallest = k3rs.plan(model_path, k3rs.MemoryRequest(memory_bytes=10**9))["minimum_bytes"]
    slot = next(e["bytes"] for e in everything["entries"] if e["name"] == "expert slots")
    slot //= everything["expert_slots"]
    # The smallest budget that pins the whole trunk, up to a page.
    low, high = smallest, 10**9
    while high - low > 4096:
        middle = (low + high) // 2
        low, high = (low, middle) if planned(middle)["ring_bytes"] == 0 else (middle, high)
    unused = high - sum(entry["bytes"] for entry in planned(high)["entries"])
    assert unused < slot or planned(high)["expert_slots"] == everything["expert_slots"]
