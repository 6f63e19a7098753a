"""The tensors of a checkpoint counted from the headers of its shards alone."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkpoint_edit import ELEMENT_BYTES

PREFIX = "language_model."
LAYERS = 7
LAYER = re.compile(rf"{re.escape(PREFIX)}model\.layers\.(\d+)\.")
EXPERT = ".block_sparse_moe.experts."


@dataclass(frozen=True)
class Stored:
    """A tensor by its header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def layer(self) -> int | None:
        found = LAYER.match(self.name)
        return None if found is None else int(found[1])

    @property
    def part(self) -> str:
        if not self.name.startswith(PREFIX):
            return "ignored"
        if self.layer is None:
            return "roots"
        return "experts" if EXPERT in self.name else "layers"


def stored_in(shard: Path) -> Iterator[Stored]:
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        yield Stored(name, entry["dtype"], tuple(entry["shape"]))


def all_stored(directory: Path) -> list[Stored]:
    return [tensor for path in directory.glob("*.safetensors") for tensor in stored_in(path)]


def tally(tensors: list[Stored]) -> dict[str, int]:
    return {"count": len(tensors), "bytes": sum(tensor.size_bytes for tensor in tensors)}


def census(tensors: list[Stored]) -> dict[str, dict[str, int]]:
    return {
        part: tally([tensor for tensor in tensors if tensor.part == part])
        for part in ("layers", "roots", "experts", "ignored")
    }


def census_by_dtype(tensors: list[Stored]) -> dict[str, dict[str, int]]:
    text = [tensor for tensor in tensors if tensor.part != "ignored"]
    return {
        dtype: tally([tensor for tensor in text if tensor.dtype == dtype])
        for dtype in ELEMENT_BYTES
        if any(tensor.dtype == dtype for tensor in text)
    }


def layer_parts(tensors: list[Stored], whole: list[Stored]) -> list[dict[str, dict[str, int]]]:
    """Found, demanded and bytes of each layer, if `whole` is all that is demanded."""

    def part(layer: int, name: str) -> dict[str, int]:
        found, demanded = (
            tally([tensor for tensor in some if (tensor.layer, tensor.part) == (layer, name)])
            for some in (tensors, whole)
        )
        return {"found": found["count"], "demanded": demanded["count"], "bytes": found["bytes"]}

    return [
        {"trunk": part(layer, "layers"), "experts": part(layer, "experts")}
        for layer in range(LAYERS)
    ]
