"""What a checkpoint directory is meant to contain: every file with its size and hash.

A manifest is a JSON object: `repo` and `revision` (strings, or null for files of unknown
origin) and `files`, a list of objects with `path` (relative, with `/`), `bytes`, and either
`sha256` or `git_sha1`. The hub gives the SHA-256 of files in large file storage, which all
weights are; for the others it gives what git calls them, the SHA-1 of `blob`, a space, the
size in decimal, a zero byte and the content.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from k3rs.exceptions import CheckpointError
from k3rs.hub.whole_file import PARTIAL_SUFFIX, write_whole

__all__ = [
    "MANIFEST_FILE",
    "HashKind",
    "Hasher",
    "ListedFile",
    "Manifest",
    "check_name",
    "short_hash",
    "shown",
]

MANIFEST_FILE = "k3rs-manifest.json"
"""The manifest that a download leaves in its directory."""

_HINT = (
    "remove this list of files, which cannot be used; then `k3rs download` into its directory, or "
    "`k3rs verify MODEL --write-manifest FILE`, makes a new one"
)
_SIZE_LIMIT = 1 << 63
_LONGEST_SHOWN = 80
_SHORT_DIGITS = 12


def shown(value: object) -> str:
    """A value from somebody's list, for a message: short, and without what a terminal obeys."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def short_hash(digits: str) -> str:
    """The beginning of a hash or of a commit, by which people tell them apart."""
    return digits[:_SHORT_DIGITS]


def check_name(path: object, hint: str) -> None:
    """Raises `CheckpointError` with `hint` unless `path` can be in a manifest."""
    if (
        not isinstance(path, str)
        or not path.isprintable()
        # An absolute path begins with an empty part.
        or any(part in {"", ".", ".."} for part in path.split("/"))
    ):
        raise CheckpointError(
            f"expected the name of a file inside of the model directory, found `{shown(path)}`",
            hint,
        )
    if path.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(
            f"expected names of finished files, found `{path}`",
            f"names that end with `{PARTIAL_SUFFIX}` are those of unfinished downloads: finish "
            "them, or remove such files",
        )


class Hasher(Protocol):
    """A hash function at work, as `hashlib` gives it."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Takes more of the content."""

    def hexdigest(self) -> str:
        """The hash of all that was taken, in lower case."""


class HashKind(StrEnum):
    """The hash by which the content of a file is known."""

    SHA256 = "sha256"
    GIT_SHA1 = "git_sha1"

    def hasher(self, size_bytes: int) -> Hasher:
        """A hasher for a file of `size_bytes`, which git puts in front of the content."""
        if self is HashKind.SHA256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)

    @property
    def hex_digits(self) -> int:
        """The length of such a hash."""
        return 64 if self is HashKind.SHA256 else 40


@dataclass(frozen=True)
class ListedFile:
    """A file that should be there."""

    path: str
    size_bytes: int
    hash_kind: HashKind
    hash: str

    def __post_init__(self) -> None:
        """Refuses what could not be, or would be written outside of the directory."""
        check_name(
            self.path,
            "such a name could lead out of the directory; do not trust this list of files",
        )
        if type(self.size_bytes) is not int or not 0 <= self.size_bytes < _SIZE_LIMIT:
            raise CheckpointError(
                f"`{self.path}`: expected a size from 0 to below 2^63 bytes, found "
                f"`{shown(self.size_bytes)}`"
            )
        pattern = rf"[0-9a-f]{{{self.hash_kind.hex_digits}}}"
        found: object = self.hash
        if not isinstance(found, str) or re.fullmatch(pattern, found) is None:
            raise CheckpointError(
                f"`{self.path}`: expected a {self.hash_kind} of {self.hash_kind.hex_digits} "
                f"hexadecimal digits, found `{shown(found)}`"
            )

    @property
    def is_weights(self) -> bool:
        """Whether it holds tensors."""
        return self.path.endswith(".safetensors")


@dataclass(frozen=True)
class Manifest:
    """The files of a directory and, where that is known, where they come from."""

    repo: str | None
    revision: str | None
    files: tuple[ListedFile, ...]

    def __post_init__(self) -> None:
        """Refuses two files of one name, and a file where others need a directory."""
        seen: set[str] = set()
        for path in self.paths:
            if path in seen:
                raise CheckpointError(f"expected every file once, found `{path}` twice")
            seen.add(path)
        for path in self.paths:
            for above in map(str, PurePosixPath(path).parents):
                if above in seen:
                    raise CheckpointError(
                        f"expected a directory `{above}` for `{path}`, found a file of that name "
                        "in the same list"
                    )

    @property
    def paths(self) -> Iterable[str]:
        """The names of the files."""
        return (file.path for file in self.files)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """The manifest in a file; `CheckpointError` where it is not one."""
        try:
            document = json.loads(path.read_bytes())
            files = tuple(_listed_file(entry) for entry in document["files"])
            return cls(_origin(document["repo"]), _origin(document["revision"]), files)
        except CheckpointError as error:
            raise CheckpointError(f"`{path}`: {error}", error.hint or _HINT) from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(
                f"`{path}`: expected a manifest (repo, revision, and files with path, bytes and "
                "sha256 or git_sha1), found something else",
                _HINT,
            ) from error

    def write(self, path: Path) -> None:
        """Puts the manifest into the file at `path`, whole or not at all."""
        document = {
            "repo": self.repo,
            "revision": self.revision,
            "files": [
                {"path": file.path, "bytes": file.size_bytes, str(file.hash_kind): file.hash}
                for file in self.files
            ],
        }
        write_whole(path, json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n")


def _origin(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value.isprintable()):
        return value
    raise TypeError


def _listed_file(entry: Any) -> ListedFile:
    kind = HashKind.SHA256 if "sha256" in entry else HashKind.GIT_SHA1
    return ListedFile(entry["path"], entry["bytes"], kind, entry[kind])
