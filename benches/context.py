"""How a token's cost grows with the text before it.

Makes a narrow model whose attention has the released sizes (96 heads, latent 512 + 64, KDA
state 128 x 128), so that a token's time is almost all attention, and measures single tokens
behind texts of growing length. A KDA layer costs the same everywhere, an MLA layer reads
its cache; both are printed for the released number of layers.

    python benches/context.py DIRECTORY [--positions 16,1024,4096] [--json PATH]

The checkpoint (a few MB) is left in DIRECTORY. `benches/plot.py` draws the result.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import k3rs

KDA_LAYERS, MLA_LAYERS = 69, 24
REPETITIONS = 9
NARROW = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 32,
    "num_experts": 16,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "q_lora_rank": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--positions", default="16,256,1024,2048,4096")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    positions = [int(word) for word in arguments.positions.split(",")]

    kda_only = make(arguments.directory / "kda", layers=3)
    with_mla = make(arguments.directory / "mla", layers=4)
    kda = seconds_at(kda_only, positions)
    both = seconds_at(with_mla, positions)
    points = [
        {
            "position": position,
            "kda_seconds": kda[position] / 3 * KDA_LAYERS,
            "mla_seconds": max(0.0, both[position] - kda[position]) * MLA_LAYERS,
            "cache_bytes": cache_bytes(with_mla, position) * MLA_LAYERS,
        }
        for position in positions
    ]
    print(f"position   {KDA_LAYERS} KDA layers   {MLA_LAYERS} MLA layers   latent cache")
    for point in points:
        print(
            f"{point['position']:8d} {point['kda_seconds']:12.3f} s {point['mla_seconds']:12.3f} s"
            f" {point['cache_bytes'] / 1e6:11.1f} MB"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(points, indent=2) + "\n", encoding="utf-8")


def make(directory: Path, layers: int) -> Path:
    """The first layers of the release (three KDA, then one MLA), narrow."""
    if not (directory / "config.json").exists():
        source = directory.parent / "release"
        if not source.exists():
            k3rs.synthesize(source, layers=4, sparse=True)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["text_config"].update(NARROW)
        narrow = directory.parent / f"{directory.name}.json"
        narrow.write_text(json.dumps(config), encoding="utf-8")
        k3rs.synthesize(directory, config=narrow, layers=layers, vocab=1024, seed=1)
    return directory


def seconds_at(directory: Path, positions: list[int]) -> dict[int, float]:
    """Median seconds of one token behind texts of these lengths, everything resident."""
    longest = max(positions) + REPETITIONS
    seconds = {}
    with k3rs.Model.open(directory, memory="4GB", positions=longest) as model:
        session = model.session()
        for position in sorted(positions):
            session.forward([7] * (position - session.position))
            times = []
            for _ in range(REPETITIONS):
                started = time.perf_counter()
                session.forward([7])
                times.append(time.perf_counter() - started)
            seconds[position] = statistics.median(times)
    return seconds


def cache_bytes(directory: Path, positions: int) -> int:
    """What the plan sets aside for the latent cache."""
    entries = k3rs.plan(directory, positions=positions)["plan"]["entries"]
    return int(next(entry["bytes"] for entry in entries if entry["name"] == "latent cache"))


if __name__ == "__main__":
    main()
