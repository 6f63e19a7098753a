"""Texts that share their beginning: what was computed of it is not computed again.

The state of a recurrent layer cannot be wound back. So that a conversation can go on from
an earlier place, its session is saved at such places, each a file with the whole state.
Of more than a few the one goes whose loss costs least.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from k3rs.closing import Closing
from k3rs.exceptions import SessionError, SessionFileError
from k3rs.model import Model
from k3rs.saved_session import SavedSession
from k3rs.session import Session
from k3rs.user_directories import cache_directory

__all__ = ["PrefixCache"]

CHECKPOINTS_MAX = 8
"""Files kept; at the released size each takes 0.47 GB, and 55 kB a position."""

_PREFIX = "prefixes-"


@dataclass(frozen=True)
class _Checkpoint:
    """A file with a session that has computed exactly these ids."""

    ids: list[int]
    file: Path


class PrefixCache(Closing):
    """Gives sessions that know as much as possible of a text. A context manager.

    One session is alive at a time: the one given last.
    """

    def __init__(self, model: Model, directory: str | os.PathLike[str] | None = None) -> None:
        """Checkpoints go into a new directory within `directory`, removed by `close`.

        Without it into the user's cache directory. Where that cannot be made there are no
        checkpoints: `keep` says why.
        """
        self._model = model
        self._directory: Path | None = None
        self._lock: int | None = None
        self._why_not = ""
        try:
            self._make(cache_directory() if directory is None else Path(directory))
        except OSError as error:
            self._why_not = f"{error.filename or directory}: {error.strerror or error}"
        self._checkpoints: list[_Checkpoint] = []
        self._saved_count = 0
        self._session: Session | None = None

    def _make(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        # So that no other process takes the new directory for an abandoned one.
        making = _locked(parent, fcntl.LOCK_EX)
        try:
            for abandoned in parent.glob(f"{_PREFIX}*"):
                # What a killed process left; a living one holds the lock.
                with suppress(OSError):
                    os.close(_locked(abandoned))
                    shutil.rmtree(abandoned)
            self._directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = _locked(self._directory)
        finally:
            os.close(making)

    def close(self) -> None:
        """Removes the checkpoints."""
        self._checkpoints.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def checkpoint_count(self) -> int:
        """How many places can be gone back to."""
        return len(self._checkpoints)

    def session(self, ids: Sequence[int]) -> Session:
        """A session of the text `ids`, of which `Session.pending` is still to be computed.

        That is what comes behind the longest beginning that the last session or a
        checkpoint has computed.
        """
        wanted = list(ids)
        session, known = self._session, self._computed()
        if session is None or known is None or not _starts_with(wanted, known):
            # Let go of before another takes its memory.
            session = self._session = None
            known = []
        longer = [
            each
            for each in self._checkpoints
            if len(each.ids) > len(known) and _starts_with(wanted, each.ids)
        ]
        for checkpoint in sorted(longer, key=lambda each: len(each.ids), reverse=True):
            # Memory is planned for one session.
            session = self._session = None
            known = []
            try:
                session, known = self._model.load_session(checkpoint.file), checkpoint.ids
                break
            except SessionError:
                # What cannot be read any more only costs time.
                self._checkpoints.remove(checkpoint)
        if session is None:
            session = self._model.session()
        session.discard_pending()
        if len(wanted) > len(known):
            session.append(wanted[len(known) :])
        self._session = session
        return session

    def load(self, file: str | os.PathLike[str]) -> None:
        """Goes on with a session that was saved elsewhere.

        Raises `SessionFileError`, as `Model.load_session` does.
        """
        label = SavedSession.read(file)
        own = self._model.facts["model"]["fingerprint"]
        if label.fingerprint != own:
            # Before the present session is let go of.
            raise SessionFileError(
                f"{os.fspath(file)}: expected a session of the model {own}, found one of "
                f"{label.fingerprint}",
                hint="open the model that it was saved from",
            )
        with suppress(SessionFileError):
            self.keep()
        self._session = None
        self._session = self._model.load_session(file)

    def keep(self) -> None:
        """Makes a checkpoint of what the last session has computed.

        Raises `SessionFileError` if it cannot be written; nothing else is lost then.
        """
        known = self._computed()
        if self._session is None or not known:
            return
        if any(each.ids == known for each in self._checkpoints):
            return
        if self._directory is None:
            raise SessionFileError(
                f"there is no directory for checkpoints: {self._why_not}",
                hint="set XDG_CACHE_HOME to a directory that can be written to",
            )
        pending = self._session.pending
        self._session.discard_pending()
        file = self._directory / f"{self._saved_count}.session"
        try:
            self._session.save(file)
        finally:
            if pending:
                self._session.append(pending)
        self._saved_count += 1
        self._checkpoints.append(_Checkpoint(known, file))
        if len(self._checkpoints) > CHECKPOINTS_MAX:
            cheapest = min(self._checkpoints[:-1], key=self._cost_of_loss)
            cheapest.file.unlink(missing_ok=True)
            self._checkpoints.remove(cheapest)

    def _cost_of_loss(self, checkpoint: _Checkpoint) -> int:
        """How many ids would have to be read again to be where `checkpoint` is."""
        others = (each.ids for each in self._checkpoints if each is not checkpoint)
        known = (len(ids) for ids in others if _starts_with(checkpoint.ids, ids))
        return len(checkpoint.ids) - max(known, default=0)

    def _computed(self) -> list[int] | None:
        """The ids that the last session has computed; `None` if it cannot go on."""
        if self._session is None or self._session.is_aborted:
            return None
        ids = self._session.ids
        return ids[: len(ids) - len(self._session.pending)]


def _starts_with(ids: list[int], beginning: list[int]) -> bool:
    return ids[: len(beginning)] == beginning


def _locked(directory: Path, kind: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> int:
    """A descriptor that holds a lock on `directory` until it is closed, or `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
