"""The model that runs when none is named."""

from dataclasses import dataclass
from pathlib import Path

from k3rs.exceptions import InputError

__all__ = ["ShippedModel", "shipped_model"]

_PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class ShippedModel:
    """A checkpoint directory that came with k3rs."""

    path: Path
    note: str | None
    """What a reader of its text has to know, in one line."""


def shipped_model(package: Path = _PACKAGE) -> ShippedModel:
    """The model inside the package, or in a source checkout the test fixture.

    `package` is the directory of the installed package.
    """
    packaged = package / "models" / "nano"
    if packaged.is_dir():
        return ShippedModel(packaged, None)
    fixture = package.parents[1] / "fixtures" / "tiny_k3" / "model"
    if fixture.is_dir():
        return ShippedModel(
            fixture, "the model of the test fixtures has random weights: its text is noise"
        )
    raise InputError(
        "expected a model directory, found none: no model ships with this installation",
        hint="name the directory that holds config.json and the *.safetensors files",
    )
