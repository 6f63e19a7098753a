"""What a token of a prompt costs, as a share of decoding one, all weights in memory.

A chunk of a prompt is one sweep: each matrix is decoded once for all its tokens, so a prompt is
bound by arithmetic where decoding is bound by memory. Measures prompts of several lengths and
single tokens in turn, several rounds, and prints the medians.

    python benches/prompt.py DIRECTORY [--lengths 8,32,128] [--rounds 5] [--json PATH]

DIRECTORY holds any checkpoint that fits into memory, for example the one that
`benches/streaming.py` leaves.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import k3rs

HEADROOM_BYTES = 1_000_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lengths", default="8,32,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths = [int(word) for word in arguments.lengths.split(",")]

    directory: Path = arguments.directory
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    memory = stored * 9 // 8 + HEADROOM_BYTES
    with k3rs.Model.open(directory, memory=memory) as model:
        seconds: dict[int, list[float]] = {length: [] for length in [1, *lengths]}
        # The first round reads the experts into their slots.
        for round_number in range(arguments.rounds + 1):
            for length, times in seconds.items():
                session = model.session()
                ids = [(7 * place + length) % 1000 for place in range(length)]
                started = time.perf_counter()
                session.forward(ids)
                if round_number > 0:
                    times.append((time.perf_counter() - started) / length)
    decode = statistics.median(seconds[1])
    points = [
        {
            "tokens": length,
            "seconds_per_token": statistics.median(times),
            "of_decode": statistics.median(times) / decode,
        }
        for length, times in seconds.items()
    ]
    print("tokens   s/token   of decoding one")
    for point in points:
        print(f"{point['tokens']:6d} {point['seconds_per_token']:9.4f} {point['of_decode']:12.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(points, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
