"""`k3rs chat`: talk to a model."""

import argparse
from collections.abc import Callable
from pathlib import Path

import k3rs
from k3rs.chat import THINKING, Dialogue
from k3rs.cli.arguments import model_directory, open_model
from k3rs.cli.chat_input import FENCE, chat_input, unfenced
from k3rs.cli.chat_view import ChatView, Events
from k3rs.cli.console import Console, print_error, printable
from k3rs.cli.gentle_interrupt import Terminated, ended_by_signals
from k3rs.cli.pending_file import require_place
from k3rs.cli.sampling_arguments import sampler_facts, sampler_from
from k3rs.exceptions import InputError, K3Error, NumericalFault
from k3rs.sampling import GREEDY_BELOW
from k3rs.session import Progress
from k3rs.sizes import format_size
from k3rs.user_directories import expanded

__all__ = ["run"]

_DEFAULTS = {"temperature": 1.0, "top_p": 0.95}
"""What the model's makers recommend for conversations."""

_FEW_IDS = 64
"""What ends a message is less than this."""

_HELP = f"""\
/help                     this list
/system [TEXT]            show or set the system's message; /system - removes it
/think off|low|high|max   how much the model thinks before it answers
/fold                     show reasoning, or only that there was some
/reasoning                show what was thought before the last answer
/retry                    another answer to the last message
/undo                     take the last turn back
/reset                    begin anew
/save FILE                keep the conversation, with the model's memory of it
/load FILE                go on with a conversation that was kept
/stats                    what this cost until now
/quit                     leave (also Ctrl-D)
A message that begins with {FENCE} goes on over lines until {FENCE} comes again;
Alt-Enter also begins a new line. // begins a message that begins with a slash.
Ctrl-C breaks an answer off."""


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Reads messages and shows replies until the input ends."""
    sampler = sampler_from(arguments, _DEFAULTS)
    if arguments.save_state is not None:
        # A path that cannot be written is an error before anything is said.
        require_place(arguments.save_state)
    directory = model_directory(arguments.model)
    tokenizer = k3rs.load_tokenizer(directory)
    with (
        open_model(arguments, directory, tokenizer, arguments.context) as model,
        Dialogue(
            model,
            system=arguments.system,
            thinking=arguments.think or "max",
            context=arguments.context,
        ) as dialogue,
    ):
        if arguments.load_state is not None:
            dialogue.load(arguments.load_state)
            if arguments.system is not None:
                dialogue.conversation.system = arguments.system
            if arguments.think is not None:
                dialogue.conversation.thinking = arguments.think
        chat = _Chat(arguments, model, dialogue, sampler, console)
        chat.greet()
        try:
            with ended_by_signals():
                chat.talk()
        finally:
            if arguments.save_state is not None:
                chat.keep(arguments.save_state)


class _Leave(Exception):
    """Somebody wants to leave."""


class _Interrupted(Exception):
    """Somebody wants to leave in the middle of a token."""


class _Chat:
    """One conversation at the terminal."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        model: k3rs.Model,
        dialogue: Dialogue,
        sampler: k3rs.Sampler,
        console: Console,
    ) -> None:
        self._arguments = arguments
        self._model = model
        self._dialogue = dialogue
        self._sampler = sampler
        self._console = console
        layers = model.facts["model"]["layers"]
        self._view = ChatView(console, layers, folded=arguments.fold)
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: console.note(_HELP),
            "/system": self._system,
            "/think": self._think,
            "/fold": self._fold,
            "/reasoning": lambda _: self._view.show_reasoning(dialogue),
            "/retry": lambda _: self._reply(None),
            "/undo": self._undo,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
            "/stats": lambda _: self._stats(),
            "/quit": self._quit,
        }
        self._warned = False

    def greet(self) -> None:
        """Says what is talked to, and how."""
        facts = self._model.facts["model"]
        self._console.note(
            f"{Path(facts['path']).resolve().name}: {facts['layers']} layers, memory "
            f"{format_size(self._model.plan['budget_bytes'])}, room for "
            f"{self._arguments.context} ids; /help lists commands"
        )
        self._console.note(self._manner())
        if self._model.path == k3rs.shipped_model():
            self._console.note("(this small model continues texts; it was never taught to chat)")

    def talk(self) -> None:
        """Takes messages until there are no more."""
        source = chat_input(self._commands)
        interrupted_before = False
        while True:
            try:
                text = source.read()
                if text is None:
                    return
                interrupted_before = False
                self._take(text)
            except _Leave:
                return
            except _Interrupted:
                raise KeyboardInterrupt from None
            except Terminated:
                raise
            except KeyboardInterrupt:
                if interrupted_before:
                    raise
                interrupted_before = True
                self._console.note("(Ctrl-C again leaves)")

    def keep(self, file: str) -> None:
        """Saves what was said, if anything was: an earlier conversation is not lost to none."""
        if self._dialogue.conversation.turn_count == 0:
            self._console.note(f"(nothing was said: {file} is as it was)")
            return
        self._save(file)

    def _take(self, text: str) -> None:
        """A message or a command. What goes wrong with it does not end the chat."""
        try:
            message = unfenced(text)
            if message is not None:
                if message.strip():
                    self._reply(message)
            elif text.startswith("/") and not text.startswith("//"):
                name, *rest = text.split(maxsplit=1)
                command = self._commands.get(name)
                if command is None:
                    raise InputError(
                        f"expected a command, found `{name[:40]}`",
                        hint="/help lists them; begin with // for a message with a slash",
                    )
                command("".join(rest).strip())
            elif text.strip():
                self._reply(text.removeprefix("/") if text.startswith("//") else text)
        except NumericalFault:
            raise
        except K3Error as error:
            print_error(str(error), error.hint)
        except BrokenPipeError:
            raise
        except OSError as error:
            print_error(f"cannot use `{error.filename or 'a file'}`: {error.strerror or error}")

    def _reply(self, text: str | None) -> None:
        """Asks, or asks again without `text`, and shows the answer."""
        dialogue, arguments = self._dialogue, self._arguments

        def begin(progress: Progress) -> Events:
            limit, sampler = arguments.max_tokens, self._sampler
            if text is None:
                return dialogue.retry(max_tokens=limit, sampler=sampler, progress=progress)
            return dialogue.ask(text, max_tokens=limit, sampler=sampler, progress=progress)

        try:
            self._view.show(dialogue, begin)
        except KeyboardInterrupt:
            # The second one: the first has broken the reply off.
            raise _Interrupted from None
        if dialogue.keep_error is not None and not self._warned:
            self._warned = True
            self._console.note(f"(going back will cost time: {dialogue.keep_error})")

    def _system(self, text: str) -> None:
        conversation = self._dialogue.conversation
        if text:
            conversation.system = None if text == "-" else text
        self._console.note(f"system: {printable(conversation.system or '(none)')}")

    def _think(self, word: str) -> None:
        if word:
            if word not in THINKING:
                raise InputError(
                    f"expected /think with one of {', '.join(THINKING)}, found `{word[:40]}`",
                    hint="more thinking costs more tokens before each answer",
                )
            self._dialogue.conversation.thinking = word
        self._console.note(self._manner())

    def _fold(self, _: str) -> None:
        self._view.folded = not self._view.folded
        self._console.note("reasoning is folded" if self._view.folded else "reasoning is shown")

    def _undo(self, _: str) -> None:
        text = self._dialogue.undo()
        if text is None:
            raise InputError("expected a turn to take back, found none", hint="say something first")
        words = " ".join(text.split())
        shown = words if len(words) <= 60 else f"{words[:57]}..."
        self._console.note(f"(taken back: {printable(shown)})")

    def _reset(self, _: str) -> None:
        self._dialogue.reset()
        self._console.note("(a new conversation)")

    def _save(self, file: str) -> None:
        pending = self._dialogue.save(_path(file))
        size = format_size(_path(file).stat().st_size)
        self._console.note(f"(saved to {file}, {size}; /load or --load-state goes on)")
        if pending > _FEW_IDS:
            self._console.note(f"(then {pending} ids have to be read again, as something changed)")

    def _load(self, file: str) -> None:
        self._dialogue.load(_path(file))
        turns = self._dialogue.conversation.turn_count
        self._console.note(f"(loaded {_turns(turns)}, {self._dialogue.position} ids)")

    def _stats(self) -> None:
        report, dialogue = self._model.report(), self._dialogue
        read = report["io"]["trunk_bytes_read"] + report["io"]["expert_bytes_read"]
        turns = dialogue.conversation.turn_count
        self._console.note(
            f"{_turns(turns)}, {dialogue.position} of {self._arguments.context} ids; last answer "
            f"{dialogue.reply_tokens} tokens\n"
            f"read {format_size(read)} of weights, peak memory "
            f"{format_size(report['memory']['peak_rss_bytes'])}"
        )
        self._console.note(self._manner())

    def _manner(self) -> str:
        facts = sampler_facts(self._sampler)
        neutral = sampler_facts(k3rs.Sampler())
        is_greedy = self._sampler.temperature < GREEDY_BELOW
        words = ["greedy"] if is_greedy else []
        words += [
            f"{name.replace('_', '-')} {value}"
            for name, value in facts.items()
            if value != neutral[name] and not (is_greedy and "penalty" not in name)
        ]
        return f"thinking {self._dialogue.conversation.thinking}; {', '.join(words)}"

    def _quit(self, _: str) -> None:
        raise _Leave


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _path(file: str) -> Path:
    if not file:
        raise InputError("expected the name of a file, found none", hint="/save talk.session")
    return expanded(file)
