"""Attention residuals: a running sum that starts anew at every block.

In an ordinary transformer every layer adds to one sum, which only grows. In Kimi K3 the sum
is put aside at each block boundary and starts anew; a layer reads a softmax mix of all that
was put aside and the sum so far. So after the first layer of a block the sum has only what
that layer added, and points elsewhere than before.

    python examples/residuals.py [MODEL] [--picture PATH]
"""

import sys
from pathlib import Path

import numpy as np
from _shared import SENTENCE, arguments, canvas, encode, save
from numpy.typing import NDArray

import k3rs


def main() -> int:
    """Prints the length of the running sum after each layer, and how far it turned."""
    given = arguments(__doc__)
    with k3rs.Model.open(given.model, memory="1GB", positions=1024) as model:
        ids = encode(model, SENTENCE)
        _, seen = model.session().forward(ids, capture=("hidden",))
        kinds = [layer["attention"] for layer in model.config["layers"]]
        block: int | None = model.config["residual_block"]
    if block is None:
        print("this model has the ordinary residual stream: one block")

    # [layers, tokens, hidden]: the running sum after each layer.
    hidden = seen["hidden"].astype(np.float64)
    norms = np.linalg.norm(hidden, axis=2)
    # The cosine of the angle between the sums after a layer and after the one before.
    cosines = (hidden[1:] * hidden[:-1]).sum(axis=2) / (norms[1:] * norms[:-1])
    starts = [layer for layer in range(len(kinds)) if layer % (block or len(kinds)) == 0]

    print(f"means over {len(ids)} tokens; layers counted from 1")
    print("layer   attention   norm of the sum   likeness to the layer before")
    for layer, kind in enumerate(kinds):
        likeness = f"{cosines[layer - 1].mean():.3f}" if layer else "-"
        note = "   the sum starts anew" if layer in starts else ""
        print(f"{layer + 1:5d} {kind:>11} {norms[layer].mean():17.3f} {likeness:>30}{note}")

    if given.picture:
        draw(norms, cosines, starts, given.picture)
    return 0


def draw(
    norms: NDArray[np.float64], cosines: NDArray[np.float64], starts: list[int], path: Path
) -> None:
    """Norm and likeness over the layers: a thin line for each token, a thick one for the mean."""
    figure, axes = canvas(2, 1, width=8, height=7)
    layers = np.arange(1, len(norms) + 1)
    for axis, over, values, meaning in (
        (axes[0, 0], layers, norms, "norm of the running sum"),
        (axes[1, 0], layers[1:], cosines, "cosine to the layer before"),
    ):
        axis.plot(over, values, color="tab:blue", alpha=0.25, linewidth=0.8)
        axis.plot(over, values.mean(axis=1), color="tab:blue", marker="o", label="mean")
        for start in starts:
            label = "a block begins" if start == 0 else None
            axis.axvline(start + 0.5, color="tab:red", linestyle="--", label=label)
        axis.set(xlabel="after layer", ylabel=meaning, xticks=layers)
    axes[0, 0].set(title="Attention residuals: the sum starts anew at every block", ylim=(0, None))
    axes[0, 0].legend(loc="lower right")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
