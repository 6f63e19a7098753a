"""Where a user's own files belong (XDG Base Directory Specification)."""

import os
from pathlib import Path

__all__ = ["cache_directory", "expanded", "state_directory"]


def cache_directory() -> Path:
    """What can be made again. Raises `OSError` where the user has no home."""
    return _directory("XDG_CACHE_HOME", ".cache")


def state_directory() -> Path:
    """What outlasts a run and matters to this machine alone. Raises as `cache_directory`."""
    return _directory("XDG_STATE_HOME", ".local/state")


def expanded(path: str) -> Path:
    """`path` with a leading `~` or `~name` as the home of that user.

    Raises `OSError` where there is none.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(None, str(error), path) from None


def _directory(variable: str, below_home: str) -> Path:
    base = os.environ.get(variable, "")
    # A relative one is to be ignored.
    return Path(base, "k3rs") if Path(base).is_absolute() else expanded(f"~/{below_home}/k3rs")
