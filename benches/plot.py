"""Draws what a dated record holds: a token's time over the budget and over the text before it.

    python benches/plot.py benches/record/DATE.json DIRECTORY

Writes `budget.svg` and `context.svg` to DIRECTORY. Needs the extra `plot`.
"""

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("record", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text(encoding="utf-8"))
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("svg")
    # The same file for the same figures.
    matplotlib.rcParams["svg.hashsalt"] = "k3rs"
    arguments.directory.mkdir(parents=True, exist_ok=True)
    draw_budgets(record["streaming"]["runs"], arguments.directory / "budget.svg")
    draw_context(record["context"], arguments.directory / "context.svg")


def draw_budgets(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Seconds a token, and the two times that bound it, over the budget."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    direct = [run for run in runs.values() if run["direct"]]
    budgets = [run["budget_bytes"] / 1e9 for run in direct]
    measured = [run["seconds_per_token"] for run in direct]
    axes.plot(budgets, measured, marker="o", label="measured")
    disk = [run["read_seconds"] for run in direct]
    axes.plot(budgets, disk, linestyle="--", label="bytes read / device bandwidth")
    resident = min(measured)
    axes.axhline(resident, linestyle=":", color="gray", label="all in memory")
    axes.set(xlabel="memory budget, GB", ylabel="seconds a token", ylim=(0, None))
    axes.legend()
    save(figure, path)


def draw_context(points: Sequence[Mapping[str, float]], path: Path) -> None:
    """Seconds of a token's attention, and bytes of the latent cache, over the text before it."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    positions = [point["position"] for point in points]
    for key, label in (("kda_seconds", "69 KDA layers"), ("mla_seconds", "24 MLA layers")):
        axes.plot(positions, [point[key] for point in points], marker="o", label=label)
    axes.set(xlabel="tokens before", ylabel="seconds a token", ylim=(0, None))
    cache = axes.twinx()
    megabytes = [point["cache_bytes"] / 1e6 for point in points]
    cache.plot(positions, megabytes, linestyle="--", color="gray", label="latent cache")
    cache.set(ylabel="latent cache, MB", ylim=(0, None))
    lines = [*axes.get_lines(), *cache.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines])
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Without a date, so that only figures change the file."""
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
