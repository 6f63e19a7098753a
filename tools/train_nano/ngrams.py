"""Losses of n-gram models: what counting alone achieves on the same tokens.

Interpolated Kneser-Ney with one discount for each order, estimated from the counts of counts. The
lowest order is a continuation count, mixed with the uniform distribution over the ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Context = tuple[int, ...]


class KneserNey:
    """An n-gram model of the order given."""

    def __init__(self, ids: Sequence[int], order: int, vocabulary_size: int) -> None:
        self.order = order
        self.vocabulary_size = vocabulary_size
        #: By length of the context: what followed it how often (shorter ones: after how many
        #: different tokens in front), and for each context the sum and the number of followers.
        self.counts: list[Counter[Context]] = [Counter() for _ in range(order)]
        highest = self.counts[-1]
        for end in range(order, len(ids) + 1):
            highest[tuple(ids[end - order : end])] += 1
        for length in range(order - 1, 0, -1):
            self.counts[length - 1].update(gram[1:] for gram in self.counts[length])
        self.discounts = []
        self.sums: list[defaultdict[Context, list[int]]] = []
        for counts in self.counts:
            frequencies = Counter(counts.values())
            once, twice = frequencies[1], frequencies[2]
            self.discounts.append(once / (once + 2 * twice) if once and twice else 0.5)
            sums: defaultdict[Context, list[int]] = defaultdict(lambda: [0, 0])
            for gram, count in counts.items():
                entry = sums[gram[:-1]]
                entry[0] += count
                entry[1] += 1
            self.sums.append(sums)

    def probability(self, context: Context, token: int) -> float:
        """The probability of `token` after the last tokens of `context`."""
        result = 1.0 / self.vocabulary_size
        for length in range(min(len(context), self.order - 1) + 1):
            history = context[len(context) - length :]
            entry = self.sums[length].get(history)
            if entry is None:
                break
            total, followers = entry
            discount = self.discounts[length]
            count = self.counts[length].get((*history, token), 0)
            result = (max(count - discount, 0.0) + discount * followers * result) / total
        return result

    def losses(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """Negative log-likelihood of every token of `ids` but the first."""
        probabilities = [
            self.probability(tuple(ids[max(0, end - self.order + 1) : end]), ids[end])
            for end in range(1, len(ids))
        ]
        return np.asarray(-np.log(np.asarray(probabilities)))
