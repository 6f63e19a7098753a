"""Choosing the next token from logits.

The steps apply in a fixed order, each to what the one before left over:

1. The penalties change the logits of ids that occur in the text, in float64.
   `repetition_penalty` (Keskar et al. 2019, CTRL) divides a positive logit and multiplies
   a negative one. Then `presence_penalty` is subtracted once, and `frequency_penalty` once
   per occurrence (as in OpenAI's API).
2. `temperature` divides the logits; the softmax is taken in float64.
3. `top_k` keeps the `top_k` most likely tokens (0 keeps all).
4. `top_p` keeps the fewest most likely tokens whose probability, renormalised
   after step 3, reaches `top_p` (1 keeps all; 0 keeps one).
5. `min_p` drops tokens less likely than `min_p` times the most likely one.

Tokens of equal probability rank by id, the lowest first, so every cut is
defined. At least one token always remains.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from k3rs.exceptions import InputError, NumericalFault

__all__ = ["GREEDY_BELOW", "Occurrences", "Sampler", "require_logits"]

GREEDY_BELOW: Final = 1e-5
"""Smaller temperatures mean the largest logit: nothing else has a chance, except what
shares its value, between which a draw would decide."""

_SMALLEST_ABOVE_ZERO = math.ulp(0.0)


class Occurrences:
    """Which ids occur in a text so far, for the penalties of a `Sampler`.

    `repetition_penalty` counts the whole text, the prompt included, as in the paper.
    `presence_penalty` and `frequency_penalty` count generated ids alone, as OpenAI defines
    them: a subtraction per occurrence would otherwise forbid every common word of a long
    prompt.

    What it keeps, and what a penalty costs, grows with the distinct ids, not with the text.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        """Raises `InputError` if one of `prompt_ids` is not a whole number of at least 0."""
        self._text = {_token_id(token_id) for token_id in prompt_ids}
        self._generated: Counter[int] = Counter()

    def add(self, token_id: int) -> None:
        """Counts a generated id. Raises `InputError` as the constructor does."""
        checked = _token_id(token_id)
        self._text.add(checked)
        self._generated[checked] += 1

    def text_ids(self) -> NDArray[np.int64]:
        """The distinct ids of prompt and generated text, in no order."""
        return np.fromiter(self._text, np.int64, len(self._text))

    def generated_counts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The distinct generated ids, in no order, and how often each occurs."""
        size = len(self._generated)
        ids = np.fromiter(self._generated.keys(), np.int64, size)
        return ids, np.fromiter(self._generated.values(), np.int64, size)


class Sampler:
    """A way of choosing tokens, with its own random numbers.

    A temperature of zero (the default), or below `GREEDY_BELOW`, is greedy: the largest
    logit after the penalties, the lowest id among equals, whatever the filters say.
    Otherwise one uniform number is drawn per token from a PCG64 stream started from `seed`,
    so the same seed gives the same tokens wherever the logits are the same. `seed=None`
    starts from the operating system's entropy.

    The penalties are off by default. They may also favour what occurs already: a
    `repetition_penalty` between 0 and 1, the others below 0. A sampler remembers no text;
    the penalties see the `Occurrences` that each call is given.

    Raises `InputError` for a value out of range.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        *,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
    ) -> None:
        self.temperature: Final = _number_in_range("temperature", temperature, 0.0, math.inf)
        self.top_k: Final = _whole_number("top_k", top_k)
        self.top_p: Final = _number_in_range("top_p", top_p, 0.0, 1.0)
        self.min_p: Final = _number_in_range("min_p", min_p, 0.0, 1.0)
        self.seed: Final = None if seed is None else _whole_number("seed", seed)
        self.repetition_penalty: Final = _number_in_range(
            "repetition_penalty", repetition_penalty, _SMALLEST_ABOVE_ZERO, math.inf
        )
        self.presence_penalty: Final = _number_in_range(
            "presence_penalty", presence_penalty, -2.0, 2.0
        )
        self.frequency_penalty: Final = _number_in_range(
            "frequency_penalty", frequency_penalty, -2.0, 2.0
        )
        self._has_penalty = (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )
        self._random = np.random.Generator(np.random.PCG64(self.seed))

    def __repr__(self) -> str:
        return (
            f"Sampler(temperature={self.temperature}, top_k={self.top_k}, "
            f"top_p={self.top_p}, min_p={self.min_p}, seed={self.seed}, "
            f"repetition_penalty={self.repetition_penalty}, "
            f"presence_penalty={self.presence_penalty}, "
            f"frequency_penalty={self.frequency_penalty})"
        )

    def pick(
        self,
        logits: NDArray[np.float32],
        *,
        position: int | None = None,
        occurrences: Occurrences | None = None,
    ) -> int:
        """The id chosen from `logits`, a vector over the vocabulary, which is left as it is.

        `occurrences` is what the penalties count; without it the text is taken as empty.

        Raises `NumericalFault` if a logit is NaN or infinite; `position` only names the
        place there. Raises `InputError` if `logits` is not a vector, an id of `occurrences`
        is outside of it, or a penalty would make a logit infinite.
        """
        require_logits(logits, position)
        scores = self._penalised(logits, occurrences)
        if self.temperature < GREEDY_BELOW:
            return int(np.argmax(scores))  # the first, hence lowest, of equal maxima
        ids, probabilities = self._ranked(scores)
        cumulative = np.cumsum(probabilities)
        total = cumulative[-1]
        drawn = self._random.random() * total
        # Rounding can put `drawn` on the total itself: that point belongs to the
        # last token whose probability is above zero.
        last = int(np.searchsorted(cumulative, total, side="left"))
        return int(ids[min(int(np.searchsorted(cumulative, drawn, side="right")), last)])

    def probabilities(
        self, logits: NDArray[np.float32], *, occurrences: Occurrences | None = None
    ) -> NDArray[np.float64]:
        """The distribution that `pick` draws from, over the whole vocabulary.

        Raises what `pick` raises.
        """
        require_logits(logits, None)
        scores = self._penalised(logits, occurrences)
        result = np.zeros(len(logits), dtype=np.float64)
        if self.temperature < GREEDY_BELOW:
            result[int(np.argmax(scores))] = 1.0
            return result
        ids, probabilities = self._ranked(scores)
        result[ids] = probabilities / probabilities.sum()
        return result

    def _penalised(
        self, logits: NDArray[np.float32], occurrences: Occurrences | None
    ) -> NDArray[np.floating[Any]]:
        """`logits` after the penalties: themselves where none is on, otherwise float64."""
        if occurrences is None or not self._has_penalty:
            return logits
        ids = occurrences.text_ids()
        _require_in_vocabulary(ids, len(logits))
        scores = logits.astype(np.float64)
        penalty = self.repetition_penalty
        # Both ways are computed for every id; only the one that is chosen has to be finite.
        with np.errstate(over="ignore"):
            repeated = np.where(scores[ids] > 0, scores[ids] / penalty, scores[ids] * penalty)
        infinite = ids[~np.isfinite(repeated)]
        if infinite.size:
            raise InputError(
                f"expected a repetition_penalty that leaves every logit finite, found {penalty}, "
                f"which makes {logits[infinite[0]]} of id {infinite[0]} infinite",
                hint="1 switches it off; the paper uses 1.2",
            )
        scores[ids] = repeated
        generated, counts = occurrences.generated_counts()
        scores[generated] -= self.presence_penalty + self.frequency_penalty * counts
        return scores

    def _ranked(
        self, logits: NDArray[np.floating[Any]]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
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


def require_logits(logits: NDArray[np.float32], position: int | None) -> None:
    """Raises unless `logits` is a vector of at least one logit, all of them finite.

    That is `InputError` for the shape and `NumericalFault` for a value; `position`, if it
    is known, names the place.
    """
    place = "" if position is None else f" at position {position}"
    if logits.ndim != 1 or logits.size == 0:
        raise InputError(
            f"expected the logits of one position, a vector{place}, found shape {logits.shape}",
            hint="of the logits of several positions, give one row",
        )
    finite = np.isfinite(logits)
    if finite.all():
        return
    token_id = int(np.argmin(finite))
    raise NumericalFault(
        f"numerical fault: expected finite logits{place}, found {logits[token_id]} for id "
        f"{token_id} ({int(np.sum(~finite))} of {len(logits)} are not finite)",
        hint="the weights are damaged or the model is not what its config says; compare the "
        "files with their published checksums",
    )


def _require_in_vocabulary(ids: NDArray[np.int64], size: int) -> None:
    if ids.size and ids.max() >= size:
        raise InputError(
            f"expected occurrences of ids in 0..{size - 1}, found {ids.max()}",
            hint="ids belong to one vocabulary; were these made for another model?",
        )


def _number_in_range(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number) and low <= number <= high:
        return number
    if high < math.inf:
        wanted = f"from {low:g} to {high:g}"
    elif low > 0:
        wanted = "a finite number above 0"
    else:
        wanted = "a finite number of at least 0"
    raise InputError(
        f"expected {name} to be {wanted}, found {value!r}",
        hint="a temperature of 0 is greedy; top_k=0, top_p=1 and min_p=0 switch a filter off, "
        "repetition_penalty=1, presence_penalty=0 and frequency_penalty=0 a penalty",
    )


def _whole_number(name: str, value: Any) -> int:
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 0:
        return int(value)
    raise InputError(
        f"expected {name} to be a whole number of at least 0, found {value!r}",
        hint="leave it out for the default",
    )


def _token_id(value: Any) -> int:
    # What an int64 cannot hold is in no vocabulary.
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < 2**63:
        return int(value)
    raise InputError(
        f"expected a token id, a whole number of at least 0, found {value!r}",
        hint="ids are what `Tokenizer.encode` returns",
    )
