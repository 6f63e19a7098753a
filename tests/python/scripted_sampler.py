"""A model that writes what a test wants: the engine is real, its choices are not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import k3rs


class Scripted(k3rs.Sampler):
    """Writes given ids, and keeps the logits that it was to choose from, float32 [vocab] each."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__()
        self.ids = list(ids)
        self.seen: list[NDArray[np.float32]] = []

    def pick(self, logits: NDArray[np.float32], **_more: Any) -> int:
        self.seen.append(logits.copy())
        return self.ids[len(self.seen) - 1]
