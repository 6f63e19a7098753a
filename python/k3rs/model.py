"""An open model: config, memory plan, tokenizer and engine behind one door."""

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from k3rs import _k3rs
from k3rs.checkpoint import (
    DEFAULT_POSITIONS,
    load_tokenizer,
    require_directory,
    require_positive,
)
from k3rs.closing import Closing
from k3rs.exceptions import ConfigError, InputError, SessionError
from k3rs.generation import GenerationOptions, Text, Token, decode
from k3rs.presets import request_memory
from k3rs.sampling import Sampler
from k3rs.session import Progress, Routes, Session, checked_ids
from k3rs.tokenizer import Tokenizer

__all__ = ["Model"]

_END_OF_TEXT = "[EOS]"


class Model(Closing):
    """A checkpoint that is open for running. Made by `Model.open`; a context manager."""

    def __init__(self, path: Path, engine: _k3rs.Engine, tokenizer: Tokenizer | None) -> None:
        self._path = path
        self._engine: _k3rs.Engine | None = engine
        self._tokenizer = tokenizer
        self._facts: dict[str, Any] = json.loads(engine.describe())
        self._vocabulary_size: int = self._facts["model"]["vocab"]
        if tokenizer is not None and tokenizer.vocabulary_size != self._vocabulary_size:
            raise ConfigError(
                f"{path}: expected a tokenizer with the {self._vocabulary_size} ids of the "
                f"config's vocab_size, found {tokenizer.vocabulary_size}",
                hint="take config.json, tiktoken.model and tokenizer_config.json from one release",
            )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        memory: str | int = "auto",
        preset: str | None = None,
        trunk_bytes: int | None = None,
        cache_bytes: int | None = None,
        threads: int | None = None,
        backend: str = "auto",
        trunk: str | os.PathLike[str] | None = None,
        layers: int | None = None,
        positions: int = DEFAULT_POSITIONS,
        prefill_chunk: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> Self:
        """Opens the checkpoint directory `path`: checks every file, then plans the memory.

        Of the budget, give one: `memory` (`8GB`, a number of bytes, or `auto`), the
        name of a `preset`, or `trunk_bytes` and `cache_bytes` by hand. `threads`
        defaults to the physical cores, `backend` to the best instruction set of this
        CPU. The plan makes room for `positions` positions of text, read in sweeps of
        `prefill_chunk` tokens. `trunk` is a directory that `pack_trunk` wrote, on a
        faster disk. None of these changes a bit of the output.

        `layers` keeps only that many of the first layers, as if the model had no others:
        another model, for study, which also a checkpoint has that is not complete.

        `tokenizer` saves loading the one of the checkpoint a second time.

        Raises `CheckpointError`, `ConfigError`, `MemoryBudgetError` or `InputError`.
        """
        require_positive(
            threads=threads, positions=positions, prefill_chunk=prefill_chunk, layers=layers
        )
        if trunk is not None and layers is not None:
            raise InputError(
                "expected a packed trunk or a number of layers, found both",
                hint="a packed trunk is that of the whole model",
            )
        request = request_memory(
            memory, preset=preset, trunk_bytes=trunk_bytes, cache_bytes=cache_bytes
        )
        directory = require_directory(path)
        if tokenizer is None:
            tokenizer = load_tokenizer(directory)
        engine = _k3rs.Engine.open(
            str(directory),
            memory_bytes=request.memory_bytes,
            trunk_bytes=request.trunk_bytes,
            cache_bytes=request.cache_bytes,
            positions=positions,
            prefill_chunk=prefill_chunk,
            threads=threads,
            backend=backend,
            trunk=None if trunk is None else os.fspath(trunk),
            layers=layers,
        )
        return cls(directory, engine, tokenizer)

    def __repr__(self) -> str:
        return f"<k3rs.Model {str(self._path)!r}>"

    def close(self) -> None:
        """Lets go of the engine. Sessions that still exist keep its memory until they go."""
        self._engine = None

    @property
    def path(self) -> Path:
        """The checkpoint directory."""
        return self._path

    @property
    def config(self) -> Mapping[str, Any]:
        """The part of `config.json` that the model depends on."""
        return MappingProxyType(self._facts["config"])

    @property
    def plan(self) -> Mapping[str, Any]:
        """How the memory budget is divided."""
        return MappingProxyType(self._facts["plan"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """`model`, `config`, `unknown_config_keys`, `options` as resolved, and `plan`."""
        return MappingProxyType(self._facts)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Text to ids and back; `None` where the checkpoint brings no vocabulary."""
        return self._tokenizer

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a text: those of the config, and `[EOS]` of the tokenizer.

        The released config names the end of a message only, while the model also
        ends with `[EOS]`; both are needed.
        """
        ids = set(self._facts["config"]["eos_token_ids"])
        if self._tokenizer is not None and _END_OF_TEXT in self._tokenizer.special_ids:
            ids.add(self._tokenizer.special_ids[_END_OF_TEXT])
        return frozenset(ids)

    def report(self) -> Mapping[str, Any]:
        """`io`, `experts` and `memory`, counted since the model was opened."""
        report: dict[str, Any] = json.loads(self._open_engine().report())
        return MappingProxyType(report)

    def session(self) -> Session:
        """A new, empty session. Sessions are independent of each other."""
        return Session(self._open_engine().session(), self._vocabulary_size)

    def load_session(self, file: str | os.PathLike[str]) -> Session:
        """The session that `Session.save` wrote to `file`.

        It goes on with the bits of never having stopped, whatever memory, threads or
        instruction set this model was opened with.

        Raises `SessionFileError` if the file is missing or damaged, or was saved with
        another model or another version of the arithmetic.
        """
        core, pending, note = self._open_engine().load_session(os.fspath(file))
        return Session(core, self._vocabulary_size, pending=pending, note=note)

    def encode(self, prompt: str | Sequence[int] | NDArray[np.integer[Any]]) -> list[int]:
        """The ids of a prompt: text in text mode (nothing in it is special), or ids, checked."""
        if not isinstance(prompt, str):
            return checked_ids(prompt, self._vocabulary_size)
        if self._tokenizer is None:
            raise InputError(
                f"{self._path}: expected a tokenizer for a prompt of text, found no tiktoken.model",
                hint="give the prompt as token ids, or add the vocabulary files of the release",
            )
        if not prompt:
            raise InputError("expected a prompt, found empty text", hint="write at least one word")
        return checked_ids(self._tokenizer.encode(prompt), self._vocabulary_size)

    def generate(
        self,
        prompt: str | Sequence[int] | NDArray[np.integer[Any]] = (),
        *,
        max_tokens: int = 16,
        sampler: Sampler | None = None,
        session: Session | None = None,
        stop: str | Collection[str] = (),
        stop_ids: Collection[int] | None = None,
        logprobs: int | None = None,
        incremental: bool = True,
        progress: Progress | None = None,
        on_logits: Callable[[NDArray[np.float32]], None] | None = None,
        on_routes: Callable[[Routes], None] | None = None,
    ) -> Iterator[Token]:
        """Continues `prompt`, yielding each token as it is computed.

        Greedy without a `sampler`. Generation ends after `max_tokens`, at an id of
        `stop_ids` (`None`: the model's own; empty: none), or when a string of `stop`
        appears in the text, which then ends before it.

        A `session` is continued from where it stands and keeps the text, everything
        that was yielded included. Without a prompt it goes on behind its last id.

        With `incremental=False` every step reads the whole text again in a fresh
        session, which must give the same bits: a check, not a way to work.

        With `logprobs` every token carries its log-probability and those of that many
        most likely ids. `on_logits` receives the logits of every generated token,
        `on_routes` what `Session.forward` records as `router` for the ids of every step.

        Arguments are checked at the call: `InputError`. While iterating:
        `NumericalFault` instead of a token made from NaN, `ReadError`, Ctrl-C.
        """
        goes_on = session is not None and session.position > 0 and len(prompt) == 0
        prompt_ids = [] if goes_on else self.encode(prompt)
        require_positive(max_tokens=max_tokens)
        if logprobs is not None and logprobs < 0:
            raise InputError(
                f"expected logprobs to be at least 0, found {logprobs}",
                hint="0 gives that of the chosen token alone; leave it out for none",
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops and self._tokenizer is None:
            raise InputError(
                "expected a tokenizer to look for stop strings, found none",
                hint="stop at token ids instead",
            )
        if session is not None and not incremental:
            raise InputError(
                "expected either a session or `incremental=False`, found both",
                hint="recomputing every step needs sessions of its own",
            )
        options = GenerationOptions(
            max_tokens=max_tokens,
            sampler=sampler or Sampler(),
            stop_ids=self.stop_ids if stop_ids is None else frozenset(stop_ids),
            stop=stops,
            logprobs=logprobs,
            on_logits=on_logits,
        )
        text: Text
        if incremental:
            text = _SessionText(session or self.session(), progress, on_routes)
        else:
            text = _RecomputedText(self, progress, on_routes)
        return decode(text, prompt_ids, self._tokenizer, options)

    def _open_engine(self) -> _k3rs.Engine:
        if self._engine is None:
            raise SessionError("expected an open model, found a closed one", hint="open it again")
        return self._engine


class _SessionText:
    """A text that a session remembers."""

    def __init__(
        self,
        session: Session,
        progress: Progress | None,
        on_routes: Callable[[Routes], None] | None,
    ) -> None:
        self._session = session
        self._progress = progress
        self._on_routes = on_routes

    @property
    def ids(self) -> list[int]:
        return self._session.ids

    def append(self, ids: Sequence[int]) -> None:
        self._session.append(ids)

    def logits(self) -> NDArray[np.float32]:
        if self._on_routes is None or not self._session.pending:
            return self._session.forward((), progress=self._progress)
        logits, seen = self._session.forward((), capture=("router",), progress=self._progress)
        self._on_routes(seen["router"])
        return logits


class _RecomputedText:
    """A text that is read from its beginning for every token."""

    def __init__(
        self, model: Model, progress: Progress | None, on_routes: Callable[[Routes], None] | None
    ) -> None:
        self._model = model
        self._progress = progress
        self._on_routes = on_routes
        self.ids: list[int] = []

    def append(self, ids: Sequence[int]) -> None:
        self.ids.extend(ids)

    def logits(self) -> NDArray[np.float32]:
        text = _SessionText(self._model.session(), self._progress, self._on_routes)
        text.append(self.ids)
        return text.logits()
