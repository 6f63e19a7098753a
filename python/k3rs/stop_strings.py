"""Ending a stream of text at given strings."""

from collections.abc import Iterable

from k3rs.exceptions import InputError

__all__ = ["StopStrings"]


class StopStrings:
    """Releases text as it comes, but never a part of a stop string.

    Text that could be the start of a stop string is held back until decided. The
    string whose last character comes first wins, so the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        if "" in self._strings:
            raise InputError(
                "expected stop strings of at least one character, found an empty one",
                hint="leave the empty string out",
            )
        self._held = ""
        self.matched = False
        """Whether a stop string has been met; no text is released after it."""

    def push(self, text: str) -> str:
        """Takes the next piece and returns what may be shown."""
        if self.matched:
            return ""
        self._held += text
        ends = [
            (start + len(string), start)
            for string in self._strings
            if (start := self._held.find(string)) >= 0
        ]
        if ends:
            self.matched = True
            released, self._held = self._held[: min(ends)[1]], ""
            return released
        keep = max((self._overlap(string) for string in self._strings), default=0)
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        released, self._held = self._held, ""
        return released

    def _overlap(self, string: str) -> int:
        """Length of the longest proper prefix of `string` that ends the held text."""
        longest = min(len(string) - 1, len(self._held))
        for length in range(longest, 0, -1):
            if self._held.endswith(string[:length]):
                return length
        return 0
