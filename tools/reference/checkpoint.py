"""Checkpoints on disk: safetensors files, BF16 and MXFP4, the index of shards.

A small reader and writer of its own: numpy has no BF16, and the fixtures need control over where
the data of a file start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Every name of the text model starts with this in a multimodal checkpoint.
TEXT_PREFIX = "language_model."
#: Columns that share one scale byte (OCP Microscaling Formats v1.0, block size 32).
SCALE_GROUP = 32
#: Magnitudes of the E2M1 element format (OCP MX v1.0), by the lower three bits of a nibble.
E2M1_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

#: How the values of a safetensors dtype are held in numpy; BF16 is kept as its bits.
STORAGE = {"F64": "<f8", "F32": "<f4", "I32": "<i4", "BF16": "<u2", "U8": "|u1"}


class Tensor(NamedTuple):
    """A stored tensor: the safetensors dtype and the values as `STORAGE` holds them."""

    dtype: str
    values: NDArray[Any]

    @property
    def byte_count(self) -> int:
        """Bytes on disk."""
        return int(self.values.nbytes)

    def to_float64(self) -> NDArray[np.float64]:
        """The exact values."""
        if self.dtype == "BF16":
            return (self.values.astype("<u4") << 16).view("<f4").astype(np.float64)
        return self.values.astype(np.float64)


def to_bf16(values: NDArray[Any]) -> Tensor:
    """Rounds to BF16, ties to even."""
    bits = values.astype("<f4").view("<u4")
    return Tensor("BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2"))


def decode_mxfp4(packed: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Values [rows, columns] of `packed` [rows, columns / 2] and `scales` [rows, columns / 32].

    The low nibble is the even column; a scale byte `s` stands for `2^(s - 127)`.
    """
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    elements = np.where(nibbles & 8, -1.0, 1.0) * E2M1_MAGNITUDES[nibbles & 7]
    factors = np.exp2(scales.astype(np.float64) - 127.0)
    return np.asarray(elements * np.repeat(factors, SCALE_GROUP, axis=1))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    data_offset: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the tensors in descending element size, then by name.

    The header is padded with spaces until the data start at `data_offset` modulo 8. The format
    asks for no alignment, so every remainder is legal.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].values.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor, begin = tensors[name], end
        end += tensor.byte_count
        shape = list(tensor.values.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * ((data_offset - len(text)) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = tensors[name]
            file.write(np.ascontiguousarray(tensor.values, STORAGE[tensor.dtype]).tobytes())


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a file, in the order of its header."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        shape, (begin, _) = entry["shape"], entry["data_offsets"]
        values = np.frombuffer(
            content, STORAGE[entry["dtype"]], count=math.prod(shape), offset=start + begin
        )
        yield name, Tensor(entry["dtype"], values.reshape(shape))


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], shards: list[dict[str, Tensor]]
) -> None:
    """Writes `config.json`, the shards under the released names (five digits, then six) and the
    index; a single shard becomes `model.safetensors` without an index. The data of each shard
    start at another remainder modulo 8, the first at 0 as released.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config)
    if len(shards) == 1:
        write_safetensors(directory / "model.safetensors", shards[0], data_offset=5)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_safetensors(
            directory / file_name,
            shard,
            data_offset=(number - 1) * 3 % 8,
            metadata={"format": "pt"} if number == 2 else None,
        )
        weight_map.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.byte_count for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document with a line for each field; lists of numbers stay on one line."""

    def text(value: Any, indent: str) -> str:
        inner = indent + " "
        if isinstance(value, Mapping) and value:
            fields = (f"{inner}{json.dumps(k)}: {text(v, inner)}" for k, v in value.items())
            return "{\n" + ",\n".join(fields) + f"\n{indent}}}"
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            return "[\n" + ",\n".join(inner + text(item, inner) for item in value) + f"\n{indent}]"
        return json.dumps(value)

    path.write_text(text(document, "") + "\n", encoding="utf-8")


def read_config(directory: Path) -> dict[str, Any]:
    """The parsed `config.json`."""
    document: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return document


def read_weights(directory: Path) -> dict[str, NDArray[np.float64]]:
    """All weights of the text model as float64, named without `language_model.`; the two tensors
    of an MXFP4 matrix become one, named without `.weight_packed`."""
    stored = {
        name: tensor
        for path in sorted(directory.glob("*.safetensors"))
        for name, tensor in read_safetensors(path)
    }
    if any(name.startswith(TEXT_PREFIX) for name in stored):
        stored = {
            name.removeprefix(TEXT_PREFIX): tensor
            for name, tensor in stored.items()
            if name.startswith(TEXT_PREFIX)
        }
    weights: dict[str, NDArray[np.float64]] = {}
    for name, tensor in stored.items():
        base, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            scales = stored[f"{base}.weight_scale"].values
            weights[base] = decode_mxfp4(tensor.values, scales)
        elif kind != "weight_scale":
            weights[name] = tensor.to_float64()
    return weights
