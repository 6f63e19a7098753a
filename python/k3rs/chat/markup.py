"""The building blocks of the Kimi K3 chat format.

    open(tag, attributes) = <|open|> tag { ` key` `="` value `"` } <|sep|>
    close(tag)            = <|close|> tag <|sep|>
    end                   = <|end_of_msg|>

Each tag, key, quote and value is a segment that is encoded alone: byte pairs never merge
across two of them, and joining segments first would give other ids. Text is never searched
for markers, so nothing that a user or a tool writes can become structure.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from k3rs.exceptions import ConfigError, InputError
from k3rs.tokenizer import Tokenizer

__all__ = ["MARKER_SLOTS", "Header", "Markup", "escape", "parse_header", "unescape"]

MARKER_SLOTS = {
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
}
"""The markers of the format: their text, and their place after the ordinary tokens."""

_HEADER = re.compile(r'([^\s"=]+)((?: [^\s"=]+="[^"]*")*)')
_ATTRIBUTE = re.compile(r' ([^\s"=]+)="([^"]*)"')


class Markup:
    """The markers of one vocabulary, and the layout made of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `ConfigError` if a marker is missing or has another id than in Kimi K3."""
        self._encode = tokenizer.encode
        for text in MARKER_SLOTS:
            _require_marker(tokenizer, text)
        ids = tokenizer.special_ids
        self.open_id = ids["<|open|>"]
        self.close_id = ids["<|close|>"]
        self.separator_id = ids["<|sep|>"]
        self.end_id = ids["<|end_of_msg|>"]
        self.stop_ids = frozenset((ids["[EOS]"], self.end_id))
        """Both end a reply. The model writes either of them after a finished message."""

    def text(self, text: str, place: str) -> list[int]:
        """The ids of one segment of text.

        Raises `InputError`, with `place`, for text that has no ids, as a lone surrogate.
        """
        try:
            return self._encode(text)
        except InputError as error:
            raise InputError(f"{place}: {error}", hint=error.hint) from None

    def open(self, tag: str, attributes: Iterable[tuple[str, str]] = ()) -> list[int]:
        """The opening of an element."""
        ids = [self.open_id, *self._encode(tag)]
        for key, value in attributes:
            ids += self._encode(f" {key}") + self._encode('="')
            ids += self.text(escape(value), f"`{key}` of a `{tag}`") + self._encode('"')
        return [*ids, self.separator_id]

    def close(self, tag: str) -> list[int]:
        """The closing of an element."""
        return [self.close_id, *self._encode(tag), self.separator_id]

    def element(
        self, tag: str, body: list[int], attributes: Iterable[tuple[str, str]] = ()
    ) -> list[int]:
        """An element with `body` between its opening and its closing."""
        return self.open(tag, attributes) + body + self.close(tag)

    def message(self, attributes: Iterable[tuple[str, str]], body: list[int]) -> list[int]:
        """A whole message, up to and with `<|end_of_msg|>`."""
        return [*self.element("message", body, attributes), self.end_id]


@dataclass(frozen=True)
class Header:
    """What stands between a marker and `<|sep|>`; attribute values are unescaped."""

    tag: str
    attributes: dict[str, str]


def parse_header(text: str) -> Header | None:
    """Reads the text between a marker and `<|sep|>`; `None` if it is not written like one."""
    match = _HEADER.fullmatch(text)
    if match is None:
        return None
    attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(match[2])}
    return Header(match[1], attributes)


def escape(value: str) -> str:
    """The text of an attribute value between its quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(text: str) -> str:
    """The inverse of `escape`, in the opposite order: `&amp;quot;` is `&quot;`, not a quote."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _require_marker(tokenizer: Tokenizer, text: str) -> None:
    """Raises `ConfigError` unless the special token `text` is where Kimi K3 has it."""
    expected = tokenizer.rank_count + MARKER_SLOTS[text]
    ids = tokenizer.special_ids
    if ids.get(text) == expected:
        return
    there = next((f"`{other}`" for other, its_id in ids.items() if its_id == expected), "nothing")
    elsewhere = f"`{text}` at {ids[text]}" if text in ids else f"no `{text}` anywhere"
    raise ConfigError(
        f"chat: expected token {expected} to be `{text}`, found {there} there, and {elsewhere}",
        # Kimi K2 uses the same ids with other meanings: they would all be accepted.
        hint="this is not a Kimi K3 vocabulary; take both files from the K3 repository",
    )
