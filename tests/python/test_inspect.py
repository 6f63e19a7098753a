"""`k3rs inspect`: facts about checkpoints that are complete, and about those that are not.

What must be found is counted here from the headers of the shards alone.
"""

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from checkpoint_edit import (
    CONFIG,
    INDEX,
    edit_config,
    edited_json,
    edited_shard,
    edited_tensor,
    rename_tensor,
    shard_of,
)
from harness import RunK3rs
from stored_tensors import (
    LAYERS,
    PREFIX,
    Stored,
    all_stored,
    census,
    census_by_dtype,
    layer_parts,
    stored_in,
)

import k3rs
from k3rs.exceptions import CheckpointError, ConfigError, K3Error
from k3rs.sizes import format_size

MLA_LAYERS = {2, 5, 6}
DENSE_LAYERS = {0}
SPOILT = f"{PREFIX}model.layers.4.self_attn.o_proj.weight"
MISNAMED = SPOILT.replace("o_proj", "out_proj")
ANOTHER_NORM = f"{PREFIX}model.another_norm.weight"
FINAL_NORM = f"{PREFIX}model.norm.weight"
EMBEDDING = f"{PREFIX}model.embed_tokens.weight"
FORMS = Path(__file__).parents[2] / "fixtures" / "forms"

Inspected: TypeAlias = dict[str, Any]


def assert_counts(facts: Inspected, tensors: list[Stored], whole: list[Stored]) -> None:
    assert facts["tensors"] == census(tensors)
    assert facts["dtypes"] == census_by_dtype(tensors)
    found = [{part: layer[part] for part in ("trunk", "experts")} for layer in facts["layers"]]
    assert found == layer_parts(tensors, whole)


# Checkpoints that are not complete


def lose_shard(directory: Path) -> None:
    shard_of(directory, SPOILT).unlink()


def misname(directory: Path) -> None:
    rename_tensor(directory, SPOILT, MISNAMED)


def misname_in_the_shard_alone(directory: Path) -> None:
    with edited_shard(shard_of(directory, SPOILT)) as tensors:
        tensors[MISNAMED] = tensors.pop(SPOILT)


def misshape(directory: Path) -> None:
    with edited_tensor(directory, SPOILT) as tensor:
        rows, columns = tensor.shape
        tensor.shape = [columns, rows]


def add_text_tensor(directory: Path) -> None:
    add_copy_of_final_norm(directory, ANOTHER_NORM)


def add_copy_of_final_norm(directory: Path, name: str) -> None:
    with edited_shard(shard_of(directory, FINAL_NORM)) as tensors:
        tensors[name] = copy.deepcopy(tensors[FINAL_NORM])
    with edited_json(directory / INDEX) as index:
        index["weight_map"][name] = index["weight_map"][FINAL_NORM]


def truncate(directory: Path) -> None:
    shard = shard_of(directory, SPOILT)
    shard.write_bytes(shard.read_bytes()[:-1])


def lose_index_and_shard(directory: Path) -> None:
    lose_shard(directory)
    (directory / INDEX).unlink()


def lose_embedding(directory: Path) -> None:
    with edited_shard(shard_of(directory, EMBEDDING)) as tensors:
        del tensors[EMBEDDING]
    with edited_json(directory / INDEX) as index:
        del index["weight_map"][EMBEDDING]


DAMAGES = [
    lose_shard,
    misname,
    misname_in_the_shard_alone,
    misshape,
    add_text_tensor,
    truncate,
    lose_index_and_shard,
    lose_embedding,
]


# A complete one


@pytest.fixture(scope="module")
def whole(model_path: Path) -> list[Stored]:
    """All tensors of the fixture checkpoint."""
    return all_stored(model_path)


def test_the_facts_of_a_complete_checkpoint(
    model_path: Path, whole: list[Stored], model: k3rs.Model
) -> None:
    facts = k3rs.inspect(model_path)
    assert facts["complete"] is True
    assert facts["problem"] is None
    assert facts["runnable_layers"] == LAYERS
    assert facts["missing"] == facts["unexpected"] == {"count": 0, "first": []}
    assert facts["missing_shards"] == facts["broken_shards"] == facts["unknown_config_keys"] == []
    assert_counts(facts, whole, whole)
    for number, layer in enumerate(facts["layers"]):
        assert layer["attention"] == ("mla" if number in MLA_LAYERS else "kda")
        assert layer["feed_forward"] == ("dense" if number in DENSE_LAYERS else "experts")
    shards = sorted(model_path.glob("*.safetensors"))
    assert facts["files"] == [
        {"path": str(shard), "bytes": shard.stat().st_size} for shard in shards
    ]
    config = json.loads((model_path / CONFIG).read_bytes())["text_config"]
    assert facts["model"] == {
        "path": str(model_path),
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "vocab": config["vocab_size"],
        "parameters": parameters(whole),
        "fingerprint": model.facts["model"]["fingerprint"],
    }


def parameters(tensors: list[Stored]) -> int:
    """Weights of the text model: two in a packed byte, none in a scale."""
    weights = 0
    for tensor in tensors:
        if tensor.part in ("layers", "roots"):
            weights += tensor.elements
        elif tensor.name.endswith("weight_packed"):
            weights += 2 * tensor.elements
    return weights


def test_an_index_is_not_needed(copied: Path, whole: list[Stored]) -> None:
    (copied / INDEX).unlink()
    facts = k3rs.inspect(copied)
    assert (facts["complete"], facts["runnable_layers"]) == (True, LAYERS)
    assert_counts(facts, whole, whole)


def test_tensors_for_images_do_not_matter(copied: Path, whole: list[Stored]) -> None:
    add_copy_of_final_norm(copied, "vision_tower.another.weight")
    facts = k3rs.inspect(copied)
    assert facts["complete"] is True
    assert facts["tensors"] == census(all_stored(copied))
    assert facts["tensors"]["ignored"]["count"] == census(whole)["ignored"]["count"] + 1
    assert facts["dtypes"] == census_by_dtype(whole)


@pytest.mark.parametrize("form", ["flat", "plain_residual", "tied_embeddings"])
def test_what_a_form_does_not_have_is_not_demanded(run_k3rs: RunK3rs, form: str) -> None:
    directory = FORMS / form / "model"
    shown = run_k3rs("inspect", directory).stdout
    found = 0
    for name in ("trunk of the layers", "outside of the layers", "routed experts"):
        count, demanded, _ = row_of(shown, name)
        assert count == demanded, name
        found += number(count)
    names = [tensor.name for tensor in all_stored(directory)]
    assert found == len([name for name in names if not re.search("vision_tower|projector", name)])


# Those that are not


@pytest.mark.parametrize("damage", [lose_shard, lose_index_and_shard])
def test_a_missing_shard(copied: Path, whole: list[Stored], damage: Callable[[Path], None]) -> None:
    """The index tells of it, or the numbers in its siblings' names."""
    shard = shard_of(copied, SPOILT)
    lost = list(stored_in(shard))
    first_lost = min(tensor.layer for tensor in lost if tensor.layer is not None)
    damage(copied)
    facts = k3rs.inspect(copied)
    assert facts["complete"] is False
    assert facts["missing_shards"] == [shard.name]
    assert shard.name in facts["problem"]["error"]
    assert facts["problem"]["hint"]
    assert facts["missing"]["count"] == len(lost) == 152
    assert facts["missing"]["first"][0] in {tensor.name for tensor in lost}
    assert facts["runnable_layers"] == first_lost == 3
    assert facts["model"]["parameters"] is facts["model"]["fingerprint"] is None
    assert_counts(facts, all_stored(copied), whole)


@pytest.mark.parametrize(
    ("damage", "missing", "unexpected", "clue"),
    [
        (misname, [SPOILT], [MISNAMED], "misspelt"),
        # There, but in another form: neither found nor missing.
        (misshape, [], [SPOILT], "[96, 80]"),
        (add_text_tensor, [], [ANOTHER_NORM], ANOTHER_NORM),
    ],
)
def test_a_tensor_that_is_not_as_demanded(
    copied: Path,
    whole: list[Stored],
    damage: Callable[[Path], None],
    missing: list[str],
    unexpected: list[str],
    clue: str,
) -> None:
    damage(copied)
    facts = k3rs.inspect(copied)
    assert facts["complete"] is False
    assert facts["missing"] == {"count": len(missing), "first": missing}
    assert facts["unexpected"] == {"count": len(unexpected), "first": unexpected}
    assert clue in f"{facts['problem']['error']} {facts['problem']['hint']}"
    bad = {*missing, *unexpected}
    assert_counts(facts, [tensor for tensor in whole if tensor.name not in bad], whole)


def test_a_truncated_shard_does_not_hide_the_others(copied: Path, whole: list[Stored]) -> None:
    shard = shard_of(copied, SPOILT)
    lost = {tensor.name for tensor in stored_in(shard)}
    size = shard.stat().st_size
    truncate(copied)
    facts = k3rs.inspect(copied)
    assert facts["complete"] is False
    assert facts["missing_shards"] == []
    (reason,) = facts["broken_shards"]
    assert all(word in reason for word in (str(shard), str(size), str(size - 1)))
    assert facts["missing"]["count"] == len(lost)
    assert str(shard) not in [file["path"] for file in facts["files"]]
    assert_counts(facts, [tensor for tensor in whole if tensor.name not in lost], whole)


def test_without_what_is_outside_of_the_layers_nothing_runs(copied: Path) -> None:
    lose_embedding(copied)
    facts = k3rs.inspect(copied)
    assert facts["missing"] == {"count": 1, "first": [EMBEDDING]}
    assert facts["tensors"]["roots"]["count"] == 4
    assert facts["runnable_layers"] == 0


@pytest.mark.parametrize("damage", DAMAGES)
def test_as_many_layers_run_as_it_says(copied: Path, damage: Callable[[Path], None]) -> None:
    damage(copied)
    runnable = k3rs.inspect(copied)["runnable_layers"]
    assert runnable < LAYERS
    if runnable:
        with k3rs.Model.open(copied, memory="1GB", threads=1, layers=runnable) as model:
            assert model.session().forward([1]).shape == (model.facts["model"]["vocab"],)
    with pytest.raises(K3Error):
        k3rs.Model.open(copied, memory="1GB", threads=1, layers=runnable + 1)


def test_unknown_keys_of_the_config_are_listed(copied: Path, run_k3rs: RunK3rs) -> None:
    edit_config(copied, lambda config: config.update(another_key=1))
    assert k3rs.inspect(copied)["unknown_config_keys"] == ["text_config.another_key"]
    shown = run_k3rs("inspect", copied).stdout
    assert "unknown keys of the config\n  text_config.another_key\n" in shown


def test_without_a_config_there_is_nothing_to_look_at(copied: Path, run_k3rs: RunK3rs) -> None:
    (copied / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        k3rs.inspect(copied)
    done = run_k3rs("inspect", copied)
    assert (done.status, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {copied}: ")
    assert "config.json" in error
    assert hint.startswith("hint: ")


def test_places_that_are_no_checkpoint(run_k3rs: RunK3rs, copied: Path, tmp_path: Path) -> None:
    config = copied / CONFIG
    (tmp_path / "only config").mkdir()
    (tmp_path / "only config" / CONFIG).write_bytes(config.read_bytes())
    for place in (tmp_path / "nothing", config, tmp_path / "only config"):
        done = run_k3rs("inspect", place)
        assert (done.status, done.stdout) == (1, ""), place
        assert "\nhint: " in done.stderr


def test_a_config_that_is_refused(copied: Path, run_k3rs: RunK3rs) -> None:
    edit_config(copied, lambda config: config.pop("hidden_size"))
    with pytest.raises(ConfigError, match="hidden_size"):
        k3rs.inspect(copied)
    assert run_k3rs("inspect", copied).status == 2


# What a person sees


def test_names_of_files_do_not_command_the_terminal(
    copied: Path, run_k3rs: RunK3rs, tmp_path: Path
) -> None:
    strange = "evil\x1b[31m\nnext: k3rs\r.safetensors"
    with edited_json(copied / INDEX) as index:
        index["weight_map"][SPOILT] = strange
    spoilt = copied.rename(copied.with_name("a\x1b[2J\nb"))
    assert strange in k3rs.inspect(spoilt)["missing_shards"]
    lines = run_k3rs("inspect", spoilt).stdout.split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith(f"{tmp_path}/a\u241b[2J\u240ab: incomplete: ")
    assert "  evil\u241b[31m\u240anext: k3rs\u240d.safetensors" in lines


PARTS = {
    "trunk of the layers": "layers",
    "outside of the layers": "roots",
    "routed experts": "experts",
    "image part, ignored": "ignored",
}


def row_of(shown: str, name: str) -> tuple[str, str, str]:
    """Found, demanded (may be empty) and bytes of a line of the census."""
    found = re.search(
        rf"^  {re.escape(name)} +([\d,]+) +(?:([\d,]+) +)?([\d.]+ .?B)$", shown, re.MULTILINE
    )
    assert found is not None, (name, shown)
    return found[1], found[2] or "", found[3]


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize("damage", [None, *DAMAGES])
def test_the_view_has_the_numbers_of_the_facts_in_80_columns(
    copied: Path, run_k3rs: RunK3rs, damage: Callable[[Path], None] | None
) -> None:
    if damage is not None:
        damage(copied)
    done = run_k3rs("inspect", copied)
    assert (done.status, done.stderr) == (0, "")
    shown = done.stdout
    facts = k3rs.inspect(copied)
    # But for a path that is longer by itself.
    assert all(len(line) <= 80 or " " not in line.strip() for line in shown.splitlines()[1:])
    demanded = {"layers": 173, "roots": 5, "experts": 288, "ignored": None}
    for name, part in PARTS.items():
        found, needed, size = row_of(shown, name)
        assert number(found) == facts["tensors"][part]["count"]
        assert size == format_size(facts["tensors"][part]["bytes"])
        assert needed == ("" if demanded[part] is None else str(demanded[part]))
    for dtype, counted in facts["dtypes"].items():
        assert row_of(shown, dtype) == (
            str(counted["count"]),
            "",
            format_size(counted["bytes"]),
        )
    for what in ("missing", "unexpected"):
        for name in facts[what]["first"][:5]:
            assert f"\n  {name}\n" in shown
    assert f"{len(facts['files'])} files of weights, " in shown


@pytest.mark.parametrize("damage", [lambda _: None, lose_shard], ids=["complete", "partial"])
def test_a_program_gets_the_facts_of_the_api(
    copied: Path, run_k3rs: RunK3rs, damage: Callable[[Path], None]
) -> None:
    damage(copied)
    done = run_k3rs("inspect", copied, "--json")
    assert done.status == 0
    assert done.facts == k3rs.inspect(copied)


def test_the_view_of_a_complete_checkpoint(model_path: Path, run_k3rs: RunK3rs) -> None:
    lines = run_k3rs("inspect", model_path).stdout.splitlines()
    assert lines[0] == f"{model_path}: complete"
    shown = dict(re.findall(r"^  (\w+)  +(.+)$", "\n".join(lines[1:10]), re.MULTILINE))
    assert shown == {
        "layers": "7: 4 KDA, 3 MLA, 1 dense, 6 with experts",
        "hidden": "80",
        "vocabulary": "320",
        "experts": "8 a layer, 3 of them wake for a token",
        "parameters": f"{parameters(all_stored(model_path)):,}",
        "fingerprint": k3rs.inspect(model_path)["model"]["fingerprint"],
    }
    first = lines.index("layers                     trunk           experts    bytes of each")
    assert [" ".join(line.split()) for line in lines[first + 1 : first + 7]] == [
        "KDA, dense 23 of 23 202 kB",
        "0",
        "KDA, with experts 28 of 28 48 of 48 267 kB",
        "1, 3-4",
        "MLA, with experts 22 of 22 48 of 48 221 kB",
        "2, 5-6",
    ]
    assert not {"missing", "unexpected", "broken", "hint"} & set(" ".join(lines[1:]).split())


def test_the_view_says_first_what_is_missing_and_what_can_be_run(
    copied: Path, run_k3rs: RunK3rs
) -> None:
    shard = shard_of(copied, SPOILT)
    lose_shard(copied)
    lines = run_k3rs("inspect", copied).stdout.splitlines()
    assert lines[:2] == [
        f"{copied}: incomplete: 1 of 6 shards missing, 152 tensors missing",
        "the first 3 of 7 layers can be run: --layers 3",
    ]
    empty = "KDA, with experts 0 of 28 0 of 48 0 B"
    assert empty in [" ".join(line.split()) for line in lines]
    # The empty layers, and those of their kind that are there.
    assert {"    3-4", "    1"} < set(lines)
    first = lines.index("missing tensors")
    assert lines[first + 6] == "  and 147 more"
    first = lines.index("missing shards")
    assert lines[first : first + 3] == ["missing shards", f"  {shard.name}", ""]
    assert not any(line.startswith("  parameters") for line in lines)


def test_without_the_shard_of_the_image_part_all_layers_can_be_run(
    copied: Path, run_k3rs: RunK3rs, whole: list[Stored]
) -> None:
    (image,) = {tensor.name for tensor in whole if tensor.name.startswith("mm_projector.post")}
    shard_of(copied, image).unlink()
    facts = k3rs.inspect(copied)
    assert (facts["complete"], facts["runnable_layers"]) == (False, LAYERS)
    assert facts["missing"]["count"] == facts["tensors"]["ignored"]["count"] == 0
    assert run_k3rs("inspect", copied).stdout.splitlines()[:3] == [
        f"{copied}: incomplete: 1 of 6 shards missing",
        "all 7 layers can be run: --layers 7",
        "",
    ]
    with k3rs.Model.open(copied, memory="1GB", layers=LAYERS) as model:
        assert len(model.facts["config"]["layers"]) == LAYERS


def test_the_view_names_a_problem_that_no_list_explains(copied: Path, run_k3rs: RunK3rs) -> None:
    """Every tensor is there, but one twice."""
    shard = shard_of(copied, SPOILT)
    (copied / INDEX).unlink()
    (copied / "zz.safetensors").write_bytes(shard.read_bytes())
    facts = k3rs.inspect(copied)
    assert facts["complete"] is False
    shown = run_k3rs("inspect", copied).stdout
    assert shown.splitlines()[0] != f"{copied}: complete"
    words = " ".join(shown.split())
    assert " ".join(facts["problem"]["error"].split()) in words
    assert f"hint: {facts['problem']['hint']}" in words


def test_layers_of_a_sparse_checkpoint_of_the_released_size(
    tmp_path: Path, run_k3rs: RunK3rs
) -> None:
    """93 layers are three lines of kinds; the last two are of one kind."""
    k3rs.synthesize(tmp_path / "model", sparse=True, experts=16, vocab=320)
    shown = run_k3rs("inspect", tmp_path / "model").stdout
    assert len(shown.splitlines()) < 40
    assert "  layers       93: 69 KDA, 24 MLA, 1 dense, 92 with experts\n" in shown
    assert re.search(r"\n    3, 7, 11, .*87, 91-92\n", shown, re.DOTALL)
    kinds = Counter(re.findall(r"^  (\w+, [\w ]+?)  ", shown, re.MULTILINE))
    assert kinds == {"KDA, dense": 1, "KDA, with experts": 1, "MLA, with experts": 1}
