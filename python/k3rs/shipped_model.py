"""The model that runs when none is named."""

from pathlib import Path

from k3rs.exceptions import InputError

__all__ = ["shipped_model"]

_PACKAGE = Path(__file__).resolve().parent


def shipped_model(package: Path = _PACKAGE) -> Path:
    """The checkpoint directory that came with k3rs: a small Kimi K3 with a model card.

    `package` is the directory of the installed package. Raises `InputError` where its
    models were left out.
    """
    directory = package / "models" / "nano"
    if not directory.is_dir():
        raise InputError(
            "expected a model directory, found none: no model ships with this installation",
            hint="name the directory that holds config.json and the *.safetensors files",
        )
    return directory
