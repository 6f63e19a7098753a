"""What a saved session says of itself, read without the model and without its state."""

import json
import os
from dataclasses import dataclass

from k3rs import _k3rs

__all__ = ["SavedSession"]


@dataclass(frozen=True, slots=True)
class SavedSession:
    """The label of a file that `Session.save` wrote; `Model.load_session` checks the rest."""

    fingerprint: str
    """Of the model that it belongs to."""
    position: int
    """How many ids the text has."""
    pending_count: int
    """How many of them are still to be computed."""
    note: str
    """What was given to `Session.save` with it."""

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> "SavedSession":
        """The label of `file`.

        Raises `SessionFileError` if it cannot be read or is not a saved session.
        """
        facts = json.loads(_k3rs.read_session_label(os.fspath(file)))
        return cls(
            fingerprint=facts["fingerprint"],
            position=facts["ids"],
            pending_count=facts["ids"] - facts["positions"],
            note=facts["note"],
        )
