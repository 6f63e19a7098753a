"""How well a model predicts a text: negative log-likelihood and perplexity.

The ids of the text, encoded as plain text (in which nothing is special) and without a
start token, are read from an empty state. Each id but the first is predicted from all
before it, by a softmax over the whole vocabulary.

The logits are the same bits however the text is divided into calls, and the sums are
float64 in the order of the text. So the score is the same bits, too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k3rs.exceptions import InputError
from k3rs.log_probabilities import log_softmax
from k3rs.model import Model
from k3rs.session import Progress, Session
from k3rs.tokenizer import Tokenizer
from k3rs.vocabulary import CONFIG_FILE, RANKS_FILE

__all__ = ["Score", "encode_scored", "score", "score_ids"]

_LOGIT_BYTES = 4
_BLOCKS = 2
"""Beside the logits of a piece, the allocator may still keep those of the one before."""


@dataclass(frozen=True, slots=True)
class Score:
    """How well a text was predicted."""

    tokens: int
    """Predicted tokens: all but the first."""
    nll: float
    """Negative log-likelihood: the mean over the predicted tokens, in nats."""
    perplexity: float
    """`exp(nll)`; infinity where that is beyond float64."""
    bits_per_byte: float
    """Negative log-likelihood of the text in bits, per byte of the predicted tokens."""


def score(
    model: Model,
    text: str,
    *,
    piece_tokens: int | None = None,
    progress: Progress | None = None,
) -> Score:
    """Scores `text`: every token but the first is predicted from all before it.

    The logits of `piece_tokens` tokens are held at once; without it, of as many as the
    memory plan has room for. No bit of the score depends on it. `progress` is called
    with the tokens read and the tokens in all.

    Raises `InputError` for a text of fewer than two tokens or a model without a
    tokenizer, and what `Session.forward` raises.
    """
    if piece_tokens is not None and piece_tokens < 1:
        raise InputError(
            f"expected piece_tokens to be at least 1, found {piece_tokens}",
            hint="leave it out for the default",
        )
    tokenizer, ids = encode_scored(model.tokenizer, text, model.path)
    return score_ids(model, tokenizer, ids, piece_tokens=piece_tokens, progress=progress)


def score_ids(
    model: Model,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    piece_tokens: int | None = None,
    progress: Progress | None = None,
) -> Score:
    """`score` of a text that `encode_scored` has encoded."""
    # The last token predicts none of the text and is not read.
    tokens = len(ids) - 1
    piece = piece_tokens or _tokens_with_room(model)
    session = model.session()
    total = 0.0
    for first in range(0, tokens, piece):
        end = min(first + piece, tokens)
        within = None if progress is None else _within(progress, first, end, tokens)
        # One by one: `sum` would begin anew with each piece, and compensates in some Pythons.
        for surprise in _surprises(session, ids[first : end + 1], within):
            total += surprise
        if progress is not None:
            progress(end, tokens)
    nll = total / tokens
    size_bytes = len(tokenizer.decode_bytes(ids[1:]))
    return Score(tokens, nll, _exp(nll), total / math.log(2) / size_bytes)


def encode_scored(
    tokenizer: Tokenizer | None, text: str, directory: Path, *, source: str = "text"
) -> tuple[Tokenizer, list[int]]:
    """The tokenizer of the model in `directory`, and the ids of `text`, at least two.

    Raises `InputError`, which names `source` as the place of the text, where there is no
    tokenizer or there are fewer ids.
    """
    if tokenizer is None:
        raise InputError(
            f"{directory}: expected a tokenizer for a text to score, found no {RANKS_FILE}",
            hint=f"add the vocabulary files of the release, {RANKS_FILE} and {CONFIG_FILE}",
        )
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise InputError(
            f"{source}: expected a text of at least 2 tokens, found {len(ids)}",
            hint="the first token is not predicted, so that one alone has no score; add text",
        )
    return tokenizer, ids


def _surprises(session: Session, ids: Sequence[int], progress: Progress | None) -> list[float]:
    """Reads all `ids` but the last: what each of the others costs behind them.

    The logits are gone when it returns, so that those of two pieces are never held at once.
    """
    logits = session.forward(ids[:-1], all_positions=True, progress=progress)
    following = zip(logits, ids[1:], strict=True)
    return [-float(log_softmax(row)[token_id]) for row, token_id in following]


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _tokens_with_room(model: Model) -> int:
    """Tokens whose logits fit where a sweep works, which is free once they are made.

    At most those of one sweep: the core would collect the logits of several.
    """
    planned: dict[str, int] = {entry["name"]: entry["bytes"] for entry in model.plan["entries"]}
    row_bytes: int = _LOGIT_BYTES * model.facts["model"]["vocab"]
    sweep_tokens: int = model.plan["chunk"]
    return max(1, min(planned["workspace"] // (_BLOCKS * row_bytes), sweep_tokens))


def _within(progress: Progress, first: int, end: int, tokens: int) -> Progress:
    """Progress of the call that reads the tokens from `first` to `end`, in tokens of the text."""

    def report(layers_done: int, layers: int) -> None:
        progress(first + (end - first) * layers_done // layers, tokens)

    return report
