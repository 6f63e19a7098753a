"""Packed trunks as files: what their headers say, and small damages."""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness import Completed

TRUNK = "trunk.safetensors"
PARTIAL = f"{TRUNK}.partial"
PROGRESS = f"{TRUNK}.progress"
PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file by its header."""

    path: Path
    start: int
    """Where the data begin."""
    header: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> "TensorFile":
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return cls(path, 8 + length, header)

    def names(self) -> list[str]:
        """In the order of the data."""
        return sorted(self.header, key=self.begin)

    def begin(self, name: str) -> int:
        """Offset of a tensor in the file."""
        begin: int = self.header[name]["data_offsets"][0]
        return self.start + begin

    def tensors(self) -> dict[str, tuple[str, list[int], bytes]]:
        """Type, shape and data by name."""
        content = self.path.read_bytes()[self.start :]
        return {
            name: (entry["dtype"], entry["shape"], content[slice(*entry["data_offsets"])])
            for name, entry in self.header.items()
        }


def flip_bit(path: Path, offset: int) -> None:
    """Done twice it is undone."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def file_digest(path: Path) -> str:
    """SHA-256 in hexadecimal digits."""
    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def assert_refused(done: Completed, *words: str) -> None:
    """Status 1, a line that says what is wrong, with `words`, and one that says what to do."""
    assert (done.status, done.stdout) == (1, ""), done
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    for word in words:
        assert word in error, error
