"""The text of `MODEL_CARD.md`. Measured figures come from `measure.py`, which keeps them in JSON."""
from __future__ import annotations
from pathlib import Path
from architecture import Architecture
def write(shape: Architecture, progress: dict[str, int], figures: Path) -> str:
    return f"{progress}\n"
