"""Routing: which experts wake for which tokens.

A layer of Kimi K3 has many small feed-forward networks, the experts, and a router that
wakes a few of them for each token. What sleeps is neither read nor multiplied; therefore a
model far larger than memory can run at all.

    python examples/routing.py [MODEL] [--picture PATH]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _shared import PASSAGE, SENTENCE, arguments, canvas, encode, save, shown
from numpy.typing import NDArray

import k3rs


@dataclass(frozen=True)
class HeatMap:
    """Rows of values, one value for each expert."""

    values: NDArray[np.float64]
    rows: Sequence[object]
    title: str
    meaning: str


def main() -> int:
    """Prints how busy the experts are, and who wakes for a sentence."""
    given = arguments(__doc__)
    with k3rs.Model.open(given.model, memory="1GB", positions=1024) as model:
        kinds = [layer["feed_forward"] for layer in model.config["layers"]]
        # Counted from 1, as in the config.
        layers = [number for number, kind in enumerate(kinds, start=1) if kind == "experts"]
        experts: int = model.config["moe"]["experts"]

        # Of each layer with experts: who woke, and with what weight, both [tokens, awake].
        passage = encode(model, PASSAGE)
        _, seen = model.session().forward(passage, capture=("router",))
        how_often = np.array([share_of_tokens(chosen, experts) for chosen, _ in seen["router"]])

        sentence = encode(model, SENTENCE)
        _, seen = model.session().forward(sentence, capture=("router",))
        middle = len(layers) // 2
        chosen, weights = seen["router"][middle]
        tokens = [shown(model, token_id) for token_id in sentence]

    print(f"{len(passage)} tokens, {experts} experts in each layer")
    print("layer   awake for a token   never awake   busiest   its share of the tokens")
    for layer, shares in zip(layers, how_often, strict=True):
        busiest = int(shares.argmax())
        print(
            f"{layer:5d} {shares.sum():19.2f} {np.count_nonzero(shares == 0):13d} {busiest:9d}"
            f" {shares[busiest]:25.1%}"
        )

    print(f"\nexperts of layer {layers[middle]} and their weights, token by token")
    width = max(map(len, tokens))
    for token, awake, weight in zip(tokens, chosen, weights, strict=True):
        heaviest_first = np.argsort(-weight)
        choices = "".join(f"{awake[i]:6d} ({weight[i]:.2f})" for i in heaviest_first)
        print(f"{token:>{width}}{choices}")

    if given.picture:
        who = np.zeros((len(tokens), experts))
        np.put_along_axis(who, chosen.astype(np.int64), weights, axis=1)
        name = f"Who wakes in layer {layers[middle]} for a sentence"
        maps = (
            HeatMap(how_often, layers, "How often an expert wakes", "share of the tokens"),
            HeatMap(who, tokens, name, "weight"),
        )
        draw(maps, given.picture)
    return 0


def share_of_tokens(chosen: NDArray[np.int32], experts: int) -> NDArray[np.float64]:
    """For each expert of a layer the share of the tokens that woke it."""
    return np.bincount(chosen.ravel(), minlength=experts) / len(chosen)


def draw(maps: Sequence[HeatMap], path: Path) -> None:
    """The maps, one below the other."""
    figure, axes = canvas(len(maps), 1, width=10, height=4 * len(maps))
    for axis, drawn in zip(axes[:, 0], maps, strict=True):
        image = axis.imshow(drawn.values, aspect="auto", cmap="magma_r", vmin=0)
        axis.set(title=drawn.title, xlabel="expert of the layer")
        axis.set_yticks(range(len(drawn.rows)), drawn.rows)
        figure.colorbar(image, ax=axis, label=drawn.meaning)
    axes[0, 0].set_ylabel("layer")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
