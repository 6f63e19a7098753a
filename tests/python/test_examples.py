"""The scripts in `examples/` run as its README says, and what they print is right."""

import importlib.util
import json
import re
import runpy
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from harness import Completed, run_python, smallest_budget

import k3rs

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))
EXPERTS, LAYERS_WITH_EXPERTS = 8, 6

RunExample: TypeAlias = Callable[..., Completed]


@pytest.fixture
def run_example(tmp_path: Path) -> RunExample:
    """Runs an example by its name, away from the source checkout."""

    def run(name: str, *arguments: str | Path, **extra: str) -> Completed:
        return run_python(tmp_path, EXAMPLES / f"{name}.py", *arguments, **extra)

    return run


@pytest.fixture(scope="module")
def shared() -> dict[str, Any]:
    """The texts of the examples and how they become ids."""
    return runpy.run_path(str(EXAMPLES / "_shared.py"))


def rows(output: str) -> list[list[str]]:
    """The words of the lines that begin with a number."""
    return [line.split() for line in output.splitlines() if re.match(r" *[0-9]", line)]


def test_the_readme_has_the_command_of_every_example() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `python examples/(\w+)\.py` \|", text, re.MULTILINE)) == NAMES
    assert len(NAMES) == 5


@pytest.mark.parametrize("name", NAMES)
def test_every_example_runs_without_arguments(name: str, run_example: RunExample) -> None:
    done = run_example(name)
    assert (done.status, done.stderr) == (0, "")
    assert len(rows(done.stdout)) > 4


def test_without_a_model_it_is_the_shipped_one(run_example: RunExample) -> None:
    named = run_example("residuals", k3rs.shipped_model())
    assert run_example("residuals").stdout == named.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="pictures need matplotlib, which is not installed",
)
@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_drawn_on_request(
    name: str, run_example: RunExample, model_path: Path, tmp_path: Path
) -> None:
    done = run_example(name, model_path, "--picture", "out.png")
    assert done.status == 0, done.stderr
    assert done.stdout.endswith("picture: out.png\n")
    data = (tmp_path / "out.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert min(width, height) >= 600


def test_without_matplotlib_a_picture_is_refused_before_any_work(
    run_example: RunExample, model_path: Path, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "matplotlib.py").write_text("raise ModuleNotFoundError", encoding="utf-8")
    done = run_example("routing", model_path, "--picture", "out.png", PYTHONPATH=str(blocked))
    assert (done.status, done.stdout) == (1, "")
    assert "expected matplotlib to draw a picture" in done.stderr
    assert "\nhint: pip install 'k3rs[plot]'" in done.stderr


def test_a_model_that_is_not_there_is_an_error_in_words(run_example: RunExample) -> None:
    done = run_example("residuals", "missing")
    assert (done.status, done.stdout) == (2, "")
    assert "missing: expected a model directory, found nothing there\nhint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_routing_counts_who_wakes(
    run_example: RunExample, model_path: Path, model: k3rs.Model, shared: dict[str, Any]
) -> None:
    config = json.loads((model_path / "config.json").read_text(encoding="utf-8"))["text_config"]
    ids = shared["encode"](model, shared["PASSAGE"])
    _, seen = model.session().forward(ids, capture=("router",))
    expected = []
    for layer, (chosen, _) in enumerate(seen["router"], start=2):
        counts = [sum(expert in awake for awake in chosen) for expert in range(EXPERTS)]
        busiest = counts.index(max(counts))
        share = f"{counts[busiest] / len(ids):.1%}"
        awake = f"{config['num_experts_per_token']:.2f}"
        expected.append([str(layer), awake, str(counts.count(0)), str(busiest), share])

    output = run_example("routing", model_path).stdout
    title, *table = rows(output.split("\n\n")[0])
    assert title == f"{len(ids)} tokens, {EXPERTS} experts in each layer".split()
    assert len(table) == LAYERS_WITH_EXPERTS
    assert table == expected


def test_routing_shows_the_experts_of_a_sentence(
    run_example: RunExample, without_tokenizer: Path, model: k3rs.Model, shared: dict[str, Any]
) -> None:
    ids = shared["encode"](model, shared["SENTENCE"])
    _, seen = model.session().forward(ids, capture=("router",))
    chosen, weights = seen["router"][3]
    expected = [
        [str(token_id)] + [word for weight, e in heaviest for word in (str(e), f"({weight:.2f})")]
        for token_id, experts, row in zip(ids, chosen, weights, strict=True)
        for heaviest in [sorted(zip(row, experts, strict=True), reverse=True)]
    ]
    # Without a vocabulary the tokens are shown by their ids.
    sentence = run_example("routing", without_tokenizer).stdout.split("\n\n")[1]
    assert sentence.startswith("experts of layer 5 ")
    assert rows(sentence) == expected


def test_the_cost_of_a_context_is_that_of_the_plan_and_of_the_release(
    run_example: RunExample, model_path: Path
) -> None:
    done = run_example("latent_cache", model_path)
    assert done.status == 0, done.stderr
    small, released, last = done.stdout.split("\n\n")
    assert last == "the formulas give the planned bytes of the model at every length\n"
    # 4 KDA layers of 3 heads, 3 MLA layers with a row of 40 + 8 floats a position.
    state = 4 * 3 * (32 * 32 + 3 * 3 * 32) * 4
    latent = 3 * 1024 * (40 + 8) * 4
    assert (state, latent) == (62976, 589824)
    assert rows(small)[1][:5] == ["1024", "63.0", "kB", "590", "kB"]
    # 69 * 96 * (128 * 128 + 3 * 3 * 128) * 4; then 2**20 positions, 4 bytes a float:
    # 24 * 576, 24 * 96 * 320 and 93 * 96 * 320 floats.
    assert rows(released)[-1] == [
        *("1048576", "465", "MB", "58.0", "GB"),
        *("3.09", "TB", "12.0", "TB"),
    ]
    assert {tuple(row[1:3]) for row in rows(released)} == {("465", "MB")}


def test_the_residual_sum_is_that_of_the_model_and_turns_at_block_boundaries(
    run_example: RunExample, model_path: Path, model: k3rs.Model, shared: dict[str, Any]
) -> None:
    ids = shared["encode"](model, shared["SENTENCE"])
    _, seen = model.session().forward(ids, capture=("hidden",))
    norms = np.sqrt((seen["hidden"].astype(np.float64) ** 2).sum(axis=2)).mean(axis=1)

    table = rows(run_example("residuals", model_path).stdout)
    assert [row[0] for row in table if "anew" in row] == ["1", "4", "7"]
    assert [row[2] for row in table] == [f"{norm:.3f}" for norm in norms]
    turned = [float(row[3]) for row in table[1:] if "anew" in row]
    went_on = [float(row[3]) for row in table[1:] if "anew" not in row]
    assert max(turned) < 0.1
    assert min(went_on) > 0.6


def test_the_memory_dial_goes_from_nothing_pinned_to_everything(
    run_example: RunExample, model_path: Path, model: k3rs.Model, shared: dict[str, Any]
) -> None:
    done = run_example("memory_plan", model_path)
    assert done.status == 0, done.stderr
    table = rows(done.stdout)[1:]
    pinned = [int(row[-1].removesuffix("%")) for row in table]
    assert (pinned[0], pinned[-1]) == (0, 100)
    assert pinned == sorted(pinned)
    smallest = smallest_budget(model_path, positions=256)
    assert table[0][:2] == [f"{smallest / 1e6:.1f}", "MB"]

    found = re.findall(r"^ids of the \w+ budget: +([0-9 ]+)$", done.stdout, re.MULTILINE)
    prompt = shared["encode"](model, shared["SENTENCE"])
    tokens = model.generate(prompt, max_tokens=24, stop_ids=())
    expected = " ".join(str(token.id) for token in tokens)
    assert found == [expected, expected]
    assert done.stdout.endswith("the logits are the same to the last bit\n")


def test_no_cache_beats_the_one_that_knows_the_future(
    run_example: RunExample, model_path: Path, model: k3rs.Model, shared: dict[str, Any]
) -> None:
    done = run_example("expert_cache", model_path)
    assert done.status == 0, done.stderr
    (tokens, _, requests, *_), (distinct, _, experts, *_), *table = rows(done.stdout)
    # The last token that is generated is not fed to the model.
    assert int(tokens) == len(shared["encode"](model, shared["SENTENCE"])) + 200 - 1
    assert int(requests) == int(tokens) * LAYERS_WITH_EXPERTS * 3
    assert int(experts) == LAYERS_WITH_EXPERTS * EXPERTS

    assert [row[0] for row in table] == ["4", "8", "16", "32", "48"]
    rates = np.array([[float(rate.removesuffix("%")) for rate in row[1:]] for row in table])
    lru, default, belady = rates.T
    assert np.all(belady >= lru)
    assert np.all(belady >= default)
    assert belady[0] > lru[0]
    assert np.all(np.diff(belady) > 0)
    # With room for all experts only the first use of each is a miss.
    assert set(table[-1][1:]) == {f"{1 - int(distinct) / int(requests):.1%}"}
