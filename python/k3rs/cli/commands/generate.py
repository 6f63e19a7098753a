"""`k3rs generate`: continue a prompt."""

import argparse
import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import k3rs
from k3rs.cli.arguments import model_directory, open_model
from k3rs.cli.commands.plan import plan_lines
from k3rs.cli.console import Console
from k3rs.cli.gentle_interrupt import GentleInterrupt, gentle_interrupt
from k3rs.cli.pending_file import LogitsFile, PendingFile, require_place
from k3rs.cli.prompt import prompt_ids
from k3rs.cli.run_report import LiveCost, Run, logprob_lines, run_json, summary
from k3rs.cli.sampling_arguments import sampler_facts, sampler_from
from k3rs.cli.trace_file import TraceFile
from k3rs.exceptions import InputError

__all__ = ["run"]

_STDOUT = "-"


@dataclass
class _Files:
    """What is written while and after a run."""

    json: PendingFile | None
    logits: LogitsFile | None
    trace: TraceFile | None


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Generates, streaming the answer to stdout, and writes the files that were asked for.

    After Ctrl-C what was generated until then is still reported and written.
    """
    sampler = sampler_from(arguments)
    directory = model_directory(arguments.model)
    tokenizer = k3rs.load_tokenizer(directory)
    saved_positions = _saved_positions(arguments)
    ids = prompt_ids(arguments, tokenizer, directory, required=arguments.load_state is None)
    with ExitStack() as stack:
        files = _open_files(arguments, stack)
        started = time.perf_counter()
        positions = saved_positions + len(ids) + arguments.max_tokens
        model = stack.enter_context(open_model(arguments, directory, tokenizer, positions))
        session = None
        if arguments.load_state is not None:
            session = model.load_session(arguments.load_state)
        elif not arguments.no_incremental:
            session = model.session()
        open_seconds = time.perf_counter() - started
        result = Run(ids, open_seconds, loaded_positions=saved_positions)
        _show_details(model, console)
        if files.trace is not None:
            files.trace.begin(model)
        _generate(result, model, session, arguments, sampler=sampler, console=console, files=files)
        _report(result, model, arguments, sampler=sampler, console=console, files=files)
        if arguments.save_state is not None and session is not None:
            session.save(arguments.save_state)
    if result.interrupted:
        raise KeyboardInterrupt


def _saved_positions(arguments: argparse.Namespace) -> int:
    """How long the text of `--load-state` is."""
    kept = arguments.load_state or arguments.save_state
    if kept is not None and arguments.no_incremental:
        raise InputError(
            "expected either --no-incremental or a state to load or save, found both",
            hint="a text that is recomputed for every token has no state",
        )
    if arguments.load_state is None:
        return 0
    return k3rs.SavedSession.read(arguments.load_state).position


def _open_files(arguments: argparse.Namespace, stack: ExitStack) -> _Files:
    """Opens what will be written, so that a path that cannot be used is an error at once."""
    files = _Files(json=None, logits=None, trace=None)
    if arguments.json not in (None, _STDOUT):
        files.json = stack.enter_context(PendingFile(arguments.json))
    if arguments.logits is not None:
        files.logits = stack.enter_context(LogitsFile(arguments.logits))
    if arguments.trace is not None:
        files.trace = stack.enter_context(TraceFile(arguments.trace))
    if arguments.save_state is not None:
        require_place(arguments.save_state)
    return files


def _generate(
    result: Run,
    model: k3rs.Model,
    session: k3rs.Session | None,
    arguments: argparse.Namespace,
    *,
    sampler: k3rs.Sampler,
    console: Console,
    files: _Files,
) -> None:
    """Runs the decode loop into `result`; Ctrl-C ends it early.

    If the state is to be saved, the first Ctrl-C lets the token end.
    """
    printing = arguments.json != _STDOUT
    with console.layer_progress() as progress:
        tokens = model.generate(
            result.prompt_ids,
            max_tokens=arguments.max_tokens,
            sampler=sampler,
            session=session,
            stop=arguments.stop,
            stop_ids=() if arguments.ignore_stop else None,
            logprobs=arguments.logprobs,
            incremental=not arguments.no_incremental,
            progress=progress,
            on_logits=None if files.logits is None else files.logits.append,
            on_routes=None if files.trace is None else files.trace.append,
        )
        cost = LiveCost(model, result, arguments.max_tokens)
        progress.begin(model.facts["model"]["layers"], cost)
        write = progress.append if progress.shows_answer else console.answer
        gentle: AbstractContextManager[GentleInterrupt] = nullcontext(GentleInterrupt())
        if arguments.save_state is not None:
            gentle = gentle_interrupt(
                lambda: progress.describe("last token (Ctrl-C again drops the state)")
            )
        try:
            with gentle as interrupt:
                for token in tokens:
                    result.tokens.append(token)
                    count = len(result.tokens)
                    if printing:
                        id_text = f",{token.id}" if count > 1 else str(token.id)
                        write(id_text if model.tokenizer is None else token.text)
                    progress.describe(f"token {min(count + 1, arguments.max_tokens)}")
                    if interrupt.requested:
                        result.interrupted = True
                        break
        except KeyboardInterrupt:
            result.interrupted = True
        finally:
            if printing and result.tokens:
                write("\n")


def _report(
    result: Run,
    model: k3rs.Model,
    arguments: argparse.Namespace,
    *,
    sampler: k3rs.Sampler,
    console: Console,
    files: _Files,
) -> None:
    """Says what the run did and completes its files."""
    for line in [*logprob_lines(result, model), *summary(result, model)]:
        console.note(line)
    facts = run_json(result, model, _options(arguments, sampler))
    if files.logits is not None:
        files.logits.commit()
    if files.trace is not None:
        files.trace.commit()
    if files.json is not None:
        files.json.write(json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n")
        files.json.commit()
    elif arguments.json == _STDOUT:
        console.facts(facts)


def _options(arguments: argparse.Namespace, sampler: k3rs.Sampler) -> Mapping[str, Any]:
    return {
        "max_tokens": arguments.max_tokens,
        **sampler_facts(sampler),
        "incremental": not arguments.no_incremental,
        "ignore_stop": arguments.ignore_stop,
        "stop": arguments.stop,
        "load_state": arguments.load_state,
        "save_state": arguments.save_state,
    }


def _show_details(model: k3rs.Model, console: Console) -> None:
    unknown = model.facts["unknown_config_keys"]
    console.detail(f"config keys without effect: {', '.join(unknown) or 'none'}")
    # Somebody who waits for weights from a disk wants to know where memory goes.
    show = console.note if console.is_live and model.plan["pinned_fraction"] < 1 else console.detail
    for line in plan_lines(model.plan):
        show(line)
