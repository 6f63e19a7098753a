"""What is already known of the files of a directory, so that work on them can be continued.

A record is a small JSON file in the user's cache directory: a model directory may be
read-only. A hash in it counts as long as the file has the same size, time of modification
and inode. What a check remembers counts for a day and only while the time of the last change
of the inode is the same too: a check looks for what leaves no other trace, while a download
would read a whole checkpoint again because its owner or a link to it has changed. Without a
usable cache directory nothing is remembered, and work starts anew.
"""

import hashlib
import json
import os
import threading
import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from k3rs.hub.manifest import HashKind
from k3rs.hub.whole_file import write_whole
from k3rs.user_directories import cache_directory

__all__ = ["HashRecord", "Purpose"]

_SAVED_EVERY_S = 0.1
_CHECKED_FOR_S = 24 * 3600.0


class Purpose(StrEnum):
    """What a record is kept for."""

    DOWNLOAD = "download"
    """The files that were right when a download put them there or compared them."""
    VERIFY = "verify"
    """What a check has hashed that is not at its end."""
    MANIFEST = "manifest"
    """What was hashed for a manifest that is not written yet."""


class HashRecord:
    """The hashes of files in `directory` that are known for `purpose`; threads may share it."""

    def __init__(self, purpose: Purpose, directory: Path) -> None:
        self._purpose = purpose
        self._directory = directory.resolve()
        self._lock = threading.Lock()
        self._saved_at = 0.0
        self._entries: dict[str, list[Any]] = {}
        self._file: Path | None = None
        # Without a place for it there is no record, which only costs time.
        with suppress(OSError):
            cache = cache_directory()
            key = hashlib.sha256(os.fsencode(self._directory)).hexdigest()[:32]
            self._file = cache / f"{purpose}-{key}.json"
            self._load(self._file)

    def find(self, path: str, kind: HashKind) -> str | None:
        """The hash of a file, if it was found and the file has not changed since."""
        with suppress(OSError), self._lock:
            entry = self._entries.get(path)
            if entry is not None:
                *known, found_at, found = entry
                status = (self._directory / path).stat()
                if known == self._identity(status, kind) and self._is_recent(found_at):
                    return str(found)
        return None

    def add(self, path: str, kind: HashKind, found: str, status: os.stat_result) -> None:
        """Remembers the hash of a file that had `status` all the time; saved soon, not at once."""
        with self._lock:
            self._entries[path] = [*self._identity(status, kind), time.time(), found]
            if time.monotonic() - self._saved_at >= _SAVED_EVERY_S:
                self._save()

    def forget(self, path: str) -> None:
        """Has a file looked at again, from this moment on."""
        with self._lock:
            if self._entries.pop(path, None) is not None:
                self._save()

    def save(self) -> None:
        """Saves what was added."""
        with self._lock:
            self._save()

    def delete(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._entries.clear()
            if self._file is not None:
                with suppress(OSError):
                    self._file.unlink(missing_ok=True)

    def _identity(self, status: os.stat_result, kind: HashKind) -> list[Any]:
        identity = [status.st_size, status.st_mtime_ns, status.st_ino, str(kind)]
        return identity if self._purpose is Purpose.DOWNLOAD else [*identity, status.st_ctime_ns]

    def _is_recent(self, found_at: object) -> bool:
        if self._purpose is Purpose.DOWNLOAD:
            return True
        return isinstance(found_at, float) and 0 <= time.time() - found_at <= _CHECKED_FOR_S

    def _load(self, file: Path) -> None:
        try:
            document = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return
        if isinstance(document, dict) and document.get("directory") == str(self._directory):
            entries = document.get("files")
            if isinstance(entries, dict):
                self._entries = {
                    path: entry
                    for path, entry in entries.items()
                    if isinstance(entry, list) and len(entry) > 2
                }

    def _save(self) -> None:
        if self._file is None:
            return
        document = {"directory": str(self._directory), "files": self._entries}
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps(document).encode())
        self._saved_at = time.monotonic()
