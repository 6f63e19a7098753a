"""A repository of the hub as a directory: complete, checked, and continued after any end.

Everything happens at one commit, which the manifest in the directory keeps from the first
moment on. Files appear when they are whole and have the hash that the hub lists; until then
they are beside their place, with `.partial` behind their name, and are continued from there.
"""

import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from k3rs.exceptions import CheckpointError, ReadError
from k3rs.hub.checkpoint_part import INDEX_FILE, WHOLE, CheckpointPart
from k3rs.hub.directory_lock import exclusive
from k3rs.hub.file_hashing import ChangedFileError, hash_files, targets
from k3rs.hub.file_progress import FileProgress
from k3rs.hub.hash_record import HashRecord, Purpose
from k3rs.hub.manifest import MANIFEST_FILE, ListedFile, Manifest
from k3rs.hub.repository import DEFAULT_RETRIES, Hub
from k3rs.hub.transfer import Transfer, partial_bytes, partial_path
from k3rs.hub.whole_file import write_whole
from k3rs.sizes import format_size
from k3rs.worker_threads import for_each

__all__ = ["DEFAULT_REPO", "Downloaded", "download"]

DEFAULT_REPO = "moonshotai/Kimi-K3"

_FILES_AT_ONCE = 3


@dataclass(frozen=True)
class Downloaded:
    """What a download has done. `manifest` lists what the directory should have now.

    `checked` are those of its files that this download has compared or fetched; the others are
    of earlier ones.
    """

    manifest: Manifest
    checked: tuple[ListedFile, ...]
    fetched_files: int
    fetched_bytes: int


def download(
    repo: str,
    directory: str | os.PathLike[str],
    *,
    revision: str | None = None,
    part: CheckpointPart = WHOLE,
    retries: int = DEFAULT_RETRIES,
    progress: FileProgress | None = None,
) -> Downloaded:
    """Makes `directory` have the files of `repo`, or a part of them, and a manifest.

    `revision` is a branch, a tag or a commit; without it a directory stays at the commit at
    which it was begun. A file is given up after `retries` failures in a row without a byte.
    Files that are there and right are kept; others of the same name are replaced.

    Raises `CheckpointError` where the repository or the directory cannot be used and where
    content stays wrong, `ReadError` where the hub cannot be reached or refuses, `InputError` for
    a name that cannot be one, and `OSError` where the disk takes no more.
    """
    job = _Download(repo, Path(directory), retries, progress or FileProgress())
    return job.run(revision, part)


class _Download:
    def __init__(self, repo: str, directory: Path, retries: int, progress: FileProgress) -> None:
        self._repo = repo
        self._directory = directory
        self._progress = progress
        self._stop = threading.Event()
        self._hub = Hub(retries=retries, stop=self._stop, note=progress.note)
        self._received_bytes = 0
        self._failures: list[CheckpointError] = []
        self._lock = threading.Lock()

    def run(self, revision: str | None, part: CheckpointPart) -> Downloaded:
        _require_writable(self._directory)
        with ExitStack() as held:
            existed = self._directory.exists()
            if existed:
                held.enter_context(exclusive(self._directory, self._progress.note))
            saved = self._saved_manifest()
            listing = self._listing(saved, revision)
            self._record = HashRecord(Purpose.DOWNLOAD, self._directory)
            index = self._index(listing) if part.weights else None
            chosen = part.choose(listing, index)
            missing = self._missing(chosen)
            self._require_places(missing)
            self._require_space(missing)

            if not existed:
                self._directory.mkdir(parents=True, exist_ok=True)
                held.enter_context(exclusive(self._directory, self._progress.note))
            manifest = self._manifest(listing, chosen, saved)
            if manifest != saved:  # a full disk has no room for the same once more
                manifest.write(self._directory / MANIFEST_FILE)
            for file in missing:
                if (self._directory / file.path).exists():
                    self._progress.note(f"`{file.path}` is another one: replacing it")
            self._fetch(manifest, self._without_index(missing, index))
        self._raise_failures()
        return Downloaded(manifest, tuple(chosen), len(missing), self._received_bytes)

    def _saved_manifest(self) -> Manifest | None:
        """What an earlier download into this directory has left."""
        path = self._directory / MANIFEST_FILE
        if not path.exists():
            return None
        saved = Manifest.read(path)
        if saved.repo != self._repo or saved.revision is None:
            raise CheckpointError(
                f"expected a directory for {self._repo}, found `{path}`, which is of "
                f"{saved.repo or 'files of unknown origin'}",
                "choose another directory, or remove that file to have all others compared",
            )
        return saved

    def _listing(self, saved: Manifest | None, revision: str | None) -> Manifest:
        begun_at = None if saved is None else saved.revision
        listing = self._hub.listing(self._repo, revision or begun_at)
        if begun_at is not None and listing.revision != begun_at:
            raise CheckpointError(
                f"expected commit {begun_at} of {self._repo}, at which "
                f"`{self._directory}` was begun, found that {revision} is {listing.revision}",
                f"leave --revision out to continue, or remove `{MANIFEST_FILE}` to have every "
                "file compared with the other commit",
            )
        return listing

    def _index(self, listing: Manifest) -> bytes | None:
        """The content of the index file: ours if it is there and right, else the hub's."""
        file = next((file for file in listing.files if file.path == INDEX_FILE), None)
        if file is None:
            return None
        if not self._missing([file]):
            return (self._directory / INDEX_FILE).read_bytes()
        self._progress.begin("fetching", "done", 1, file.size_bytes, 0)
        self._progress.start(file.path, file.size_bytes, 0)
        transfer = self._transfer(listing, file)
        content = transfer.into_memory()
        self._received_bytes += transfer.received_bytes
        self._progress.finish(file.path)
        return content

    def _missing(self, files: Sequence[ListedFile]) -> list[ListedFile]:
        """Those that are not there or not right. What no record vouches for is hashed."""
        same_size = [
            file
            for file in files
            if (self._directory / file.path).is_file()
            and (self._directory / file.path).stat().st_size == file.size_bytes
        ]
        hashes: dict[str, str | OSError] = {}

        def found(path: str, outcome: str | CheckpointError | ReadError) -> None:
            if isinstance(outcome, ChangedFileError):
                raise outcome
            hashes[path] = outcome

        if same_size:
            hash_files(
                self._directory,
                targets(same_size),
                record=self._record,
                progress=self._progress,
                found=found,
            )
        return [file for file in files if hashes.get(file.path) != file.hash]

    def _require_places(self, missing: Sequence[ListedFile]) -> None:
        """Refuses a directory where a file has to go, and a file where a directory has to."""
        for file in missing:
            path = self._directory / file.path
            for place in (path, partial_path(self._directory, file.path)):
                if place.is_dir():
                    raise CheckpointError(
                        f"expected a place for the file `{file.path}`, found the directory "
                        f"`{place}`",
                        "move it away, or choose another directory",
                    )
            for above in path.relative_to(self._directory).parents:
                place = self._directory / above
                if place.exists() and not place.is_dir():
                    raise CheckpointError(
                        f"expected a directory for `{file.path}`, found the file `{place}`",
                        "move it away, or choose another directory",
                    )

    def _require_space(self, missing: Sequence[ListedFile]) -> None:
        needed = sum(file.size_bytes - partial_bytes(self._directory, file) for file in missing)
        place = _existing_place(self._directory)
        free = shutil.disk_usage(place).free
        if needed > free:
            raise CheckpointError(
                f"expected {needed:,} bytes ({format_size(needed)}) of free space for "
                f"`{self._directory}`, found {free:,} ({format_size(free)})",
                "make room, choose another disk, or take a part with --only-layers or --no-weights",
            )

    def _manifest(
        self, listing: Manifest, chosen: Sequence[ListedFile], saved: Manifest | None
    ) -> Manifest:
        """The chosen files, and those of earlier downloads that are there."""
        kept = set(chosen)
        if saved is not None:
            kept.update(file for file in saved.files if (self._directory / file.path).is_file())
        return replace(listing, files=tuple(file for file in listing.files if file in kept))

    def _without_index(
        self, missing: Sequence[ListedFile], index: bytes | None
    ) -> Sequence[ListedFile]:
        """The rest of `missing`, after the index file was written if it was among them."""
        for file in missing:
            if file.path == INDEX_FILE and index is not None:
                write_whole(self._directory / INDEX_FILE, index)
                status = (self._directory / INDEX_FILE).stat()
                self._record.add(file.path, file.hash_kind, file.hash, status)
                return [other for other in missing if other is not file]
        return missing

    def _fetch(self, manifest: Manifest, missing: Sequence[ListedFile]) -> None:
        if not missing:
            return
        done_bytes = sum(partial_bytes(self._directory, file) for file in missing)
        size_bytes = sum(file.size_bytes for file in missing)
        self._progress.begin("fetching", "done", len(missing), size_bytes, done_bytes)

        def work(file: ListedFile) -> None:
            self._progress.start(file.path, file.size_bytes, partial_bytes(self._directory, file))
            try:
                status = self._fetch_one(manifest, file)
            except CheckpointError as error:
                # That one file cannot be had is no reason to stop the others.
                self._failures.append(error)
                self._progress.abandon(file.path)
            else:
                self._record.add(file.path, file.hash_kind, file.hash, status)
                self._progress.finish(file.path)

        try:
            for_each(missing, work, _FILES_AT_ONCE, self._stop)
        finally:
            self._record.save()

    def _fetch_one(self, manifest: Manifest, file: ListedFile) -> os.stat_result:
        transfer = self._transfer(manifest, file)
        try:
            return transfer.into_directory(self._directory)
        finally:
            with self._lock:
                self._received_bytes += transfer.received_bytes

    def _transfer(self, source: Manifest, file: ListedFile) -> Transfer:
        return Transfer(
            self._hub,
            self._repo,
            str(source.revision),
            file,
            stop=self._stop,
            progress=self._progress,
        )

    def _raise_failures(self) -> None:
        if len(self._failures) == 1:
            raise self._failures[0]
        if self._failures:
            raise CheckpointError(
                f"{len(self._failures)} files cannot be fetched: "
                + "; ".join(map(str, self._failures)),
                self._failures[0].hint,
            )


def _existing_place(path: Path) -> Path:
    """The nearest directory above `path`, or itself, that is there already."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _require_writable(directory: Path) -> None:
    place = _existing_place(directory)
    if not place.is_dir():
        raise CheckpointError(
            f"expected a directory, found the file `{place}`", "choose another directory"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"expected a directory that may be written, found `{place}`, which may not",
            "choose another directory, or have its owner or its file system allow it",
        )
