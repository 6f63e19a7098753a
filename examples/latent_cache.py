"""The latent cache: what a long context costs in memory.

A KDA layer keeps one matrix per head, however long the text. An MLA layer keeps, for each
position, one short latent vector which all heads share, where ordinary attention keeps a
key and a value of every head. The bytes of the given model are those of its memory plan,
from which the engine allocates; those of Kimi K3 are computed from its published config by
the same formulas, which have to give the planned bytes first.

    python examples/latent_cache.py [MODEL] [--picture PATH]
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _shared import arguments, canvas, save

import k3rs
from k3rs.sizes import format_size

POSITIONS = [2**power for power in range(8, 21, 2)]
FLOAT_BYTES = 4
ANY_BUDGET = k3rs.MemoryRequest(memory_bytes=2**50)


@dataclass(frozen=True)
class Attention:
    """The sizes on which the memory of a context depends."""

    kda_layers: int
    kda_heads: int
    kda_width: int
    convolution_taps: int
    mla_layers: int
    mla_heads: int
    latent_width: int
    """The latent and the part of the key that is shared by all heads."""
    key_width: int
    value_width: int

    @property
    def state_bytes(self) -> int:
        """A matrix per KDA head, and the last inputs of the convolutions of q, k and v."""
        matrix = self.kda_width * self.kda_width
        recent = 3 * (self.convolution_taps - 1) * self.kda_width
        return self.kda_layers * self.kda_heads * (matrix + recent) * FLOAT_BYTES

    def latent_bytes(self, positions: int) -> int:
        """The latent cache of the MLA layers."""
        return self.mla_layers * positions * self.latent_width * FLOAT_BYTES

    def expanded_bytes(self, positions: int, layers: int) -> int:
        """Keys and values of every head in `layers` layers, as ordinary attention keeps them."""
        width = self.mla_heads * (self.key_width + self.value_width)
        return layers * positions * width * FLOAT_BYTES


KIMI_K3 = Attention(
    kda_layers=69,
    kda_heads=96,
    kda_width=128,
    convolution_taps=4,
    mla_layers=24,
    mla_heads=96,
    latent_width=512 + 64,
    key_width=128 + 64,
    value_width=128,
)


def main() -> int:
    """Prints bytes over positions for the model and for Kimi K3; 1 if a formula is wrong."""
    given = arguments(__doc__)
    small = attention_of(k3rs.inspect(given.model)["config"])

    planned = {}
    for positions in POSITIONS:
        plan = k3rs.plan(given.model, ANY_BUDGET, positions=positions)["plan"]
        entries = {entry["name"]: entry["bytes"] for entry in plan["entries"]}
        planned[positions] = (entries["recurrent state"], entries["latent cache"])
    computed = {
        positions: (small.state_bytes, small.latent_bytes(positions)) for positions in POSITIONS
    }

    print_table("the model (state and latent cache as planned, the rest computed)", small, planned)
    print()
    print_table("Kimi K3 (all computed)", KIMI_K3)
    if computed != planned:
        print(f"error: expected the planned {planned}, computed {computed}", file=sys.stderr)
        return 1
    print("\nthe formulas give the planned bytes of the model at every length")
    if given.picture:
        draw(small, planned, given.picture)
    return 0


def attention_of(config: Mapping[str, Any]) -> Attention:
    """The sizes in the facts about a config."""
    kinds = [layer["attention"] for layer in config["layers"]]
    kda, mla = config["kda"], config["mla"]
    return Attention(
        kda_layers=kinds.count("kda"),
        kda_heads=kda["heads"],
        kda_width=kda["head_dim"],
        convolution_taps=kda["conv_taps"],
        mla_layers=kinds.count("mla"),
        mla_heads=mla["heads"],
        latent_width=mla["latent_dim"] + mla["rope_dim"],
        key_width=mla["nope_dim"] + mla["rope_dim"],
        value_width=mla["value_dim"],
    )


def print_table(
    title: str, sizes: Attention, planned: Mapping[int, tuple[int, int]] | None = None
) -> None:
    """A line for each length of text."""
    all_layers = sizes.kda_layers + sizes.mla_layers
    print(title)
    print(
        "positions   KDA state   latent cache"
        f"   keys and values, {sizes.mla_layers} MLA layers   ... all {all_layers} layers"
    )
    for positions in POSITIONS:
        state, latent = (
            planned[positions] if planned else (sizes.state_bytes, sizes.latent_bytes(positions))
        )
        expanded = sizes.expanded_bytes(positions, sizes.mla_layers)
        everywhere = sizes.expanded_bytes(positions, all_layers)
        print(
            f"{positions:9d} {format_size(state):>11} {format_size(latent):>14}"
            f" {format_size(expanded):>31} {format_size(everywhere):>19}"
        )


def draw(small: Attention, planned: Mapping[int, tuple[int, int]], path: Path) -> None:
    """Bytes over positions, both axes logarithmic; lines are computed, crosses planned."""
    figure, axes = canvas(1, 2, width=11, height=4.8)
    axes[0, 0].set_title("The given model (lines computed, crosses planned)")
    axes[0, 1].set_title("Kimi K3 (computed)")
    for axis, sizes in zip(axes[0], (small, KIMI_K3), strict=True):
        mla, layers = sizes.mla_layers, sizes.kda_layers + sizes.mla_layers
        for label, values in (
            (f"keys and values, all {layers} layers", curve(sizes.expanded_bytes, layers)),
            (f"keys and values, {mla} MLA layers", curve(sizes.expanded_bytes, mla)),
            (f"latent cache, {mla} MLA layers", curve(sizes.latent_bytes)),
            (f"state, {sizes.kda_layers} KDA layers", [sizes.state_bytes] * len(POSITIONS)),
        ):
            axis.loglog(POSITIONS, values, label=label)
        axis.set(xlabel="positions", ylabel="bytes")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    axes[0, 0].loglog(POSITIONS, [planned[positions] for positions in POSITIONS], "kx")
    save(figure, path)


def curve(bytes_at: Callable[..., int], *layers: int) -> list[int]:
    """What `bytes_at` gives at every length."""
    return [bytes_at(positions, *layers) for positions in POSITIONS]


if __name__ == "__main__":
    sys.exit(main())
