"""Compares the logits of a checkpoint in this trainer's model and in k3rs.

    python tools/train_nano/check_export.py logits CHECKPOINT_DIR FILE   (the trainer's environment)
    python tools/train_nano/check_export.py compare CHECKPOINT_DIR FILE  (an environment with k3rs)

The first command reads the exported files back and writes ids and logits to `FILE`; the second
runs the same ids through k3rs and prints how far they differ. Rounding in float32 moves a logit
by about 1e-5; now and then it also turns a choice of the router at an almost tie.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

TOKENS = 512


def write_logits(directory: Path, file: Path) -> None:
    """Logits of random windows of the vocabulary's own text."""
    # Each half needs packages that the other environment lacks.
    import evaluation  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    import network  # noqa: PLC0415

    shape, weights = evaluation.read_checkpoint(directory)
    ids = np.random.default_rng(0).integers(0, shape.rank_count, TOKENS)
    output = network.forward(shape, weights, jnp.asarray(ids)[None])
    np.savez(file, ids=ids, logits=np.asarray(network.logits(weights, output.final))[0])


def compare(directory: Path, file: Path) -> None:
    """Prints the differences; exits with an error if they are more than rounding."""
    import k3rs  # noqa: PLC0415

    stored = np.load(file)
    with k3rs.Model.open(directory) as model:
        logits = model.session().forward(stored["ids"], all_positions=True)
    differences = np.abs(logits - stored["logits"]).max(axis=1)
    print(f"standard deviation of the logits  {logits.std():.3f}")
    print(f"largest difference, median token  {np.median(differences):.2e}")
    print(f"largest difference, worst token   {differences.max():.2e}")
    same = (logits.argmax(axis=1) == stored["logits"].argmax(axis=1)).mean()
    print(f"same most likely token            {same:.2%}")
    if np.median(differences) > 1e-3:
        sys.exit("the two models differ by more than rounding")


def main() -> None:
    """Runs one half of the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("half", choices=("logits", "compare"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    half = write_logits if arguments.half == "logits" else compare
    half(arguments.checkpoint, arguments.file)


if __name__ == "__main__":
    main()
