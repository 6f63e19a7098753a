"""The checkpoint directory in the released layout: shards, index, config, vocabulary.

Layer `l` lies in shard `l + 1`, the five tensors outside the layers in the one after the last.
Names, types and packing are those of the release; `A_log` is padded to the width of a head.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import vocabulary
from architecture import Architecture
from stored_weights import F32_ENDINGS, Weights, is_expert, pack

# Behind `architecture`, which makes the tools of the reference importable.
from checkpoint import TEXT_PREFIX, Tensor, to_bf16, write_json, write_safetensors  # isort: skip


def write(directory: Path, shape: Architecture, weights: Weights, tokens: list[bytes]) -> int:
    """Writes the checkpoint in place of `directory` and returns its size in bytes.

    A reader finds the old checkpoint or the new one, and a mixture only between two renames.
    """
    fresh = directory.with_name(f"{directory.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    shards: list[dict[str, Tensor]] = [{} for _ in range(shape.layers + 1)]
    for name, value in weights.items():
        parts = name.split(".")
        shard = shards[int(parts[2]) if parts[1] == "layers" else shape.layers]
        for stored_name, tensor in stored(name, np.asarray(value)):
            shard[TEXT_PREFIX + stored_name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        write_safetensors(fresh / file_name, shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.byte_count for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (fresh / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")
    write_json(fresh / "config.json", shape.config())
    vocabulary.write(fresh, tokens)
    old = directory.with_name(f"{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)
    return sum(path.stat().st_size for path in directory.iterdir())


def stored(name: str, value: np.ndarray) -> list[tuple[str, Tensor]]:
    """The stored tensors of one trained tensor, with their names after `language_model.`."""
    if is_expert(name):
        stem, _, part = name.rpartition(".")
        tensors = []
        for expert, matrix in enumerate(value):
            packed, scales = pack(matrix)
            tensors.append((f"{stem}.{expert}.{part}.weight_packed", Tensor("U8", packed)))
            tensors.append((f"{stem}.{expert}.{part}.weight_scale", Tensor("U8", scales)))
        return tensors
    if name.endswith(F32_ENDINGS):
        return [(name, Tensor("F32", value.astype("<f4")))]
    return [(name, to_bf16(value))]
