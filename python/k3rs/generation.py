"""The decode loop: from prompt ids to a stream of tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from k3rs.log_probabilities import LogProbabilities, log_probabilities
from k3rs.sampling import Occurrences, Sampler
from k3rs.stop_strings import StopStrings
from k3rs.text_stream import TextStream
from k3rs.tokenizer import Tokenizer

__all__ = ["GenerationOptions", "StopReason", "Text", "Token", "decode"]

StopReason: TypeAlias = Literal["length", "stop", "stop_string"]
"""Why generation ended: the number of tokens, an end token, or a stop string."""


class Text(Protocol):
    """What is being continued."""

    @property
    def ids(self) -> list[int]:
        """All of it, which may be more than was given here."""

    def append(self, ids: Sequence[int]) -> None:
        """Adds ids at the end."""

    def logits(self) -> NDArray[np.float32]:
        """The logits after the last id, float32 [vocab]; this is where time goes."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int
    text: str
    """What this token adds to the text. Empty while a character is incomplete, for
    an end token, and without a tokenizer; pieces joined give the whole text."""
    seconds: float
    """Time of its step; the first token's includes reading the prompt."""
    stop_reason: StopReason | None = None
    """Set on the last token."""
    logprobs: LogProbabilities | None = None
    """How likely the model held this token and the most likely ones, if asked for."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate, resolved against a model."""

    max_tokens: int
    sampler: Sampler
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Alternatives to report the log-probabilities of, beside the chosen token's."""
    on_logits: Callable[[NDArray[np.float32]], None] | None = None


class _Decoded:
    """Token ids to text, through both holds: partial characters and stop strings."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stop = StopStrings(stop)

    @property
    def stopped(self) -> bool:
        return self._stop.matched

    def push(self, token_id: int) -> str:
        return "" if self._stream is None else self._stop.push(self._stream.push(token_id))

    def finish(self) -> str:
        """What is still held back."""
        if self._stream is None:
            return ""
        rest = self._stop.push(self._stream.finish())
        return rest + self._stop.finish()


def decode(
    text: Text, prompt_ids: Sequence[int], tokenizer: Tokenizer | None, options: GenerationOptions
) -> Iterator[Token]:
    """Continues `text` after `prompt_ids`: an iterator, each token computed when asked for.

    Every token yielded is already a part of `text`, which may therefore go on from
    where the iterator was left. An end token is yielded, without text of its own.

    Raises `NumericalFault` instead of a token when the logits are not finite.
    """
    decoded = _Decoded(tokenizer, options.stop)
    return _steps(text, prompt_ids, decoded, options)


def _steps(
    text: Text, prompt_ids: Sequence[int], decoded: _Decoded, options: GenerationOptions
) -> Iterator[Token]:
    if prompt_ids:
        text.append(prompt_ids)
    ids = text.ids
    position = len(ids) - 1
    occurrences = Occurrences(ids)
    for step in range(1, options.max_tokens + 1):
        started = time.perf_counter()
        logits = text.logits()
        token_id = options.sampler.pick(logits, position=position, occurrences=occurrences)
        if options.on_logits is not None:
            options.on_logits(logits)
        logprobs = None
        if options.logprobs is not None:
            logprobs = log_probabilities(logits, token_id, options.logprobs, position=position)
        text.append([token_id])
        occurrences.add(token_id)
        position += 1
        reason: StopReason | None = None
        piece = ""
        if token_id in options.stop_ids:
            reason = "stop"
        else:
            piece = decoded.push(token_id)
            if decoded.stopped:
                reason = "stop_string"
            elif step == options.max_tokens:
                reason = "length"
        if reason is not None:
            piece += decoded.finish()
            if decoded.stopped:
                reason = "stop_string"
        yield Token(token_id, piece, time.perf_counter() - started, reason, logprobs)
        if reason is not None:
            return
