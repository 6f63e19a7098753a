"""`k3rs generate`: continue a prompt."""

import argparse
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import k3rs
from k3rs.cli.arguments import model_directory, open_model
from k3rs.cli.commands.plan import plan_lines
from k3rs.cli.console import Console
from k3rs.cli.pending_file import LogitsFile, PendingFile
from k3rs.cli.prompt import prompt_ids
from k3rs.cli.run_report import LiveCost, Run, run_json, summary
from k3rs.cli.trace_file import TraceFile

__all__ = ["run"]

_STDOUT = "-"


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Generates, streaming the answer to stdout, and writes the files that were asked for.

    After Ctrl-C what was generated until then is still reported and written.
    """
    sampler = _sampler(arguments)
    directory = model_directory(arguments.model)
    tokenizer = k3rs.load_tokenizer(directory)
    ids = prompt_ids(arguments, tokenizer, directory)
    with ExitStack() as stack:
        json_file = logits_file = trace_file = None
        if arguments.json not in (None, _STDOUT):
            json_file = stack.enter_context(PendingFile(arguments.json))
        if arguments.logits is not None:
            logits_file = stack.enter_context(LogitsFile(arguments.logits))
        if arguments.trace is not None:
            trace_file = stack.enter_context(TraceFile(arguments.trace))

        started = time.perf_counter()
        model = stack.enter_context(
            open_model(arguments, directory, tokenizer, len(ids) + arguments.max_tokens)
        )
        result = Run(ids, open_seconds=time.perf_counter() - started)
        _show_details(model, console)
        if trace_file is not None:
            trace_file.begin(model)
        _generate(
            result,
            model,
            arguments,
            sampler=sampler,
            console=console,
            logits_file=logits_file,
            trace_file=trace_file,
        )

        for line in summary(result, model):
            console.note(line)
        facts = run_json(result, model, _options(arguments, sampler))
        if logits_file is not None:
            logits_file.commit()
        if trace_file is not None:
            trace_file.commit()
        if json_file is not None:
            json_file.write(json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n")
            json_file.commit()
        elif arguments.json == _STDOUT:
            console.facts(facts)
    if result.interrupted:
        raise KeyboardInterrupt


def _generate(
    result: Run,
    model: k3rs.Model,
    arguments: argparse.Namespace,
    *,
    sampler: k3rs.Sampler,
    console: Console,
    logits_file: LogitsFile | None,
    trace_file: TraceFile | None,
) -> None:
    """Runs the decode loop into `result`; Ctrl-C ends it early."""
    printing = arguments.json != _STDOUT
    with console.layer_progress() as progress:
        tokens = model.generate(
            result.prompt_ids,
            max_tokens=arguments.max_tokens,
            sampler=sampler,
            stop_ids=() if arguments.ignore_stop else None,
            incremental=not arguments.no_incremental,
            progress=progress,
            on_logits=None if logits_file is None else logits_file.append,
            on_routes=None if trace_file is None else trace_file.append,
        )
        cost = LiveCost(model, result, arguments.max_tokens)
        progress.begin(model.facts["model"]["layers"], cost)
        write = progress.append if progress.shows_answer else console.answer
        try:
            for token in tokens:
                result.tokens.append(token)
                count = len(result.tokens)
                if printing:
                    id_text = f",{token.id}" if count > 1 else str(token.id)
                    write(id_text if model.tokenizer is None else token.text)
                progress.describe(f"token {min(count + 1, arguments.max_tokens)}")
        except KeyboardInterrupt:
            result.interrupted = True
        finally:
            if printing and result.tokens:
                write("\n")


def _sampler(arguments: argparse.Namespace) -> k3rs.Sampler:
    """Greedy, unless one of the sampling arguments was given."""
    given: dict[str, Any] = {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "seed")
        if (value := getattr(arguments, name)) is not None
    }
    if not given:
        return k3rs.Sampler()
    given.setdefault("temperature", 1.0)
    # Chosen here rather than by the sampler, so that the report can name it.
    given.setdefault("seed", secrets.randbits(32))
    return k3rs.Sampler(**given)


def _options(arguments: argparse.Namespace, sampler: k3rs.Sampler) -> Mapping[str, Any]:
    return {
        "max_tokens": arguments.max_tokens,
        "temperature": sampler.temperature,
        "top_k": sampler.top_k,
        "top_p": sampler.top_p,
        "min_p": sampler.min_p,
        "seed": sampler.seed,
        "incremental": not arguments.no_incremental,
        "ignore_stop": arguments.ignore_stop,
    }


def _show_details(model: k3rs.Model, console: Console) -> None:
    unknown = model.facts["unknown_config_keys"]
    console.detail(f"config keys without effect: {', '.join(unknown) or 'none'}")
    # Somebody who waits for weights from a disk wants to know where memory goes.
    show = console.note if console.is_live and model.plan["pinned_fraction"] < 1 else console.detail
    for line in plan_lines(model.plan):
        show(line)
