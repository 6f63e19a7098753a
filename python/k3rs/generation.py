"""The decode loop: from prompt ids to a stream of tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from k3rs.sampling import Sampler
from k3rs.stop_strings import StopStrings
from k3rs.text_stream import TextStream
from k3rs.tokenizer import Tokenizer

__all__ = ["Forward", "GenerationOptions", "StopReason", "Token", "decode"]

Forward: TypeAlias = Callable[[Sequence[int]], NDArray[np.float32]]
"""Feeds ids and returns the logits after the last of them."""

StopReason: TypeAlias = Literal["length", "stop", "stop_string"]
"""Why generation ended: the number of tokens, an end token, or a stop string."""


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


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate, resolved against a model."""

    max_tokens: int
    sampler: Sampler
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    on_logits: Callable[[NDArray[np.float32]], None] | None = None


class _Text:
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
    forward: Forward,
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    options: GenerationOptions,
    *,
    first_position: int = 0,
) -> Iterator[Token]:
    """An iterator over tokens, each computed only when it is asked for.

    `first_position` is where the prompt starts in the session. The last token
    yielded has not been fed to `forward`. An end token is yielded, without text.

    Raises `NumericalFault` instead of a token when the logits are not finite.
    """
    return _steps(forward, prompt_ids, _Text(tokenizer, options.stop), options, first_position)


def _steps(
    forward: Forward,
    prompt_ids: Sequence[int],
    text: _Text,
    options: GenerationOptions,
    first_position: int,
) -> Iterator[Token]:
    ids = prompt_ids
    position = first_position - 1
    for step in range(1, options.max_tokens + 1):
        started = time.perf_counter()
        logits = forward(ids)
        position += len(ids)
        token_id = options.sampler.pick(logits, position=position)
        if options.on_logits is not None:
            options.on_logits(logits)
        reason: StopReason | None = None
        piece = ""
        if token_id in options.stop_ids:
            reason = "stop"
        else:
            piece = text.push(token_id)
            if text.stopped:
                reason = "stop_string"
            elif step == options.max_tokens:
                reason = "length"
        if reason is not None:
            piece += text.finish()
        yield Token(token_id, piece, time.perf_counter() - started, reason)
        if reason is not None:
            return
        ids = [token_id]
