"""`k3rs score`: how well a model predicts a text."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import k3rs
from k3rs.cli.arguments import memory_request, model_directory
from k3rs.cli.console import Console
from k3rs.cli.prompt import read_text
from k3rs.scoring import encode_scored

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Scores the text file, then prints what came out."""
    request = memory_request(arguments)
    text = read_text(Path(arguments.text_file))
    directory = model_directory(arguments.model)
    # Before the model is opened, as the memory plan makes room for just these tokens.
    tokenizer, ids = encode_scored(
        k3rs.load_tokenizer(directory), text, directory, source=arguments.text_file
    )
    with (
        k3rs.Model.open(
            directory,
            memory="auto" if request.memory_bytes is None else request.memory_bytes,
            trunk_bytes=request.trunk_bytes,
            cache_bytes=request.cache_bytes,
            threads=arguments.threads,
            backend=arguments.backend,
            positions=len(ids) - 1,
            prefill_chunk=arguments.prefill_chunk,
            tokenizer=tokenizer,
        ) as model,
        console.step_progress("scoring") as progress,
    ):
        score = k3rs.score(model, text, progress=progress)
    if arguments.json:
        facts = asdict(score)
        # JSON has no infinity.
        facts["perplexity"] = score.perplexity if math.isfinite(score.perplexity) else None
        console.facts(facts)
        return
    console.answer("".join(f"{line}\n" for line in _lines(score)))


def _lines(score: k3rs.Score) -> Iterator[str]:
    yield f"tokens         {score.tokens:,}"
    yield f"nll            {score.nll:.6f} nats per token"
    yield f"perplexity     {score.perplexity:,.4f}"
    yield f"bits per byte  {score.bits_per_byte:.6f}"
