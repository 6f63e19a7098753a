"""How work on many large files reports what it does; the base class reports nothing."""

__all__ = ["FileProgress"]


class FileProgress:
    """Receives what happens to the files of a download or a check.

    Called from several threads at once. Sizes are in bytes.
    """

    def begin(
        self, doing: str, done: str, file_count: int, size_bytes: int, done_bytes: int
    ) -> None:
        """What is being done, with how many files and bytes, of which some are done already.

        `done` is what a file is at its end.
        """

    def start(self, path: str, size_bytes: int, done_bytes: int) -> None:
        """Work on a file begins."""

    def advance(self, path: str, count_bytes: int) -> None:
        """More of a file is done, or less if `count_bytes` is negative."""

    def finish(self, path: str) -> None:
        """Work on a file is at its end."""

    def abandon(self, path: str) -> None:
        """Work on a file ends before that."""

    def note(self, text: str) -> None:
        """Something that a person may want to know now."""
