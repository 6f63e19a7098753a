"""Compares the reference with external float64 truth.

    python tools/reference/check_oracle.py [DIRECTORY]

Every model in `DIRECTORY/oracle` with `model/`, `expected.json` and `truth64.safetensors`
(`logits.i`, [T, V]) is run and compared, and the rows of the release in
`DIRECTORY/data/released_mxfp4_rows.json` are decoded. Exit status 1 where a logit differs by more
than 1e-9 or a decoded value at all. The default directory lies beside the project; where it is
absent there is nothing to compare, and the status is 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from checkpoint import decode_mxfp4, read_config, read_safetensors, read_weights
from k3_reference import K3Reference
from model_config import ModelConfig

TOLERANCE = 1e-9


def largest_difference(variant: Path) -> float:
    """Largest absolute logit difference over all prompts of one variant."""
    config = ModelConfig.from_json(read_config(variant / "model"))
    reference = K3Reference(config, read_weights(variant / "model"))
    truth = dict(read_safetensors(variant / "truth64.safetensors"))
    prompts = json.loads((variant / "expected.json").read_text("utf-8"))["prompts"]
    return max(
        float(np.abs(reference.forward(prompt["ids"]).logits - truth[f"logits.{i}"].values).max())
        for i, prompt in enumerate(prompts)
    )


def wrong_mxfp4_values(path: Path) -> int:
    """How many values of the released rows the decoder gets wrong."""
    document = json.loads(path.read_text("utf-8"))
    packed, scales, expected = (
        np.array(document[name]["data"]).reshape(document[name]["shape"])
        for name in ("packed", "scales", "expected")
    )
    decoded = decode_mxfp4(packed.astype(np.uint8), scales.astype(np.uint8))
    return int((decoded != expected).sum())


def main() -> int:
    """Runs the command line."""
    beside = Path(__file__).resolve().parents[3] / "shared"
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else beside
    failed = False
    variants = sorted(path.parent for path in directory.glob("oracle/*/truth64.safetensors"))
    for variant in variants:
        difference = largest_difference(variant)
        failed |= not difference <= TOLERANCE
        print(f"{variant.name}: largest logit difference {difference:.1e}")
    rows = directory / "data" / "released_mxfp4_rows.json"
    if rows.is_file():
        wrong = wrong_mxfp4_values(rows)
        failed |= wrong > 0
        print(f"{rows.name}: {wrong} values differ")
    elif not variants:
        print(f"skipped: nothing to compare with in {directory}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
