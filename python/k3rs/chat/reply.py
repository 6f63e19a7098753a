"""What the model writes after the generation prompt, as text and tool calls while it comes.

A whole reply is

    ...reasoning... close(think) open(response) ...answer... close(response)
    [ open(tools) { call } close(tools) ] close(message)

and then a stop id. Structure is recognised by token id alone: the characters `<|close|>`
are text. What a model may get wrong is tolerated and noted, each kind of mistake once:

* a section begins where it is opened, also if the one before was not closed;
* a known tag in the wrong place, a marker that does not become a tag, and special tokens
  without a meaning here are left out;
* an unknown tag is kept as text, but never its markers;
* in an argument only its own closing has a meaning: all else is kept, markers as their text;
* a call that is not finished, or lacks a name, is left out.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

from k3rs.chat.markup import Header, Markup, parse_header
from k3rs.chat.tools import CallBuilder, ToolCall
from k3rs.exceptions import InputError
from k3rs.text_stream import TextStream
from k3rs.tokenizer import Tokenizer

__all__ = ["Channel", "Event", "FinishReason", "Reply", "ReplyParser", "TextPiece"]

Channel: TypeAlias = Literal["reasoning", "content"]
FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]

TAG_IDS_MAX = 256
"""A marker with more ids than this behind it is no tag: text is not held back for ever."""


@dataclass(frozen=True)
class TextPiece:
    """Text that the model wrote, never empty."""

    channel: Channel
    text: str


Event: TypeAlias = TextPiece | ToolCall
"""What a token can complete."""


@dataclass(frozen=True)
class Reply:
    """A whole reply. `notes` says what about it was not as it should be."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    notes: tuple[str, ...]

    def as_message(self) -> dict[str, Any]:
        """The reply as a message of the assistant that `encode` accepts."""
        message: dict[str, Any] = {
            "role": "assistant",
            "reasoning_content": self.reasoning,
            "content": self.content,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


class _Section(Enum):
    """Where the parser is, by the tag that closes it."""

    BODY = "message"
    THINK = "think"
    RESPONSE = "response"
    TOOLS = "tools"
    CALL = "call"
    ARGUMENT = "argument"
    JSON = "json"


_SECTIONS = {each.value: each for each in (_Section.THINK, _Section.RESPONSE, _Section.TOOLS)}
_KNOWN_TAGS = frozenset(each.value for each in _Section)
_CHANNELS: dict[_Section, Channel] = {_Section.THINK: "reasoning", _Section.RESPONSE: "content"}
_VALUES = (_Section.ARGUMENT, _Section.JSON)


@dataclass(frozen=True)
class _Place:
    """A point of the reply that history can be continued from."""

    count: int
    section: _Section


@dataclass(frozen=True)
class _Tag:
    """A marker, its place among the ids, and the ids behind it."""

    marker: int
    start: int
    ids: list[int]


class ReplyParser:
    """Takes the ids of a reply one by one; made for one reply."""

    def __init__(
        self, tokenizer: Tokenizer, *, starts_in: Literal["think", "response"] = "think"
    ) -> None:
        """`starts_in` is the channel that the generation prompt opened.

        Raises `ConfigError` if the vocabulary is not one of Kimi K3.
        """
        if starts_in not in ("think", "response"):
            raise InputError(
                f"starts_in: expected think or response, found {starts_in!r}",
                hint="a reply starts in the channel that the prompt ends with",
            )
        self.ended = False
        """Whether the message is complete, or the model gave a stop id; then ids are ignored."""
        self._tokenizer = tokenizer
        self._markup = Markup(tokenizer)
        self._padding_id = tokenizer.special_ids.get("[PAD]")
        self._section = _SECTIONS[starts_in]
        self._fresh = True  # nothing was written in this section yet
        self._answered = starts_in == "response"
        self._closed = False
        self._tag: _Tag | None = None
        self._raw: list[int] = []
        self._streams: dict[Channel, TextStream] = {
            "reasoning": TextStream(tokenizer),
            "content": TextStream(tokenizer),
        }
        self._texts: dict[Channel, list[str]] = {"reasoning": [], "content": []}
        self._call = CallBuilder(None)
        self._argument: dict[str, str] = {}
        self._value = bytearray()
        self._calls: list[ToolCall] = []
        self._before_call = _Place(0, self._section)
        self._notes: dict[str, str] = {}
        self._cut_at_length = False

    def push(self, token_id: int) -> list[Event]:
        """What `token_id` completes. Raises `InputError` if the vocabulary has no such id."""
        self._tokenizer.token_bytes(token_id)
        if self.ended or token_id in self._markup.stop_ids:
            self.ended = True
            return []
        self._raw.append(token_id)
        if token_id == self._markup.separator_id:
            return self._end_tag()
        if token_id in (self._markup.open_id, self._markup.close_id):
            events = self._give_up_tag(keep=False)
            self._tag = _Tag(token_id, len(self._raw) - 1, [])
            return events
        if token_id >= self._tokenizer.rank_count:
            self._note_special(token_id)
            return []
        if self._tag is None:
            return self._write([token_id])
        self._tag.ids.append(token_id)
        return self._give_up_tag(keep=True) if len(self._tag.ids) > TAG_IDS_MAX else []

    def finish(self, *, length: bool) -> list[Event]:
        """Ends the reply; `length` says that it was cut off because it got too long.

        Gives the rest of the text: one U+FFFD if it stops within a character.
        """
        self._cut_at_length = length and not self.ended
        if self._tag is not None and not self._cut_at_length:
            self._note("unfinished tag", "a tag that was not finished is left out")
        if self._section in (_Section.CALL, *_VALUES):
            self._leave_out_call("it was not finished")
        if self._section is _Section.THINK:
            self._note("no answer", "the reply ends within the reasoning: there is no answer")
        return self._flush()

    def reply(self) -> Reply:
        """All of the reply, after `finish`."""
        reason: FinishReason = "tool_calls" if self._calls else "stop"
        return Reply(
            reasoning="".join(self._texts["reasoning"]),
            content="".join(self._texts["content"]),
            tool_calls=tuple(self._calls),
            finish_reason="length" if self._cut_at_length else reason,
            notes=tuple(self._notes.values()),
        )

    def kept_count(self) -> int:
        """How many of the ids taken so far belong into history.

        Not among them are a stop id and what follows it, a tag that is not finished, and
        a tool call that is not finished, with all that follows its beginning.
        """
        return self._last_place().count

    def closing_ids(self) -> list[int]:
        """The ids that complete the message after the first `kept_count` ids."""
        markup = self._markup
        if self._closed:
            return [markup.end_id]
        section = self._last_place().section
        ids = [] if section is _Section.BODY else markup.close(section.value)
        if section in (_Section.THINK, _Section.BODY) and not self._answered:
            ids += markup.element("response", [])
        return [*ids, *markup.close("message"), markup.end_id]

    def history_ids(self) -> list[int]:
        """The reply as it stands in history, from after the generation prompt to the end.

        These are the ids that the model wrote, which need not be those of their text.
        """
        return self._raw[: self.kept_count()] + self.closing_ids()

    def _last_place(self) -> _Place:
        if self._section in (_Section.TOOLS, _Section.CALL, *_VALUES) and not self._closed:
            return self._before_call
        count = len(self._raw) if self._tag is None else self._tag.start
        return _Place(count, self._section)

    def _end_tag(self) -> list[Event]:
        """Acts on `<|sep|>`."""
        tag, self._tag = self._tag, None
        if tag is None:
            if self._section in _VALUES:
                self._keep_in_value([self._markup.separator_id])
            else:
                self._note("stray", "a marker without a tag is left out")
            return []
        text = self._tokenizer.decode(tag.ids)
        header = parse_header(text)
        closes = tag.marker == self._markup.close_id
        if self._section in _VALUES:
            if closes and header == Header(self._section.value, {}):
                self._end_value()
            else:
                self._keep_in_value([tag.marker, *tag.ids, self._markup.separator_id])
            return []
        if header is None or header.tag not in _KNOWN_TAGS:
            self._note("unknown", f"an unknown tag is kept as text: {text[:40]!r}")
            return self._write(tag.ids)
        return self._close(header.tag) if closes else self._open(header, tag.start)

    def _open(self, header: Header, start: int) -> list[Event]:
        section = _Section(header.tag)
        in_call = self._section is _Section.CALL
        if header.tag in _SECTIONS and not in_call:
            return self._open_section(section, start)
        if section is _Section.CALL and (in_call or self._section is _Section.TOOLS):
            if in_call:
                self._leave_out_call("it was not closed")
            self._call = CallBuilder(header.attributes.get("tool"))
            self._section, self._fresh = _Section.CALL, False
        elif section in _VALUES and in_call:
            self._argument = header.attributes
            self._value.clear()
            self._section = section
        else:
            self._note_misplaced(header.tag)
        return []

    def _open_section(self, section: _Section, start: int) -> list[Event]:
        left = self._section
        if left is section:
            # Some runs of the model repeat the opening that the prompt ends with.
            if not self._fresh:
                self._note_misplaced(section.value)
            return []
        if left is not _Section.BODY and (left, section) != (_Section.RESPONSE, _Section.TOOLS):
            self._note("unclosed", f"`{left.value}` was not closed before `{section.value}`")
        events = self._flush()
        if section is _Section.TOOLS:
            self._before_call = _Place(start, left)
        self._answered = self._answered or section is _Section.RESPONSE
        self._section, self._fresh = section, True
        return events

    def _close(self, name: str) -> list[Event]:
        if name == "message":
            if self._section is _Section.CALL:
                self._leave_out_call("it was not closed")
                self._section = _Section.TOOLS
            self._closed = self.ended = True
            return []
        if self._section is _Section.CALL and name == "tools":
            self._leave_out_call("it was not closed")
            self._section = _Section.TOOLS
        if name != self._section.value:
            self._note_misplaced(name)
            return []
        if self._section is _Section.CALL:
            return self._end_call()
        self._answered = self._answered or self._section is _Section.TOOLS
        events = self._flush()
        self._section = _Section.BODY
        return events

    def _end_value(self) -> None:
        value = self._value.decode("utf-8", "replace")
        if self._section is _Section.JSON:
            self._call.raw_json(value)
        else:
            self._call.argument(self._argument.get("key"), self._argument.get("type"), value)
        self._section = _Section.CALL

    def _end_call(self) -> list[Event]:
        self._section = _Section.TOOLS
        self._before_call = _Place(len(self._raw), _Section.TOOLS)
        call = self._call.finish(f"call_{len(self._calls) + 1}")
        if call is None:
            self._leave_out_call(str(self._call.fault))
            return []
        self._calls.append(call)
        return [call]

    def _write(self, ids: list[int]) -> list[Event]:
        """Takes ids that are text where they stand."""
        channel = _CHANNELS.get(self._section)
        if channel is not None:
            self._fresh = False
            text = "".join(map(self._streams[channel].push, ids))
            return self._piece(channel, text)
        data = self._tokenizer.decode_bytes(ids)
        if self._section in _VALUES:
            self._value += data
        elif data.strip():
            self._note("outside", "text outside of reasoning, answer and arguments is left out")
        return []

    def _keep_in_value(self, ids: list[int]) -> None:
        self._call.note("a marker inside an argument is kept as text")
        self._write(ids)

    def _give_up_tag(self, *, keep: bool) -> list[Event]:
        """Does without a tag that did not come to its end; `keep` says that it was text."""
        tag, self._tag = self._tag, None
        if tag is None:
            return []
        if self._section in _VALUES:
            self._keep_in_value([tag.marker, *tag.ids])
            return []
        self._note("stray", "a marker without a tag is left out")
        return self._write(tag.ids) if keep else []

    def _flush(self) -> list[Event]:
        """The end of the text of the section that is left."""
        channel = _CHANNELS.get(self._section)
        return [] if channel is None else self._piece(channel, self._streams[channel].finish())

    def _piece(self, channel: Channel, text: str) -> list[Event]:
        if not text:
            return []
        self._texts[channel].append(text)
        return [TextPiece(channel, text)]

    def _leave_out_call(self, reason: str) -> None:
        self._note("call", f"a call of {self._call.name or 'no tool'!r} is left out: {reason}")

    def _note_misplaced(self, name: str) -> None:
        self._note("misplaced", f"a tag in the wrong place is left out: `{name}`")

    def _note_special(self, token_id: int) -> None:
        name = self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        if token_id == self._padding_id:
            self._note("padding", f"`{name}` ({token_id}) is left out: a sign of a numerical fault")
        else:
            self._note("special", f"a special token is left out: `{name}` ({token_id})")

    def _note(self, kind: str, text: str) -> None:
        """Reports a kind of mistake the first time."""
        self._notes.setdefault(kind, text)
