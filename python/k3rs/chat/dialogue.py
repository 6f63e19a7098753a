"""Talking to a model: turns that cost what they add."""

import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from k3rs.chat.conversation import Conversation
from k3rs.chat.reply import Event, Reply, ReplyParser
from k3rs.exceptions import InputError, SessionFileError
from k3rs.model import Model
from k3rs.prefix_cache import PrefixCache
from k3rs.sampling import Sampler
from k3rs.saved_session import SavedSession
from k3rs.session import Progress

__all__ = ["Dialogue"]


class Dialogue:
    """A conversation with an open model. A context manager.

    The model's memory is kept between turns, so that a turn costs its own ids only. After
    a change of what was said before, it goes on from the longest beginning that is known.

    Example:
        >>> import k3rs
        >>> model = k3rs.Model.open(k3rs.shipped_model(), memory="1GB")
        >>> with k3rs.chat.Dialogue(model, thinking="off") as dialogue:
        ...     for event in dialogue.ask("Hello", max_tokens=8):
        ...         print(event)  # doctest: +SKIP

    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        thinking: str = "max",
        context: int | None = None,
        cache_directory: str | os.PathLike[str] | None = None,
    ) -> None:
        """At most `context` ids are said in all, if it is given: what the model has room for.

        For `cache_directory` see `PrefixCache`. Raises `InputError` if the model has no
        tokenizer or `thinking` is not one of `chat.THINKING`, `ConfigError` if the
        vocabulary is not one of Kimi K3, `OSError` if the cache cannot be made.
        """
        if model.tokenizer is None:
            raise InputError(
                f"{model.path}: expected a tokenizer for a chat, found no tiktoken.model",
                hint="add the vocabulary files of the release",
            )
        self._model = model
        self._tokenizer = model.tokenizer
        self.conversation = Conversation(self._tokenizer, system=system, thinking=thinking)
        self._context = context
        self._cache = PrefixCache(model, cache_directory)
        self.reply: Reply | None = None
        """The last reply, also of a turn that was broken off."""
        self.prompt_tokens = 0
        """How many ids were, or are being, read for it."""
        self.reply_tokens = 0
        """How many ids the model wrote for it."""
        self.keep_error: SessionFileError | None = None
        """Why the model's memory could not be kept for going back, if it could not."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes what was kept on disk for going back."""
        self._cache.close()

    @property
    def position(self) -> int:
        """How many ids the conversation has."""
        return len(self.conversation.history())

    def ask(
        self,
        text: str,
        *,
        max_tokens: int | None = None,
        sampler: Sampler | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Event]:
        """Says `text` and yields the reply as it is written.

        Greedy without a `sampler`. Without `max_tokens` the reply may fill the context. It
        becomes part of the conversation when the iterator ends, however it ends; if nothing
        was written yet, `text` is taken back. `progress` is that of `Session.forward`.

        Raises `InputError` if the context has no room left or `text` has no ids, and while
        iterating what `Model.generate` raises.
        """
        self.conversation.ask(text)
        return self._answer(max_tokens, sampler, progress)

    def retry(
        self,
        *,
        max_tokens: int | None = None,
        sampler: Sampler | None = None,
        progress: Progress | None = None,
    ) -> Iterator[Event]:
        """Takes the last reply back and yields another. Raises `InputError` if there is none."""
        messages = self.conversation.messages
        if not messages or messages[-1]["role"] != "assistant":
            raise InputError("expected a reply to replace, found none", hint="say something first")
        self.conversation.take_back()
        return self._answer(max_tokens, sampler, progress)

    def undo(self) -> str | None:
        """Takes the last turn back; what the user said, or `None` if there is no turn."""
        while (message := self.conversation.take_back()) is not None:
            if message["role"] == "user":
                return str(message["content"])
        return None

    def reset(self) -> None:
        """Forgets what was said, but not the system's message."""
        while self.conversation.take_back() is not None:
            pass
        self.reply = None

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes conversation and memory to `file`; see `Session.save`.

        Raises `SessionFileError`.
        """
        session = self._cache.session(self.conversation.history())
        session.save(file, note=self.conversation.to_json())

    def load(self, file: str | os.PathLike[str]) -> None:
        """Goes on with a conversation that `save` wrote.

        Raises `SessionFileError`, as `Model.load_session` does, and `InputError` if the
        file holds no conversation; the present one then goes on.
        """
        label = SavedSession.read(file)
        conversation = Conversation.from_json(label.note, self._tokenizer)
        self._cache.adopt(self._model.load_session(file))
        self.conversation = conversation
        self.reply = None

    def _answer(
        self, max_tokens: int | None, sampler: Sampler | None, progress: Progress | None
    ) -> Iterator[Event]:
        try:
            ids = self.conversation.prompt()
            limit = self._limit(len(ids), max_tokens)
        except InputError:
            self.undo()
            raise
        return self._events(ids, limit, sampler, progress)

    def _events(
        self, ids: list[int], limit: int, sampler: Sampler | None, progress: Progress | None
    ) -> Iterator[Event]:
        parser = self.conversation.parser()
        self.prompt_tokens = self.reply_tokens = 0
        is_over = False
        try:
            session = self._cache.session(ids)
            self.prompt_tokens = len(session.pending)
            self._keep()
            session.forward((), progress=progress)
            self._keep()
            tokens = self._model.generate(
                session=session, max_tokens=limit, sampler=sampler, progress=progress
            )
            for token in tokens:
                self.reply_tokens += 1
                yield from parser.push(token.id)
                if parser.ended:
                    break
            is_over = True
            yield from parser.finish(length=not parser.ended)
        finally:
            self._record(parser, is_over=is_over)

    def _record(self, parser: ReplyParser, *, is_over: bool) -> None:
        if self.reply_tokens == 0:
            self.undo()
            return
        if not is_over:
            parser.finish(length=False)
        self.reply = parser.reply()
        self.conversation.answer(parser)

    def _keep(self) -> None:
        try:
            self._cache.keep()
            self.keep_error = None
        except SessionFileError as error:
            # Going back will cost the reading again, and nothing else.
            self.keep_error = error

    def _limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        if max_tokens is not None and max_tokens < 1:
            raise InputError(
                f"expected max_tokens to be at least 1, found {max_tokens}",
                hint="leave it out for as many as there is room for",
            )
        if self._context is None:
            return max_tokens or 2**31
        room = self._context - prompt_tokens
        if room < 1:
            raise InputError(
                f"expected a conversation of fewer than {self._context} ids, the context that "
                f"memory was planned for, found {prompt_tokens}",
                hint="take something back, begin anew, or plan for a larger context",
            )
        return room if max_tokens is None else min(room, max_tokens)
