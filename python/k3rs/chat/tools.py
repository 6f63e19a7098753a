"""Arguments of tool calls: JSON for programs, one element a value for the model.

In the markup a string is its own text and any other value is JSON. A number keeps the
digits it was written with, in both directions: `1.0`, `1e400` and integers of any length
would not survive Python's numbers. Of JSON text that a client sends, everything else takes
the one form of `json.dumps`: `, ` and `: ` between values, non-ASCII characters as they are.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType

from k3rs.exceptions import InputError

__all__ = ["Argument", "CallBuilder", "ToolCall", "split_arguments"]

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN = re.compile(_STRING + r'|[,:]|[^\s",:]+')


# A boolean is an integer to Python, so its line comes first.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "null": NoneType,
    "number": (int, float),
    "object": Mapping,
    "array": (list, tuple),
}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Only the kinds of numbers are looked at: their value might not fit Python's types.
_DECODER = json.JSONDecoder(
    parse_int=lambda _: 0, parse_float=lambda _: 0.0, parse_constant=_refuse_constant
)


@dataclass(frozen=True)
class Argument:
    """One `argument` element: `kind` is the JSON type, `value` the text of its body."""

    kind: str
    value: str


@dataclass(frozen=True)
class ToolCall:
    """A complete call that the model made.

    `arguments` is JSON text for an object, whose values are those that the model wrote;
    if the model gave raw JSON instead of arguments, it is that text, whatever it is.
    `notes` says what about the call was not as it should be.
    """

    id: str
    name: str
    arguments: str
    notes: tuple[str, ...] = ()


def split_arguments(arguments: object, place: str) -> dict[str, Argument] | None:
    """The arguments of a call by name; `None` if they are text that is no JSON object.

    `arguments` is JSON text or a mapping, `place` where it stands, for messages. A name that
    occurs twice in JSON text has its last value. Raises `InputError` for anything else.
    """
    if isinstance(arguments, str):
        return _split_text(arguments)
    if not isinstance(arguments, Mapping):
        raise InputError(
            f"{place}: expected JSON text or an object, found {type(arguments).__name__}",
            hint='write the arguments of a call as "{...}"',
        )
    return {
        _require_name(name, place): Argument(_kind(value), _value_text(value, f"{place}.{name}"))
        for name, value in arguments.items()
    }


@dataclass
class CallBuilder:
    """A call of which elements arrive one by one."""

    name: str | None
    fault: str | None = None
    """Why this cannot be a call, whatever follows."""
    _members: dict[str, str] = field(default_factory=dict)
    _raw: str | None = None
    _notes: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            self.fault = "it names no tool"

    def note(self, text: str) -> None:
        """Reports something about this call, once."""
        self._notes[text] = None

    def argument(self, name: str | None, kind: str | None, value: str) -> None:
        """Takes a finished `argument` element."""
        if name is None:
            self.fault = "an argument has no name"
            return
        if name in self._members:
            self.note(f"argument `{name}` was written twice; the last one counts")
        if kind != "string" and (kind is None or _kind_of_text(value) != kind):
            wanted = "no type" if kind is None else f"type `{kind}`"
            self.note(f"argument `{name}` has {wanted}, which its value does not fit: a string now")
            kind = "string"
        self._members[name] = _quote(value) if kind == "string" else value

    def raw_json(self, text: str) -> None:
        """Takes a finished `json` element, which stands in place of arguments."""
        if _kind_of_text(text) != "object":
            self.note("the arguments are not a JSON object")
        self._raw = text

    def finish(self, call_id: str) -> ToolCall | None:
        """The call as it is known; `None` if there is a `fault`."""
        if self.fault is not None or self.name is None:
            return None
        if self._raw is not None and self._members:
            self.note("raw JSON beside arguments; the raw JSON counts")
        joined = ", ".join(f"{_quote(name)}: {value}" for name, value in self._members.items())
        arguments = f"{{{joined}}}" if self._raw is None else self._raw
        return ToolCall(call_id, self.name, arguments, tuple(self._notes))


def _split_text(text: str) -> dict[str, Argument] | None:
    if _kind_of_text(text) != "object":
        return None
    members: dict[str, Argument] = {}
    position = 0
    # The text is known to be an object, so the next quote outside a value opens a name.
    while (start := text.find('"', position)) >= 0:
        name, position = _DECODER.raw_decode(text, start)
        while text[position] in " \t\r\n:":
            position += 1
        start = position
        value, position = _DECODER.raw_decode(text, start)
        kind = _kind(value)
        if _has_half_pair(name) or (kind == "string" and _has_half_pair(value)):
            return None  # only the text as a whole can be encoded
        members[name] = Argument(
            kind, value if kind == "string" else _respaced(text[start:position])
        )
    return members


def _respaced(source: str) -> str:
    """Valid JSON text in the form of `json.dumps`, with its numbers as they are written."""
    separators = {",": ", ", ":": ": "}
    tokens = _TOKEN.findall(source)
    return "".join(_unescaped(t) if t[0] == '"' else separators.get(t, t) for t in tokens)


def _unescaped(literal: str) -> str:
    """A JSON string without needless escapes."""
    text = _quote(json.loads(literal))
    # Half a surrogate pair has no other form than its escape.
    return literal if _has_half_pair(text) else text


def _has_half_pair(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _kind_of_text(text: str) -> str | None:
    """The JSON type of `text`; `None` if it is not JSON, or nested too deeply to tell."""
    try:
        return _kind(_DECODER.decode(text))
    except (ValueError, RecursionError):
        return None


def _kind(value: object) -> str:
    """The JSON type of a Python value; that of Python if there is none."""
    kinds = (kind for kind, types in _KINDS.items() if isinstance(value, types))
    return next(kinds, type(value).__name__)


def _value_text(value: object, place: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{place}: expected a value that JSON can express, found {type(value).__name__}: "
            f"{error}",
            hint="give the arguments as JSON text",
        ) from None


def _require_name(name: object, place: str) -> str:
    if isinstance(name, str):
        return name
    raise InputError(
        f"{place}: expected names of arguments as text, found {name!r}",
        hint="give the arguments as JSON text",
    )


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
