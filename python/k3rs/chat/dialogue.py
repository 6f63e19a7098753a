"""Talking to a model: turns that cost what they add."""

import os
import time
from collections.abc import Generator

from k3rs.chat.conversation import Conversation
from k3rs.chat.reply import Event, Reply, ReplyParser
from k3rs.closing import Closing
from k3rs.exceptions import InputError, SessionFileError
from k3rs.model import Model
from k3rs.prefix_cache import PrefixCache
from k3rs.sampling import Sampler
from k3rs.saved_session import SavedSession
from k3rs.session import Progress

__all__ = ["Dialogue"]


class Dialogue(Closing):
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
        vocabulary is not one of Kimi K3.
        """
        if model.tokenizer is None:
            raise InputError(
                f"{model.path}: expected a tokenizer for a chat, found no tiktoken.model",
                hint="add the vocabulary files of the release",
            )
        self._model = model
        self._tokenizer = model.tokenizer
        self.conversation = Conversation(self._tokenizer, system=system, thinking=thinking)
        """What was said; another object after every turn."""
        self._context = context
        self._cache = PrefixCache(model, cache_directory)
        self.reply: Reply | None = None
        """The last reply, also of a turn that was broken off."""
        self.prompt_tokens = 0
        """How many ids were, or are being, read for it."""
        self.prompt_seconds = 0.0
        """How long that took."""
        self.reply_tokens = 0
        """How many ids the model wrote for it."""
        self._is_stopped = False
        self._open: Generator[Event, None, None] | None = None
        self.keep_error: SessionFileError | None = None
        """Why the model's memory could not be kept for going back, if it could not."""

    def close(self) -> None:
        """Removes what was kept on disk for going back."""
        self._end_reply()
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
    ) -> Generator[Event, None, None]:
        """Says `text` and yields the reply as it is written.

        Greedy without a `sampler`. Without `max_tokens` the reply may fill the context. Both
        become part of the conversation when the iterator ends, however it ends; if nothing
        was written yet, it stays as it was. `progress` is that of `Session.forward`.

        Raises `InputError` if the context has no room left or `text` has no ids, and while
        iterating what `Model.generate` raises.
        """
        self._end_reply()
        asked = self.conversation.copy()
        asked.ask(text)
        return self._answer(asked, max_tokens, sampler, progress)

    def retry(
        self,
        *,
        max_tokens: int | None = None,
        sampler: Sampler | None = None,
        progress: Progress | None = None,
    ) -> Generator[Event, None, None]:
        """Replaces the last reply by another, as `ask` gives one.

        Raises `InputError` if there is none.
        """
        self._end_reply()
        asked = self.conversation.copy()
        last = asked.take_back()
        if last is None or last["role"] != "assistant":
            raise InputError("expected a reply to replace, found none", hint="say something first")
        return self._answer(asked, max_tokens, sampler, progress)

    def stop(self) -> None:
        """Ends the reply behind the token that is being computed, also from a signal handler."""
        self._is_stopped = True

    def undo(self) -> str | None:
        """Takes the last turn back; what the user said, or `None` if there is no turn."""
        self._end_reply()
        while (message := self.conversation.take_back()) is not None:
            if message["role"] == "user":
                return str(message["content"])
        return None

    def reset(self) -> None:
        """Forgets what was said, but not the system's message."""
        self._end_reply()
        while self.conversation.take_back() is not None:
            pass
        self.reply = None

    def save(self, file: str | os.PathLike[str]) -> int:
        """Writes conversation and memory to `file`; see `Session.save`.

        Returns how many ids a model that loads it will have to read again: more than the
        few that end a message only after a change of what was said before.

        Raises `SessionFileError`.
        """
        self._end_reply()
        self._keep()
        session = self._cache.session(self.conversation.history())
        session.save(file, note=self.conversation.to_json())
        return len(session.pending)

    def load(self, file: str | os.PathLike[str]) -> None:
        """Goes on with a conversation that `save` wrote.

        Raises `SessionFileError`, as `Model.load_session` does, and `InputError` if the
        file holds no conversation or a longer one than there is room for; the present one
        then goes on.
        """
        self._end_reply()
        label = SavedSession.read(file)
        if self._context is not None and label.position >= self._context:
            raise self._too_long(label.position)
        conversation = Conversation.from_json(label.note, self._tokenizer)
        self._cache.load(file)
        self.conversation = conversation
        self.reply = None

    def _answer(
        self,
        asked: Conversation,
        max_tokens: int | None,
        sampler: Sampler | None,
        progress: Progress | None,
    ) -> Generator[Event, None, None]:
        """The reply to `asked`. Checked at the call, not at the first event."""
        self.prompt_tokens = self.reply_tokens = 0
        self.prompt_seconds = 0.0
        self._is_stopped = False
        prompt = asked.prompt()
        limit = self._limit(len(prompt), max_tokens)
        self._open = self._events(asked, prompt, limit, sampler, progress)
        return self._open

    def _end_reply(self) -> None:
        """Ends a reply that nobody takes any more: one session serves all turns."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _events(
        self,
        asked: Conversation,
        prompt: list[int],
        limit: int,
        sampler: Sampler | None,
        progress: Progress | None,
    ) -> Generator[Event, None, None]:
        parser = asked.parser()
        is_over = False
        try:
            session = self._cache.session(prompt)
            self.prompt_tokens = len(session.pending)
            self._keep()
            started = time.perf_counter()
            session.forward((), progress=progress)
            self.prompt_seconds = time.perf_counter() - started
            self._keep()
            tokens = self._model.generate(
                session=session, max_tokens=limit, sampler=sampler, progress=progress
            )
            for token in tokens:
                self.reply_tokens += 1
                yield from parser.push(token.id)
                if self._is_stopped:
                    return
                if parser.ended:
                    break
            is_over = True
            yield from parser.finish(length=not parser.ended)
        finally:
            if self.reply_tokens:
                self._record(asked, parser, is_over=is_over)

    def _record(self, asked: Conversation, parser: ReplyParser, *, is_over: bool) -> None:
        if not is_over:
            parser.finish(length=False)
        self.reply = parser.reply()
        asked.answer(parser)
        self.conversation = asked

    def _keep(self) -> None:
        try:
            self._cache.keep()
        except SessionFileError as error:
            # Going back will cost the reading again, and nothing else.
            self.keep_error = error
        else:
            self.keep_error = None

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
            raise self._too_long(prompt_tokens)
        return room if max_tokens is None else min(room, max_tokens)

    def _too_long(self, tokens: int) -> InputError:
        return InputError(
            f"expected a conversation of fewer than {self._context} ids, the context that "
            f"memory was planned for, found {tokens}",
            hint="take something back, begin anew, or plan for a larger context (--context)",
        )
