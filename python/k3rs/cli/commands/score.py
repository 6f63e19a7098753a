"""`k3rs score`: how well a model predicts a text."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import k3rs
from k3rs.cli.arguments import model_directory, open_model
from k3rs.cli.console import Console
from k3rs.cli.prompt import read_text
from k3rs.scoring import encode_scored, score_ids

__all__ = ["run"]


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Scores the text file, then prints what came out."""
    text = read_text(Path(arguments.text_file))
    directory = model_directory(arguments.model)
    # Before the model is opened, as the memory plan makes room for just these tokens.
    tokenizer, ids = encode_scored(
        k3rs.load_tokenizer(directory), text, directory, source=arguments.text_file
    )
    with (
        open_model(arguments, directory, tokenizer, positions=len(ids) - 1) as model,
        console.step_progress("scoring") as progress,
    ):
        score = score_ids(model, tokenizer, ids, progress=progress)
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
