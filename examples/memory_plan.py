"""Memory as a dial: how a budget is divided, and that the output does not depend on it.

The smallest budget has room for the work on one token; every weight passes a ring of buffers
or a few expert slots, and is read again for the next token. With more, parts of the trunk are
pinned; once all of it is, no ring is needed and more experts stay. The largest budget keeps
every weight.

    python examples/memory_plan.py [MODEL] [--picture PATH]
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _shared import SENTENCE, arguments, canvas, encode, save
from numpy.typing import NDArray

import k3rs
from k3rs.sizes import format_size

POSITIONS = 256
GENERATED = 24
STEPS = 9


@dataclass(frozen=True)
class Run:
    """What was generated within a budget, and what was read for it."""

    ids: list[int]
    logits: NDArray[np.float32]
    bytes_read: int


def main() -> int:
    """Prints the plans, then generates with the smallest and the largest; 1 if they differ."""
    given = arguments(__doc__)
    unlimited = plan_for(given.model, 2**50)
    smallest = unlimited["minimum_bytes"]
    largest = sum(entry["bytes"] for entry in unlimited["plan"]["entries"])
    budgets = [int(budget) for budget in np.linspace(smallest, largest, STEPS)]
    plans = [plan_for(given.model, budget)["plan"] for budget in budgets]

    # Entry after entry over the budgets. What no budget changes is left out of the picture.
    entries = {
        entry["name"]: [plan["entries"][index]["bytes"] for plan in plans]
        for index, entry in enumerate(plans[0]["entries"])
    }
    fixed = sum(sizes[0] for sizes in entries.values() if len(set(sizes)) == 1)
    moved = {name: sizes for name, sizes in entries.items() if len(set(sizes)) > 1}

    print(f"{format_size(fixed)} at every budget (process, state, latent cache), the rest:")
    print("    budget" + "".join(f"{name:>15}" for name in moved) + "   trunk pinned")
    for index, (budget, plan) in enumerate(zip(budgets, plans, strict=True)):
        parts = "".join(f"{format_size(sizes[index]):>15}" for sizes in moved.values())
        print(f"{budget / 1e6:7.1f} MB{parts}{plan['pinned_fraction']:15.0%}")

    low, high = run(given.model, smallest), run(given.model, largest)
    print()
    print("ids of the smallest budget:", *low.ids)
    print("ids of the largest budget: ", *high.ids)
    print(f"read from disk: {format_size(low.bytes_read)} and {format_size(high.bytes_read)}")
    if low.ids != high.ids or low.logits.tobytes() != high.logits.tobytes():
        print("error: expected the same bits at both budgets, found others", file=sys.stderr)
        return 1
    print("the logits are the same to the last bit")
    if given.picture:
        draw(budgets, moved, fixed, given.picture)
    return 0


def plan_for(model: Path, budget: int) -> dict[str, Any]:
    """How `budget` bytes would be divided; nothing is loaded."""
    return k3rs.plan(model, k3rs.MemoryRequest(memory_bytes=budget), positions=POSITIONS)


def run(path: Path, budget: int) -> Run:
    """Generates within `budget` bytes."""
    logits: list[NDArray[np.float32]] = []
    with k3rs.Model.open(path, memory=budget, positions=POSITIONS) as model:
        prompt = encode(model, SENTENCE)
        tokens = model.generate(prompt, max_tokens=GENERATED, stop_ids=(), on_logits=logits.append)
        ids = [token.id for token in tokens]
        io = model.report()["io"]
    return Run(ids, np.array(logits), io["trunk_bytes_read"] + io["expert_bytes_read"])


def draw(budgets: list[int], moved: dict[str, list[int]], fixed: int, path: Path) -> None:
    """The entries that the budget moves, one above the other."""
    figure, axes = canvas(1, 1, width=8, height=5)
    axis = axes[0, 0]
    megabytes = np.array(list(moved.values())) / 1e6
    axis.stackplot(np.array(budgets) / 1e6, megabytes, labels=list(moved))
    left = (np.array(budgets) - fixed) / 1e6
    axis.plot(np.array(budgets) / 1e6, left, "k--", label="what the budget allows")
    axis.set(
        title=f"Memory as a dial (and {format_size(fixed)} at every budget)",
        xlabel="budget, MB",
        ylabel="MB",
        xlim=(budgets[0] / 1e6, budgets[-1] / 1e6),
    )
    axis.legend(loc="upper left")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
