"""Rows for a decoder of MXFP4 with the values they stand for (OCP MX v1.0)."""

from __future__ import annotations

from typing import Any

import numpy as np
from checkpoint import SCALE_GROUP, decode_mxfp4
from numpy.typing import NDArray

ALL_NIBBLES = [*range(16), *range(15, -1, -1)]
#: Every odd multiplier visits all nibbles; neighbours differ, so a swapped pair shows.
MIXED_NIBBLES = [(7 * column + 3) % 16 for column in range(SCALE_GROUP)]

#: Name, nibbles of one group of columns, and the scale byte of each group of the row.
CASES: list[tuple[str, list[int], list[int]]] = [
    ("every nibble at scale 1", ALL_NIBBLES, [127]),
    ("scales around the released ones", MIXED_NIBBLES, [119, 120, 121, 122, 123]),
    ("subnormal and smallest scales", ALL_NIBBLES, [0, 1, 2]),
    ("largest scales, beyond float32", ALL_NIBBLES, [252, 253, 254]),
    ("an odd number of groups, far apart", MIXED_NIBBLES, [127, 0, 254, 121, 1]),
]


def float32_bits(value: float) -> str:
    """Bits of the nearest float32 in hexadecimal; infinity where it is out of range."""
    with np.errstate(over="ignore"):
        return f"{np.float64(value).astype('<f4').view('<u4'):08x}"


def mxfp4_document() -> dict[str, Any]:
    """The content of `ops/mxfp4.json`."""
    rows = []
    for name, nibbles, scales in CASES:
        pairs = np.array(nibbles * len(scales), np.uint8).reshape(-1, 2)
        packed: NDArray[np.uint8] = pairs[:, 0] + pairs[:, 1] * np.uint8(16)
        expected = decode_mxfp4(packed[None], np.array([scales], np.uint8))[0].tolist()
        rows.append(
            {
                "name": name,
                "packed": packed.tolist(),
                "scales": scales,
                "expected": expected,
                "expected_f32_bits": [float32_bits(value) for value in expected],
            }
        )
    return {"columns_per_scale": SCALE_GROUP, "rows": rows}
