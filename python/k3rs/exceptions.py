"""The exceptions of k3rs: one family, each member also the builtin it resembles.

`str(error)` is the message alone: what was expected, what was found, and where.
What to do about it is kept apart in `hint`, so that a program can show it on a line
of its own. The Rust core raises the same classes, with the same positional arguments.
"""


class K3Error(Exception):
    """Base of everything that k3rs raises on purpose.

    `hint` says what the user can do about it, or is `None` where nothing useful is known.
    """

    hint: str | None

    def __init__(self, message: str, hint: str | None = None) -> None:
        # Only the message becomes an argument: `OSError` would read two as errno and text.
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(K3Error, ValueError):
    """A configuration, or an option, asks for something that is not supported or not understood."""


class CheckpointError(K3Error, OSError):
    """A file of the checkpoint is missing, broken, or not of the released layout."""


class MemoryBudgetError(K3Error, MemoryError):
    """The work would not fit the memory budget. Raised before anything is loaded.

    `budget_bytes` is what was asked for, `minimum_bytes` the smallest budget that would be
    accepted; either is `None` where it is not known.
    """

    budget_bytes: int | None
    minimum_bytes: int | None

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        budget_bytes: int | None = None,
        minimum_bytes: int | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes


class NumericalFault(K3Error, ArithmeticError):
    """The model computed NaN or an infinity; no token is derived from such logits."""


class InputError(K3Error, ValueError):
    """An argument of a call is unusable: a token id out of range, text that has no encoding."""


class TraceError(K3Error, ValueError):
    """A file of expert requests is not what it should be, or not complete."""


class SessionError(K3Error, RuntimeError):
    """A session cannot continue: it was interrupted in mid-sweep, or belongs to another model."""


class SessionFileError(SessionError, OSError):
    """A saved session cannot be read or written, or belongs to another model or arithmetic."""


class ReadError(K3Error, OSError):
    """The operating system failed to read weights that are known to be there."""
