"""Which files of a repository are needed by somebody who wants a part of it.

Weights are the files that end with `.safetensors`; all others are always needed. Which
weights belong to a layer is what `model.safetensors.index.json` says: a shard is needed if it
has a tensor of one of the layers (`model.layers.N.`), or the embedding
(`model.embed_tokens.weight`), with or without `language_model.` in front. In the released
model every layer is one shard, number N + 1 for layer N, and that of the embedding, number 94,
has the output matrix and the last norms as well.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from k3rs.exceptions import CheckpointError, InputError
from k3rs.hub.manifest import ListedFile, Manifest, shown

__all__ = ["INDEX_FILE", "WHOLE", "CheckpointPart", "parse_layers"]

INDEX_FILE = "model.safetensors.index.json"
"""The file that says which shard has which tensor."""

_TEXT_MODEL = r"(?:language_model\.)?model\."
_LAYER = re.compile(_TEXT_MODEL + r"layers\.([0-9]{1,6})\.")
_EMBEDDING = re.compile(_TEXT_MODEL + r"embed_tokens\.weight")


@dataclass(frozen=True)
class CheckpointPart:
    """What is wanted of a checkpoint: all, no weights, or those of some layers."""

    weights: bool = True
    layers: range | None = None
    """The layers, counted from 0; `None` for all."""

    def choose(self, listing: Manifest, index: bytes | None) -> list[ListedFile]:
        """The files that are needed, everything small first.

        `index` is the content of the index file, `None` where there is none. Raises
        `CheckpointError` where it names a shard that is not listed.
        """
        chosen = [file for file in listing.files if not file.is_weights]
        if not self.weights:
            return chosen
        shards = [file for file in listing.files if file.is_weights]
        if index is not None:
            shard_of = _weight_map(index)
            _require_listed(listing, set(shard_of.values()))
            if self.layers is not None:
                needed = _shards_of_layers(shard_of, self.layers)
                shards = [file for file in shards if file.path in needed]
        elif self.layers is not None:
            raise CheckpointError(
                f"expected `{INDEX_FILE}`, which tells the weights of a layer, found none in "
                f"{listing.repo}",
                "leave --only-layers out",
            )
        return chosen + shards


WHOLE = CheckpointPart()


def parse_layers(text: str) -> range:
    """The layers of `A-B`, both included, or of a single number."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text.strip())
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        if first <= last:
            return range(first, last + 1)
    raise InputError(
        f"expected layers as A-B, found `{text}`",
        "write the first and the last layer, counted from 0, such as `0-3`",
    )


def _weight_map(index: bytes) -> Mapping[str, str]:
    """The shard of every tensor."""
    try:
        shard_of = json.loads(index)["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError):
        shard_of = None
    if not isinstance(shard_of, dict) or not all(
        isinstance(shard, str) for shard in shard_of.values()
    ):
        raise CheckpointError(
            f"`{INDEX_FILE}`: expected a JSON object with `weight_map`, found something else",
            "the repository is not a complete checkpoint; choose another one, or --revision",
        )
    return shard_of


def _require_listed(listing: Manifest, shards: set[str]) -> None:
    missing = sorted(shards.difference(listing.paths))
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise CheckpointError(
            f"`{INDEX_FILE}`: expected shards that {listing.repo} has, found `{shown(missing[0])}`"
            f"{others}, which it does not list",
            "the repository is not a complete checkpoint; choose another one, or --revision",
        )


def _shards_of_layers(shard_of: Mapping[str, str], layers: range) -> set[str]:
    needed = set()
    found = set()
    for name, shard in shard_of.items():
        layer = _LAYER.match(name)
        if layer is not None and int(layer[1]) in layers:
            found.add(int(layer[1]))
            needed.add(shard)
        elif _EMBEDDING.fullmatch(name):
            needed.add(shard)
    if len(found) < len(layers):
        absent = next(layer for layer in layers if layer not in found)
        raise InputError(
            f"expected layers of the model, found {layers[0]}-{layers[-1]}: there is no tensor of "
            f"layer {absent}",
            "layers are counted from 0; see num_hidden_layers in config.json",
        )
    return needed
