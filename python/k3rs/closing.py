"""Things that hold something until they are closed."""

from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing:
    """A context manager that calls `close` at its end."""

    def close(self) -> None:
        """Lets go of what is held. Doing so again changes nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
