"""Losses of a text: of an exported checkpoint, and of n-gram models over the same tokens.

    python tools/train_nano/measure.py evaluate CHECKPOINT_DIR TEXT_FILE [--tokens N]
    python tools/train_nano/measure.py baselines CHECKPOINT_DIR TEXT_FILE --work WORK_DIR

The n-gram models learn from the training text in `WORK_DIR`; the checkpoint gives the vocabulary.
One line of JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import corpus
import evaluation
import ngrams
import numpy as np
import vocabulary

ORDERS = (1, 2, 3, 5)


def evaluate(checkpoint: Path, text: str, token_count: int | None) -> dict[str, float]:
    """The loss of the checkpoint on the first tokens of the text, as one sequence."""
    tokens = vocabulary.read(checkpoint)
    ids = np.asarray(vocabulary.encoder(tokens).encode(text).ids)[:token_count]
    shape, weights = evaluation.read_checkpoint(checkpoint)
    return evaluation.summarize(evaluation.losses(shape, weights, ids), ids, tokens).figures()


def baselines(checkpoint: Path, text: str, work: Path) -> dict[str, dict[str, float]]:
    """The losses of n-gram models on the whole text."""
    tokens = vocabulary.read(checkpoint)
    encoder = vocabulary.encoder(tokens)
    training = encoder.encode(corpus.load(work).training).ids
    ids = encoder.encode(text).ids
    return {
        f"{order}-gram": evaluation.summarize(
            ngrams.KneserNey(training, order, len(tokens)).losses(ids), np.asarray(ids), tokens
        ).figures()
        for order in ORDERS
    }


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("evaluate", "baselines"))
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_DIR")
    parser.add_argument("text", type=Path, metavar="TEXT_FILE")
    parser.add_argument("--tokens", type=int, help="only the first N tokens of the text")
    parser.add_argument("--work", type=Path, metavar="WORK_DIR", help="that of the training")
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    if arguments.what == "evaluate":
        print(json.dumps(evaluate(arguments.checkpoint, text, arguments.tokens)))
    elif arguments.work is None:
        parser.error("baselines need the text in WORK_DIR: give --work")
    else:
        print(json.dumps(baselines(arguments.checkpoint, text, arguments.work)))


if __name__ == "__main__":
    main()
