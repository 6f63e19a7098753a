"""Changes copies of a checkpoint: one tensor, one name, one key of the config."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import k3rs

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ELEMENT_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


@dataclass
class StoredTensor:
    """A tensor as a shard holds it."""

    dtype: str
    shape: list[int]
    data: bytearray

    def put(self, index: int, value: float) -> None:
        """Replaces one element, given by its place in the data; BF16 is cut off, not rounded."""
        size = ELEMENT_BYTES[self.dtype]
        stored = struct.pack("<B", int(value)) if size == 1 else struct.pack("<f", value)[-size:]
        self.data[index * size : (index + 1) * size] = stored


def copy_checkpoint(source: Path, directory: Path) -> Path:
    """A copy that may be changed, with fresh files; returns `directory`."""
    return Path(shutil.copytree(source, directory))


def larger_checkpoint(
    source: Path, parent: Path, sizes: Mapping[str, int], *, head_dim: int, heads: int
) -> dict[str, Any]:
    """Writes `parent / "model"`: random weights, the layers of `source`, and other sizes.

    `sizes` are those of the text model, the last two those of its linear attention. Returns
    what `k3rs.synthesize` says of it.
    """
    config = json.loads((source / CONFIG).read_bytes())
    config["text_config"] |= sizes
    config["text_config"]["linear_attn_config"] |= {"head_dim": head_dim, "num_heads": heads}
    config["vision_config"]["text_hidden_size"] = sizes["hidden_size"]
    (parent / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return k3rs.synthesize(parent / "model", config=parent / CONFIG, seed=7)


def shard_of(directory: Path, name: str) -> Path:
    """The file that holds a tensor, by the index."""
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return directory / str(index["weight_map"][name])


def tensor_names(directory: Path) -> list[str]:
    """All names of the index."""
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return list(index["weight_map"])


@contextmanager
def edited_shard(path: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a shard by name, in the order of their data; written back at the end."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = (start + offset for offset in entry["data_offsets"])
        tensors[name] = StoredTensor(entry["dtype"], entry["shape"], bytearray(content[first:end]))
    yield tensors
    header, end = {}, 0
    for name, tensor in tensors.items():
        first, end = end, end + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    data = b"".join(bytes(tensor.data) for tensor in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@contextmanager
def edited_tensor(directory: Path, name: str) -> Iterator[StoredTensor]:
    """One tensor, written back at the end."""
    with edited_shard(shard_of(directory, name)) as tensors:
        yield tensors[name]


def rename_tensor(directory: Path, old: str, new: str) -> None:
    """Gives a tensor another name, in its shard and in the index."""
    with edited_shard(shard_of(directory, old)) as tensors:
        renamed = {new if name == old else name: tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)
    with edited_json(directory / INDEX) as index:
        index["weight_map"][new] = index["weight_map"].pop(old)


@contextmanager
def edited_json(path: Path) -> Iterator[dict[str, Any]]:
    """A JSON document, written back at the end."""
    document = json.loads(path.read_text(encoding="utf-8"))
    yield document
    path.write_text(json.dumps(document), encoding="utf-8")


def edit_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Applies a change to the `text_config` of a nested config."""
    with edited_json(directory / CONFIG) as config:
        change(config["text_config"])
