"""`k3rs inspect`: what a checkpoint contains, complete or not."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias

import k3rs
from k3rs.cli.console import Console
from k3rs.cli.paragraphs import one_line, paragraph
from k3rs.sizes import format_size

__all__ = ["run"]

Facts: TypeAlias = Mapping[str, Any]

_INDENT = "  "
_LONGEST_LIST = 5
_KINDS = {"kda": "KDA", "mla": "MLA", "dense": "dense", "experts": "with experts"}


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Prints the facts about the checkpoint, from its config and headers alone."""
    facts = k3rs.inspect(arguments.model)
    if arguments.json:
        console.facts(facts)
        return
    sections = (_verdict, _model, _census, _layer_map, _lists)
    texts = ["\n".join(section(facts)) for section in sections]
    console.answer("\n\n".join(text for text in texts if text) + "\n")


def _verdict(facts: Facts) -> Iterator[str]:
    """Whether it can be run, and what stands in the way."""
    path, layers = one_line(facts["model"]["path"]), facts["model"]["layers"]
    if facts["complete"]:
        yield f"{path}: complete"
        return
    flaws = ", ".join(_flaws(facts))
    yield f"{path}: {f'incomplete: {flaws}' if flaws else 'cannot be run'}"
    runnable = facts["runnable_layers"]
    if runnable:
        which = "all" if runnable == layers else f"the first {runnable} of"
        yield f"{which} {layers} layers can be run: --layers {runnable}"
    # The lists below say it all where shards are not there or not whole.
    if facts["problem"] and not facts["missing_shards"] and not facts["broken_shards"]:
        yield from paragraph(facts["problem"]["error"], _INDENT)
        if facts["problem"]["hint"]:
            yield from paragraph(f"hint: {facts['problem']['hint']}", _INDENT)


def _flaws(facts: Facts) -> Iterator[str]:
    shards = len(facts["files"]) + len(facts["missing_shards"]) + len(facts["broken_shards"])
    for what in ("missing", "broken"):
        if facts[f"{what}_shards"]:
            yield f"{len(facts[f'{what}_shards'])} of {_count(shards, 'shard')} {what}"
    for what in ("missing", "unexpected"):
        if facts[what]["count"]:
            yield f"{_count(facts[what]['count'], 'tensor')} {what}"


def _model(facts: Facts) -> Iterator[str]:
    model, moe = facts["model"], facts["config"]["moe"]
    kinds = Counter(layer["attention"] for layer in facts["layers"])
    kinds.update(layer["feed_forward"] for layer in facts["layers"])
    counts = ", ".join(f"{kinds[kind]} {name}" for kind, name in _KINDS.items() if kinds[kind])
    yield "model"
    yield f"  layers       {model['layers']}: {counts}"
    yield f"  hidden       {model['hidden']:,}"
    yield f"  vocabulary   {model['vocab']:,}"
    if moe is not None:
        woken = moe["experts_per_token"]
        yield f"  experts      {moe['experts']:,} a layer, {woken} of them wake for a token"
    if model["parameters"] is not None:
        yield f"  parameters   {model['parameters']:,}"
    if model["fingerprint"] is not None:
        yield f"  fingerprint  {model['fingerprint']}"


def _census(facts: Facts) -> Iterator[str]:
    """Tensors and bytes by part, then by element type."""
    tensors, layers = facts["tensors"], facts["layers"]
    yield _row("tensors", "found", "demanded", "bytes")
    for name, part, demanded in (
        ("trunk of the layers", "layers", _demanded(layers, "trunk")),
        ("outside of the layers", "roots", facts["roots_demanded"]),
        ("routed experts", "experts", _demanded(layers, "experts")),
    ):
        yield _tally(name, tensors[part], f"{demanded:,}")
    yield _tally("image part, ignored", tensors["ignored"])
    yield ""
    for dtype, tally in facts["dtypes"].items():
        yield _tally(dtype, tally)


def _demanded(layers: Sequence[Facts], part: str) -> int:
    return sum(layer[part]["demanded"] for layer in layers)


def _tally(name: str, tally: Facts, demanded: str = "") -> str:
    return _row(f"  {name}", f"{tally['count']:,}", demanded, format_size(tally["bytes"]))


def _row(name: str, *cells: str) -> str:
    return f"{name:<25}{''.join(f'{cell:>13}' for cell in cells)}"


def _layer_map(facts: Facts) -> Iterator[str]:
    """Layers of one kind and condition together, and below them which these are."""
    layers: list[Facts] = facts["layers"]
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, layer in enumerate(layers):
        groups.setdefault(_condition(layer), []).append(number)
    yield f"{'layers':<20}{'trunk':>12}{'experts':>18}{'bytes of each':>17}"
    for (kind, trunk, experts, size), numbers in groups.items():
        yield f"  {kind:<18}{trunk:>12}{experts:>18}{size:>17}"
        yield from paragraph(", ".join(_ranges(numbers)), 2 * _INDENT)


def _condition(layer: Facts) -> tuple[str, ...]:
    """What the map says of a layer: kind, tensors of trunk and experts, bytes."""
    trunk, experts = layer["trunk"], layer["experts"]
    return (
        f"{_KINDS[layer['attention']]}, {_KINDS[layer['feed_forward']]}",
        _share(trunk),
        _share(experts) if experts["demanded"] else "",
        format_size(trunk["bytes"] + experts["bytes"]),
    )


def _share(part: Facts) -> str:
    return f"{part['found']:,} of {part['demanded']:,}"


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Ascending numbers with neighbours joined: `0`, `4-6`."""
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        yield str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"


def _lists(facts: Facts) -> Iterator[str]:
    """What is missing, wrong or unknown by name, and the files."""
    for what in ("missing", "unexpected"):
        yield from _names(f"{what} tensors", facts[what]["first"], facts[what]["count"])
    for what in ("missing", "broken"):
        shards = facts[f"{what}_shards"]
        yield from _names(f"{what} shards", shards, len(shards))
    keys = facts["unknown_config_keys"]
    yield from _names("unknown keys of the config", keys, len(keys))
    files = facts["files"]
    size = format_size(sum(file["bytes"] for file in files))
    yield f"{_count(len(files), 'file')} of weights, {size}"


def _names(title: str, names: Sequence[str], count: int) -> Iterator[str]:
    """The first few of `count` names, under a title; nothing where there are none."""
    if not count:
        return
    yield title
    for name in names[:_LONGEST_LIST]:
        yield from paragraph(name, _INDENT)
    shown = min(len(names), _LONGEST_LIST)
    if count > shown:
        yield f"  and {count - shown:,} more"
    yield ""


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
