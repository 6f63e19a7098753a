"""Choosing the next token from logits.

The filters apply in a fixed order, each to what the one before left over:

1. `temperature` divides the logits; the softmax is taken in float64.
2. `top_k` keeps the `top_k` most likely tokens (0 keeps all).
3. `top_p` keeps the fewest most likely tokens whose probability, renormalised
   after step 2, reaches `top_p` (1 keeps all; 0 keeps one).
4. `min_p` drops tokens less likely than `min_p` times the most likely one.

Tokens of equal probability rank by id, the lowest first, so every cut is
defined. At least one token always remains.
"""

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k3rs.exceptions import InputError, NumericalFault

__all__ = ["Sampler"]


class Sampler:
    """A way of choosing tokens, with its own random numbers.

    A temperature of zero (the default) is greedy: the largest logit, the lowest
    id among equals, whatever the filters say. Otherwise one uniform number is
    drawn per token from a PCG64 stream started from `seed`, so the same seed
    gives the same tokens wherever the logits are the same. `seed=None` starts
    from the operating system's entropy.

    Raises `InputError` for a value out of range.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self.temperature: Final = _number_in_range("temperature", temperature, 0.0, math.inf)
        self.top_k: Final = _whole_number("top_k", top_k)
        self.top_p: Final = _number_in_range("top_p", top_p, 0.0, 1.0)
        self.min_p: Final = _number_in_range("min_p", min_p, 0.0, 1.0)
        self.seed: Final = None if seed is None else _whole_number("seed", seed)
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def __repr__(self) -> str:
        return (
            f"Sampler(temperature={self.temperature}, top_k={self.top_k}, "
            f"top_p={self.top_p}, min_p={self.min_p}, seed={self.seed})"
        )

    def pick(self, logits: NDArray[np.float32], *, position: int | None = None) -> int:
        """The id chosen from `logits`, a vector over the vocabulary.

        `position` only names the place in the `NumericalFault` that is raised
        when a logit is NaN or infinite.
        """
        _require_finite(logits, position)
        if self.temperature == 0.0:
            return int(np.argmax(logits))  # the first, hence lowest, of equal maxima
        ids, probabilities = self._ranked(logits)
        cumulative = np.cumsum(probabilities)
        total = cumulative[-1]
        drawn = self._random.random() * total
        # Rounding can put `drawn` on the total itself: that point belongs to the
        # last token whose probability is above zero.
        last = int(np.searchsorted(cumulative, total, side="left"))
        return int(ids[min(int(np.searchsorted(cumulative, drawn, side="right")), last)])

    def probabilities(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The distribution that `pick` draws from, over the whole vocabulary."""
        _require_finite(logits, None)
        result = np.zeros(len(logits), dtype=np.float64)
        if self.temperature == 0.0:
            result[int(np.argmax(logits))] = 1.0
            return result
        ids, probabilities = self._ranked(logits)
        result[ids] = probabilities / probabilities.sum()
        return result

    def _ranked(self, logits: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Surviving ids, most likely first, and their probabilities (not renormalised)."""
        ids: NDArray[np.int64] = np.argsort(-logits, kind="stable").astype(np.int64)
        if self.top_k:
            ids = ids[: self.top_k]
        kept = logits[ids].astype(np.float64)
        # A tiny temperature overflows to minus infinity, which is probability zero.
        with np.errstate(over="ignore"):
            probabilities = np.exp((kept - kept[0]) / self.temperature)
        probabilities /= probabilities.sum()
        count = len(ids)
        if self.top_p < 1.0:
            reached = int(np.searchsorted(np.cumsum(probabilities), self.top_p, side="left"))
            count = min(reached + 1, count)
        if self.min_p > 0.0:
            count = min(count, int(np.sum(probabilities >= self.min_p * probabilities[0])))
        return ids[:count], probabilities[:count]


def _require_finite(logits: NDArray[np.float32], position: int | None) -> None:
    finite = np.isfinite(logits)
    if finite.all():
        return
    token_id = int(np.argmin(finite))
    place = "" if position is None else f" at position {position}"
    raise NumericalFault(
        f"numerical fault: expected finite logits{place}, found {logits[token_id]} for id "
        f"{token_id} ({int(np.sum(~finite))} of {len(logits)} are not finite)",
        hint="the weights are damaged or the model is not what its config says; compare the "
        "files with their published checksums",
    )


def _number_in_range(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and low <= number <= high:
        return number
    wanted = "a finite number of at least 0" if high == math.inf else f"from {low:g} to {high:g}"
    raise InputError(
        f"expected {name} to be {wanted}, found {value!r}",
        hint="a temperature of 0 is greedy; top_k=0, top_p=1 and min_p=0 switch a filter off",
    )


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0:
        return int(value)
    raise InputError(
        f"expected {name} to be a whole number of at least 0, found {value!r}",
        hint="leave it out for the default",
    )
