"""How likely the model held the chosen token, and which others it held most likely.

This is the model's own opinion: the softmax of the raw logits over the whole vocabulary,
before any penalty, temperature or filter of a `Sampler`. So the numbers do not depend on
how the token was chosen. Logarithms are natural, arithmetic is float64.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from k3rs.exceptions import InputError
from k3rs.sampling import require_logits

__all__ = ["LogProbabilities", "log_probabilities", "log_softmax"]


@dataclass(frozen=True, slots=True)
class LogProbabilities:
    """Log-probabilities of one step."""

    chosen: float
    """That of the chosen token: 0 is certain, less is less likely."""
    top: tuple[tuple[int, float], ...]
    """Ids with their log-probabilities: the largest logits first, the lowest id at a tie."""


def log_probabilities(
    logits: NDArray[np.float32], chosen_id: int, count: int, *, position: int | None = None
) -> LogProbabilities:
    """The log-probabilities of `chosen_id` and of the `count` most likely ids.

    `logits` is a vector over the vocabulary. A `count` above its length gives all ids. The
    chosen id is among them only if it is that likely.

    Raises `NumericalFault`, which names `position`, if a logit is NaN or infinite, and
    `InputError` if `logits` is not a vector, `chosen_id` is outside of it or `count` is
    below 0.
    """
    require_logits(logits, position)
    if not 0 <= chosen_id < len(logits):
        raise InputError(
            f"expected the chosen id in 0..{len(logits) - 1}, found {chosen_id}",
            hint="ids belong to one vocabulary; was this made for another model?",
        )
    if count < 0:
        raise InputError(
            f"expected a count of log-probabilities of at least 0, found {count}",
            hint="0 gives that of the chosen token alone",
        )
    values = log_softmax(logits)
    top = tuple((int(token_id), float(values[token_id])) for token_id in _largest(logits, count))
    return LogProbabilities(float(values[chosen_id]), top)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The logarithm of the softmax of a vector of finite logits, in float64."""
    # Behind the largest: no exponential overflows, and one of them is exactly 1.
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` largest logits, in order; the lowest id first at a tie.

    Logits are compared, not log-probabilities, in which different logits may round to one:
    the first id is always the greedy one.
    """
    if count == 0:
        return np.empty(0, dtype=np.int64)
    candidates = np.arange(len(logits), dtype=np.int64)
    if count < len(logits):
        # Sorting only what reaches the last place: the vocabulary is large, `count` small.
        last_place = np.partition(logits, -count)[-count]
        candidates = np.flatnonzero(logits >= last_place)
    order = np.argsort(-logits[candidates], kind="stable")
    return candidates[order[:count]]
