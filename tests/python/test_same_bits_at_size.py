"""The promise of `test_same_bits.py` on a checkpoint that does not fit into one tile.

Tens of megabytes in matrices of odd sizes: the output matrix is cut into two tiles, dozens of
tiles pass a ring of six buffers, and a layer has many more experts than the cache has
slots at the smallest budget.
"""

import hashlib
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_edit import larger_checkpoint
from numpy.typing import NDArray

import k3rs
from k3rs import _k3rs

PROMPTS = [[3, 4, 5, 6, 7, 3000, 9000, 12, 255, 4096, 77, 78, 79], [9, 9, 8191, 500, 2]]
STEPS = 8
POSITIONS = 32
EXPERTS = 20
EXPERTS_PER_TOKEN = 5
ROUTED_LAYERS = 6

# Sizes that leave remainders in blocks of 256 columns, in lanes of 8 and in whole pages.
SIZES: dict[str, Any] = {
    "hidden_size": 436,
    "intermediate_size": 1606,
    "kv_lora_rank": 140,
    "moe_intermediate_size": 224,
    "num_attention_heads": 7,
    "num_key_value_heads": 7,
    "num_experts": EXPERTS,
    "num_experts_per_token": EXPERTS_PER_TOKEN,
    "q_lora_rank": 210,
    "qk_nope_head_dim": 56,
    "qk_rope_head_dim": 24,
    "routed_expert_hidden_size": 288,
    "v_head_dim": 72,
    "vocab_size": 9_900,
}

# Of the bytes of the checkpoint, added to the smallest budget.
SHARES = [0, 0.1, 0.2, 0.35, 0.5, 1.5]


@dataclass(frozen=True)
class Written:
    """What a model made of a prompt."""

    ids: list[int]
    """Greedy."""
    bits: list[str]
    """Of the logits of every position, as a digest of each."""


@pytest.fixture(scope="module")
def large_path(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A random checkpoint with the layers of the fixture and larger sizes."""
    parent = tmp_path_factory.mktemp("same bits at size")
    facts = larger_checkpoint(model_path, parent, SIZES, head_dim=72, heads=7)
    assert 30e6 < facts["tensor_bytes"] < 60e6
    yield parent / "model"
    shutil.rmtree(parent)


@pytest.fixture(scope="module")
def truth(large_path: Path) -> list[Written]:
    """Of each prompt, computed in the plainest way: scalar, one thread, one id a call."""
    with k3rs.Model.open(large_path, memory="1GB", threads=1, backend="scalar") as model:
        return [write_one_by_one(model.session(), prompt) for prompt in PROMPTS]


def write_one_by_one(session: k3rs.Session, prompt: list[int]) -> Written:
    rows = [session.forward([token]) for token in prompt]
    ids = [int(rows[-1].argmax())]
    while len(ids) < STEPS:
        rows.append(session.forward(ids[-1:]))
        ids.append(int(rows[-1].argmax()))
    return Written(ids, [bits(row) for row in rows])


def write(model: k3rs.Model, prompt: list[int]) -> Written:
    """As a user does: the prompt but for its last id in one call, then `generate`."""
    session = model.session()
    rows = list(session.forward(prompt[:-1], all_positions=True))
    steps = model.generate(
        prompt[-1:], max_tokens=STEPS, session=session, stop_ids=(), on_logits=rows.append
    )
    ids = [token.id for token in steps]
    return Written(ids, [bits(row) for row in rows])


def bits(logits: NDArray[np.float32]) -> str:
    """A digest of the float32 bits: -0 differs from 0."""
    assert logits.dtype == np.float32
    return hashlib.sha256(logits.tobytes()).hexdigest()


def open_with_budget(
    path: Path, share: float, *, direct: bool | None, threads: int, chunk: int | None
) -> k3rs.Model:
    """Opens `path` with `share` of its bytes beyond the smallest budget for these options."""
    size = sum(file["bytes"] for file in k3rs.inspect(path)["files"])
    facts = k3rs.plan(path, positions=POSITIONS, threads=threads, prefill_chunk=chunk)
    engine = _k3rs.Engine.open(
        str(path),
        memory_bytes=facts["minimum_bytes"] + int(share * size),
        positions=POSITIONS,
        threads=threads,
        prefill_chunk=chunk,
        direct=direct,
    )
    model = k3rs.Model(path, engine, tokenizer=None)
    io = model.report()["io"]
    if direct is None and not io["direct"]:
        pytest.skip(f"there are no direct reads here: {io['why']}")
    assert io["direct"] == (direct is None)
    return model


def test_the_texts_vary(truth: list[Written]) -> None:
    """Equal logits everywhere would make every comparison of this file hold."""
    for written in truth:
        assert len(set(written.ids)) > STEPS // 2
        assert len(set(written.bits)) == len(written.bits)
    assert truth[0].ids != truth[1].ids


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
@pytest.mark.parametrize(("threads", "chunk"), [(1, 1), (2, 5), (7, None)])
def test_memory_budgets(
    large_path: Path,
    truth: list[Written],
    direct: bool | None,
    threads: int,
    chunk: int | None,
) -> None:
    pinned, slots = [], []
    for share in SHARES:
        with open_with_budget(
            large_path, share, direct=direct, threads=threads, chunk=chunk
        ) as model:
            # The second prompt finds resident what the first one left.
            for prompt, expected in zip(PROMPTS, truth, strict=True):
                assert write(model, prompt) == expected, (share, prompt)
            pinned.append(model.plan["pinned_fraction"])
            slots.append(model.plan["expert_slots"])
    assert (pinned[0], pinned[-1]) == (0, 1)
    assert (slots[0], slots[-1]) == (EXPERTS_PER_TOKEN, EXPERTS * ROUTED_LAYERS)
    assert len(set(pinned)) == len(SHARES)


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
def test_sessions_that_share_the_smallest_cache(
    large_path: Path, truth: list[Written], direct: bool | None
) -> None:
    with open_with_budget(large_path, 0, direct=direct, threads=2, chunk=1) as model:
        sessions = [model.session() for _ in PROMPTS]
        texts = [prompt + written.ids[:-1] for prompt, written in zip(PROMPTS, truth, strict=True)]
        seen: list[list[str]] = [[] for _ in PROMPTS]
        for turn in itertools.zip_longest(*texts):
            for session, digests, token in zip(sessions, seen, turn, strict=True):
                if token is not None:
                    digests.append(bits(session.forward([token])))
        assert seen == [written.bits for written in truth]
        # They did push each other's experts out.
        assert model.report()["experts"]["distinct"] > 10 * model.plan["expert_slots"]
