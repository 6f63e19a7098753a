"""What the examples share: the model and text they take, and the canvas they draw on."""

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np

import k3rs
from k3rs.exceptions import InputError, K3Error

__all__ = ["PASSAGE", "SENTENCE", "arguments", "canvas", "encode", "save", "shown"]

SENTENCE = "In the beginning God created the heaven and the earth."

# From the part of the King James Bible that the shipped model was not trained on.
PASSAGE = """Revelation 21

And I saw a new heaven and a new earth: for the first heaven and the first earth were passed away; \
and there was no more sea.
And I John saw the holy city, new Jerusalem, coming down from God out of heaven, prepared as a \
bride adorned for her husband.
And I heard a great voice out of heaven saying, Behold, the tabernacle of God is with men, and he \
will dwell with them, and they shall be his people, and God himself shall be with them, and be \
their God.
And God shall wipe away all tears from their eyes; and there shall be no more death, neither \
sorrow, nor crying, neither shall there be any more pain: for the former things are passed away.
"""


def arguments(description: str | None) -> argparse.Namespace:
    """`model`, a checkpoint directory, and `picture`, a path or `None`."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", type=Path, help="default: the model of k3rs"
    )
    parser.add_argument("--picture", metavar="PATH", type=Path, help="draw the facts into PATH")
    given = parser.parse_args()
    try:
        given.model = given.model or k3rs.shipped_model()
        k3rs.inspect(given.model)
    except K3Error as error:
        parser.error(f"{error}\nhint: {error.hint}")
    if given.picture is not None:
        _pyplot()
    return given


def encode(model: k3rs.Model, text: str) -> list[int]:
    """The ids of `text`; as many arbitrary ones as it has spaces where no vocabulary covers it."""
    try:
        return model.encode(text)
    except InputError:
        ids = np.random.default_rng(0).integers(model.facts["model"]["vocab"], size=text.count(" "))
        return [int(token_id) for token_id in ids]


def shown(model: k3rs.Model, token_id: int) -> str:
    """A token as one can read it in a table: its spaces are visible."""
    if model.tokenizer is None:
        return str(token_id)
    return repr(model.tokenizer.decode([token_id]))


def canvas(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes; sizes in inches."""
    figure, axes = _pyplot().subplots(
        rows, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Writes `figure` to `path`, in the format of its ending."""
    figure.savefig(path, dpi=150)
    print(f"picture: {path}")


def _pyplot() -> Any:
    # Imported by name and only here: the examples and their type check run without it.
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        raise SystemExit(
            "error: expected matplotlib to draw a picture, found none\n"
            "hint: pip install 'k3rs[plot]', or leave --picture out"
        ) from None
