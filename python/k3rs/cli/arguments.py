"""Arguments that several commands share, turned into what the API takes."""

import argparse
from pathlib import Path

import k3rs
from k3rs.presets import MemoryRequest, request_memory
from k3rs.sizes import parse_gigabytes

__all__ = ["memory_request", "model_directory"]


def memory_request(arguments: argparse.Namespace) -> MemoryRequest:
    """The budget from `--memory`, `--preset`, `--trunk-gb` and `--cache-gb`."""
    trunk, cache = arguments.trunk_gb, arguments.cache_gb
    return request_memory(
        arguments.memory,
        preset=arguments.preset,
        trunk_bytes=None if trunk is None else parse_gigabytes(trunk),
        cache_bytes=None if cache is None else parse_gigabytes(cache),
    )


def open_model(
    arguments: argparse.Namespace,
    directory: Path,
    tokenizer: k3rs.Tokenizer | None,
    positions: int,
) -> k3rs.Model:
    """The model in `directory`, as the memory and computing arguments want it."""
    request = memory_request(arguments)
    return k3rs.Model.open(
        directory,
        memory="auto" if request.memory_bytes is None else request.memory_bytes,
        trunk_bytes=request.trunk_bytes,
        cache_bytes=request.cache_bytes,
        threads=arguments.threads,
        backend=arguments.backend,
        positions=positions,
        prefill_chunk=arguments.prefill_chunk,
        trunk=arguments.trunk,
        layers=arguments.layers,
        tokenizer=tokenizer,
    )


def model_directory(model: str | None) -> Path:
    """The directory that was named, or that of the shipped model."""
    return k3rs.shipped_model() if model is None else Path(model)
