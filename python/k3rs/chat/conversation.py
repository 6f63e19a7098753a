"""What was said so far, as messages for people and as ids for the model.

A reply of the model is kept with the ids that the model wrote. They need not be those of
its text, and only they are what its memory stands for.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from k3rs.chat.encoding import ChatEncoder, Message
from k3rs.chat.reply import ReplyParser
from k3rs.exceptions import InputError
from k3rs.tokenizer import Tokenizer

__all__ = ["Conversation"]

_FORMAT = "k3rs chat 1"


@dataclass(frozen=True)
class _Rendering:
    """Ids of a reply, which fit only prompts that think as the one before it did."""

    ids: list[int]
    thinking: bool


class Conversation:
    """Messages that grow at the end. `tokenizer` has the markers of Kimi K3."""

    def __init__(
        self, tokenizer: Tokenizer, *, system: str | None = None, thinking: str = "max"
    ) -> None:
        """`system` is the first message, `thinking` one of `chat.THINKING`.

        Raises `InputError` for another word, `ConfigError` for another vocabulary.
        """
        self._tokenizer = tokenizer
        self._encoder = ChatEncoder(tokenizer, thinking=thinking)
        self._thinking = thinking
        self._messages: list[dict[str, Any]] = []
        self._renderings: dict[int, _Rendering] = {}
        self.system = system

    @property
    def thinking(self) -> str:
        """How much the model thinks from now on."""
        return self._thinking

    @thinking.setter
    def thinking(self, thinking: str) -> None:
        self._encoder = ChatEncoder(self._tokenizer, thinking=thinking)
        self._thinking = thinking

    @property
    def messages(self) -> list[Message]:
        """What was said, the system's message first, in the form that `chat.encode` takes."""
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*head, *self._messages]

    @property
    def turn_count(self) -> int:
        """How many messages of the user there are."""
        return sum(message["role"] == "user" for message in self._messages)

    def copy(self) -> "Conversation":
        """The same conversation, which from now on grows on its own."""
        copied = Conversation(self._tokenizer, system=self.system, thinking=self._thinking)
        copied._messages = list(self._messages)
        copied._renderings = dict(self._renderings)
        return copied

    def parser(self) -> ReplyParser:
        """A parser for the reply that the next prompt asks for."""
        return ReplyParser(
            self._tokenizer, starts_in="think" if self._encoder.thinking else "response"
        )

    def prompt(self) -> list[int]:
        """The ids after which the model answers."""
        return self._encoder.prompt(self.messages, rendered=self._rendered())

    def history(self) -> list[int]:
        """The ids of what was said, without the opening of an answer."""
        return self._encoder.prompt(
            self.messages, rendered=self._rendered(), generation_prompt=False
        )

    def ask(self, text: str) -> None:
        """Adds a message of the user. Raises `InputError` for text that has no ids."""
        message = {"role": "user", "content": text}
        self._encoder.message(message)
        self._messages.append(message)

    def answer(self, parser: ReplyParser) -> None:
        """Adds the reply that `parser` has taken in full."""
        ids = self._encoder.generation_prompt() + parser.history_ids()
        self._renderings[len(self._messages)] = _Rendering(ids, self._encoder.thinking)
        self._messages.append(parser.reply().as_message())

    def take_back(self) -> Message | None:
        """Removes the last message and returns it; `None` if there is none."""
        if not self._messages:
            return None
        message = self._messages.pop()
        self._renderings.pop(len(self._messages), None)
        return message

    def to_json(self) -> str:
        """All of it as text, for `from_json`."""
        renderings = [self._renderings.get(place) for place in range(len(self._messages))]
        turns = [
            {"message": message}
            if rendering is None
            else {"message": message, "ids": rendering.ids, "thinking": rendering.thinking}
            for message, rendering in zip(self._messages, renderings, strict=True)
        ]
        facts = {
            "format": _FORMAT,
            "system": self.system,
            "thinking": self._thinking,
            "turns": turns,
        }
        return json.dumps(facts, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, tokenizer: Tokenizer) -> "Conversation":
        """What `to_json` gave. Raises `InputError` for anything else."""
        try:
            return cls._from_facts(json.loads(text), tokenizer)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"expected a conversation (`{_FORMAT}`), found another text",
                hint="give a file that a chat was saved to",
            ) from error

    @classmethod
    def _from_facts(cls, facts: dict[str, Any], tokenizer: Tokenizer) -> "Conversation":
        if facts["format"] != _FORMAT:
            raise ValueError(facts["format"])
        conversation = cls(tokenizer, system=facts["system"], thinking=facts["thinking"])
        for place, turn in enumerate(facts["turns"]):
            conversation._messages.append(turn["message"])
            if "ids" in turn:
                tokenizer.decode_bytes(turn["ids"])
                rendering = _Rendering(list(turn["ids"]), bool(turn["thinking"]))
                conversation._renderings[place] = rendering
        # What is not a conversation cannot be encoded.
        conversation.history()
        return conversation

    def _rendered(self) -> dict[int, Sequence[int]]:
        """The model's own ids by place in `messages`, as far as they fit the present prompt."""
        first = 0 if self.system is None else 1
        return {
            first + place: rendering.ids
            for place, rendering in self._renderings.items()
            if rendering.thinking == self._encoder.thinking
        }
