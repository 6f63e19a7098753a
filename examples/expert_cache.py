"""The expert cache: how many requests find their expert in memory.

Generates text with `k3rs generate --trace`, which writes down every expert that a token
woke, and replays these requests against caches of other sizes, as `k3rs trace replay` does.
`lru` throws out what was not used for longest, `belady` knows the future and cannot be
beaten, `default` is what k3rs does.

    python examples/expert_cache.py [MODEL] [--picture PATH]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _shared import SENTENCE, arguments, canvas, encode, save

import k3rs
from k3rs.trace import Trace, read_trace, replay

GENERATED = 200
# Without sampling a small model soon repeats itself, and so do its requests.
SAMPLING = ("--temperature", "0.8", "--seed", "1")
POLICIES = ("lru", "default", "belady")


def main() -> int:
    """Prints hit rates over cache sizes."""
    given = arguments(__doc__)
    with tempfile.TemporaryDirectory() as directory:
        trace = generate(given.model, Path(directory) / "requests.trace")

    config = k3rs.inspect(given.model)["config"]
    routed = [layer for layer in config["layers"] if layer["feed_forward"] == "experts"]
    experts = len(routed) * config["moe"]["experts"]
    # Doubled until all experts fit.
    slots = [2**power for power in range(2, experts.bit_length()) if 2**power < experts]
    slots.append(experts)
    facts = replay(trace, slots)
    rates = {
        policy: [row["hit_rate"] for row in facts["results"] if row["policy"] == policy]
        for policy in POLICIES
    }
    distinct = len(np.unique(trace.requests[:, 1:], axis=0))

    print(f"{facts['tokens']} tokens, {facts['requests']} requests for experts")
    print(f"{distinct} of {experts} experts woke at least once")
    print("   slots" + "".join(f"{policy:>10}" for policy in POLICIES))
    for size, *row in zip(slots, *rates.values(), strict=True):
        print(f"{size:8d}" + "".join(f"{rate:10.1%}" for rate in row))
    if given.picture:
        draw(slots, rates, 1 - distinct / facts["requests"], given.picture)
    return 0


def generate(path: Path, trace: Path) -> Trace:
    """The requests of a generated text."""
    with k3rs.Model.open(path, memory="1GB") as model:
        ids = ",".join(map(str, encode(model, SENTENCE)))
    command = [sys.executable, "-m", "k3rs", "generate", str(path), "--ids", ids]
    command += ["-n", str(GENERATED), "--ignore-stop", "--quiet", *SAMPLING, "--trace", str(trace)]
    # The text is of no interest here, only what it asked for.
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)  # noqa: S603
    return read_trace(trace)


def draw(slots: list[int], rates: dict[str, list[float]], most: float, path: Path) -> None:
    """Hit rates over slots; the line above all is a cache that misses first uses only."""
    figure, axes = canvas(1, 1, width=8, height=5)
    axis = axes[0, 0]
    for policy, values in rates.items():
        axis.plot(slots, values, marker="o", label=policy)
    axis.axhline(most, color="grey", linestyle="--", label="only first uses miss")
    axis.set_xscale("log", base=2)
    axis.set(
        title="Requests that find their expert in memory",
        xlabel="slots of the cache",
        ylabel="hit rate",
        ylim=(0, 1),
    )
    axis.set_xticks(slots, slots)
    axis.legend(loc="center left")
    save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
