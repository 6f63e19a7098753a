"""Conversations to token ids, in the chat format of Kimi K3.

A prompt is, in this order: the tools, the thinking effort, the conversation, the tool choice,
the response format, and the opening of the answer. There is no token before the first
message and nothing between two of them.

Where the format is silent: parts of a content are segments, each encoded alone; only
tool results that directly follow each other are put in the order of their calls; if one of
them cannot be matched, all stay as they are, and a `name` of their own goes before the
name of the call.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from k3rs.chat.markup import Markup
from k3rs.chat.tools import split_arguments
from k3rs.exceptions import InputError
from k3rs.tokenizer import Tokenizer

__all__ = ["THINKING", "ChatEncoder", "Message", "encode"]

THINKING = ("off", "low", "high", "max")
"""How much the model thinks before it answers."""

Message: TypeAlias = Mapping[str, Any]
"""A message as chat clients write it: `role`, `content`, and what belongs to the role."""

_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_NEW_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_TOOL_CHOICE = {
    "required": "You MUST call tools in the next message.",
    "none": "You MUST NOT call any tools in the next message.",
}
_RAW_JSON = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def encode(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: str = "max",
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
) -> list[int]:
    """The ids of a conversation, up to the place where the model goes on.

    Raises `InputError` for a message or an option that the format has no place for, and
    `ConfigError` if the vocabulary is not one of Kimi K3.
    """
    encoder = ChatEncoder(
        tokenizer,
        thinking=thinking,
        tools=tools,
        tool_choice=tool_choice,
        response_format=response_format,
    )
    return encoder.prompt(messages, generation_prompt=generation_prompt)


class ChatEncoder:
    """Encodes conversations that share their options."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: str = "max",
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> None:
        """`thinking` is one of `THINKING`; the other options are those of chat clients.

        Raises `InputError` for an option that the format does not know.
        """
        if thinking not in THINKING:
            raise _unexpected("thinking", "one of " + ", ".join(THINKING), thinking)
        self._markup = Markup(tokenizer)
        self._thinking = thinking
        self._tools_text = _TOOLS + _fenced_tools(tools, "tools") if tools else None
        self._tool_choice_text = _tool_choice_text(tool_choice)
        self._response_format_text = _response_format_text(response_format)

    @property
    def thinking(self) -> bool:
        """Whether the model thinks, and history shows what it thought."""
        return self._thinking != "off"

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        rendered: Mapping[int, Sequence[int]] | None = None,
        generation_prompt: bool = True,
    ) -> list[int]:
        """All parts of a prompt, in order; `rendered` is that of `messages`."""
        ids = self.preamble() + self.messages(messages, rendered=rendered) + self.epilogue()
        if not generation_prompt:
            return ids
        if messages and messages[-1]["role"] == "assistant":
            raise InputError(
                f"messages[{len(messages) - 1}]: expected a conversation that ends before the "
                "answer, found a message of the assistant as the last one",
                hint="the format has no way to continue a message; leave it out",
            )
        return ids + self.generation_prompt()

    def preamble(self) -> list[int]:
        """What stands before the conversation: the tools and the thinking effort."""
        ids = self._internal("tool-declare", self._tools_text)
        effort = _EFFORT.format(self._thinking) if self.thinking else None
        return ids + self._internal("thinking-effort", effort)

    def messages(
        self,
        messages: Sequence[Message],
        *,
        rendered: Mapping[int, Sequence[int]] | None = None,
    ) -> list[int]:
        """The conversation itself.

        `rendered` gives ids for some messages by their place, each from the opening of the
        message to `<|end_of_msg|>`: those that the model wrote need not be those of its text.
        Tool results are always encoded here.
        """
        _require_list(messages, "messages", "a list of messages")
        given = rendered or {}
        ids: list[int] = []
        results: dict[str, Message] = {}
        calls: list[tuple[str | None, str]] = []
        result_count = 0
        for index, message in enumerate(messages):
            place = f"messages[{index}]"
            role = _role(message, place)
            if role == "tool":
                results[place] = message
                continue
            ids += self._tool_results(results, calls, result_count)
            result_count += len(results)
            results = {}
            if role == "assistant":
                calls, result_count = _calls(message, place), 0
            ids += given[index] if index in given else self.message(message, place=place)
        return ids + self._tool_results(results, calls, result_count)

    def message(self, message: Message, *, place: str = "message") -> list[int]:
        """One message of any role but `tool`, which only `messages` can number and name.

        `place` says in errors which message it is.
        """
        role = _role(message, place)
        if role == "tool":
            raise _unexpected(place, "a message that stands alone", "a tool result")
        if role == "assistant":
            return self._assistant(message, place)
        if role == "system" and message.get("tools"):
            for key in ("content", "name"):
                if message.get(key):
                    raise _unexpected(f"{place}.{key}", "nothing beside `tools`", message[key])
            text = _NEW_TOOLS + _fenced_tools(message["tools"], f"{place}.tools")
            return self._internal("tool-declare", text)
        body = self._content(message.get("content"), f"{place}.content")
        return self._markup.message(_attributes(role, message, place), body)

    def epilogue(self) -> list[int]:
        """What stands after the conversation: the tool choice and the response format."""
        ids = self._internal("tool-choice", self._tool_choice_text)
        return ids + self._internal("response-format", self._response_format_text)

    def generation_prompt(self) -> list[int]:
        """The opening of the answer, after which the model goes on."""
        channel = "think" if self.thinking else "response"
        return self._markup.open("message", [("role", "assistant")]) + self._markup.open(channel)

    def notes(self, messages: Sequence[Message]) -> list[str]:
        """What the user should know about a conversation that `messages` accepts.

        Clients that drop the reasoning of earlier answers change the prompt.
        """
        lacking = [
            f"messages[{index}]"
            for index, message in enumerate(messages)
            if message["role"] == "assistant" and _reasoning(message) is None
        ]
        if not self.thinking or not lacking:
            return []
        return [f"answers without `reasoning_content`, encoded as empty: {', '.join(lacking)}"]

    def _internal(self, kind: str, text: str | None) -> list[int]:
        """A message of the system about the system; nothing if it has no text."""
        if text is None:
            return []
        attributes = [("role", "system"), ("type", kind)]
        return self._markup.message(attributes, self._markup.text(text, kind))

    def _assistant(self, message: Message, place: str) -> list[int]:
        if message.get("partial"):
            raise InputError(
                f"{place}.partial: expected a complete message of the assistant, found a partial",
                hint="the format has no way to continue a message; leave it out",
            )
        markup = self._markup
        content = message.get("content")
        body: list[int] = []
        if self.thinking:
            reasoning = _reasoning(message)
            thought = "" if reasoning is None else reasoning
            body += markup.element("think", self._content(thought, f"{place}.reasoning_content"))
        response = self._content("" if content is None else content, f"{place}.content")
        body += markup.element("response", response)
        calls = message.get("tool_calls") or []
        names = [name for _, name in _calls(message, place)]
        elements: list[int] = []
        for index, (name, call) in enumerate(zip(names, calls, strict=True)):
            arguments = self._arguments(call["function"], f"{place}.tool_calls[{index}]")
            attributes = [("tool", name), ("index", str(index + 1))]
            elements += markup.element("call", arguments, attributes)
        if calls:
            body += markup.element("tools", elements)
        return markup.message(_attributes("assistant", message, place), body)

    def _arguments(self, function: Mapping[str, Any], place: str) -> list[int]:
        markup = self._markup
        place = f"{place}.function.arguments"
        source = function.get("arguments")
        arguments = split_arguments(source, place)
        if arguments is None:
            return markup.element(
                "json", self._markup.text(str(source), place), [("type", "object")]
            )
        ids: list[int] = []
        for key, argument in arguments.items():
            attributes = [("key", key), ("type", argument.kind)]
            value = self._markup.text(argument.value, f"{place}.{key}")
            ids += markup.element("argument", value, attributes)
        return ids

    def _tool_results(
        self, results: Mapping[str, Message], calls: list[tuple[str | None, str]], counted: int
    ) -> list[int]:
        """Results by their places, the first of them number `counted + 1` since the calls."""
        known = [call_id for call_id, _ in calls if call_id is not None]
        name_of = {call_id: name for call_id, name in calls if call_id is not None}
        found = [
            (place, result, _optional_text(result, "tool_call_id", place))
            for place, result in results.items()
        ]
        all_match = all(call_id in name_of for _, _, call_id in found)
        if all_match:
            found.sort(key=lambda each: known.index(each[2] or ""))
        ids: list[int] = []
        for index, (place, result, call_id) in enumerate(found, start=counted + 1):
            own = _optional_text(result, "name", place)
            called = name_of.get(call_id or "")
            name = called if all_match else own or called
            if not name:
                raise InputError(
                    f"{place}: expected a tool result with a `tool_call_id` of the last "
                    f"assistant message or a `name`, found {call_id!r} and no name",
                    hint="give the result the id of the call that it answers",
                )
            attributes = [("role", "tool"), ("tool", name), ("index", str(index))]
            body = self._content(result.get("content"), f"{place}.content")
            ids += self._markup.message(attributes, body)
        return ids

    def _content(self, content: object, place: str) -> list[int]:
        """Text, or a list of text parts."""
        if isinstance(content, str):
            return self._markup.text(content, place)
        if not isinstance(content, list):
            raise _unexpected(place, "text or a list of text parts", content)
        ids: list[int] = []
        for index, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind is not None and kind != "text":
                raise InputError(
                    f"{place}[{index}]: expected a part of type `text`, found {kind!r}",
                    hint="only text can be encoded; leave images and other media out",
                )
            if kind is None or not isinstance(part.get("text"), str):
                raise _unexpected(f"{place}[{index}]", "a text part", part)
            ids += self._markup.text(part["text"], f"{place}[{index}]")
        return ids


def _unexpected(place: str, expected: str, found: object) -> InputError:
    """The error for a value at `place` that is not of the expected form."""
    shown = "nothing" if found is None else repr(found)
    return InputError(
        f"{place}: expected {expected}, found {shown if len(shown) <= 80 else shown[:80] + '...'}",
        hint="messages and options are those of the OpenAI chat interface",
    )


def _require_list(value: object, place: str, expected: str) -> Sequence[object]:
    if isinstance(value, list | tuple):
        return value
    raise _unexpected(place, expected, value)


def _role(message: object, place: str) -> str:
    """The role as it is encoded: `developer` is another name for `system`."""
    if not isinstance(message, Mapping):
        raise _unexpected(place, "a message, an object with a `role`", message)
    role = message.get("role")
    if role == "developer":
        return "system"
    if role not in ("user", "system", "assistant", "tool"):
        expected = "one of user, system, developer, assistant, tool"
        raise _unexpected(f"{place}.role", expected, role)
    return str(role)


def _attributes(role: str, message: Message, place: str) -> list[tuple[str, str]]:
    name = _optional_text(message, "name", place)
    return [("role", role), ("name", name)] if name else [("role", role)]


def _optional_text(message: Message, key: str, place: str) -> str | None:
    value = message.get(key)
    if value is None or isinstance(value, str):
        return value
    raise _unexpected(f"{place}.{key}", "text", value)


def _reasoning(message: Message) -> object:
    """What an assistant message says of the model's thoughts; `None` if nothing."""
    reasoning = message.get("reasoning_content")
    return message.get("reasoning") if reasoning is None else reasoning


def _calls(message: Message, place: str) -> list[tuple[str | None, str]]:
    """Id and name of each call of an assistant message."""
    calls = message.get("tool_calls") or []
    _require_list(calls, f"{place}.tool_calls", "a list of calls")
    found: list[tuple[str | None, str]] = []
    seen: set[str] = set()
    for index, call in enumerate(calls):
        here = f"{place}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise _unexpected(here, "a call with a `function`", call)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise _unexpected(f"{here}.function.name", "the name of a tool", name)
        call_id = _optional_text(call, "id", here)
        if call_id is not None and call_id in seen:
            raise _unexpected(f"{here}.id", "a different id for each call", call_id)
        seen.update(() if call_id is None else (call_id,))
        found.append((call_id, name))
    return found


def _fenced_json(value: object, place: str) -> str:
    """A fenced block of compact JSON, keys sorted at every depth."""
    try:
        text = json.dumps(
            value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise _unexpected(place, "values that JSON can express", str(error)) from None
    return f"```json\n{text}\n```"


def _fenced_tools(tools: object, place: str) -> str:
    for index, tool in enumerate(_require_list(tools, place, "a list of tools")):
        if not isinstance(tool, Mapping):
            raise _unexpected(f"{place}[{index}]", "a tool, an object", tool)
    return _fenced_json(tools, place)


def _tool_choice_text(choice: object) -> str | None:
    if choice is None or choice == "auto":
        return None
    if not isinstance(choice, str) or choice not in _TOOL_CHOICE:
        raise _unexpected("tool_choice", "one of auto, required, none", choice)
    return f"The system is invoked with `tool_choice={choice}`.\n{_TOOL_CHOICE[choice]}"


def _response_format_text(response_format: object) -> str | None:
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if response_format is None or kind == "text":
        return None
    if not isinstance(response_format, Mapping) or kind not in ("json_object", "json_schema"):
        expected = "an object of type text, json_object or json_schema"
        raise _unexpected("response_format", expected, response_format)
    if kind == "json_object":
        return _RAW_JSON.format(kind)
    described = response_format.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, Mapping):
        raise _unexpected("response_format.json_schema.schema", "a JSON schema", schema)
    return _RAW_JSON.format(kind) + _SCHEMA + _fenced_json(schema, "response_format")
