"""Entry of the `k3rs` command: dispatch, and every error and exit status in one place."""

import importlib
import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import NoReturn

from k3rs.cli.console import Console, print_error
from k3rs.cli.parser import build_parser
from k3rs.exceptions import (
    ConfigError,
    InputError,
    K3Error,
    MemoryBudgetError,
    NumericalFault,
)

__all__ = ["ExitStatus", "main"]


class ExitStatus(IntEnum):
    """What the status of the process says."""

    DONE = 0
    FAILURE = 1
    USAGE = 2
    MEMORY = 3
    NUMERICAL = 4
    INTERRUPTED = 130


_STATUS_OF_ERROR: tuple[tuple[type[K3Error], ExitStatus], ...] = (
    (InputError, ExitStatus.USAGE),
    (ConfigError, ExitStatus.USAGE),
    (MemoryBudgetError, ExitStatus.MEMORY),
    (NumericalFault, ExitStatus.NUMERICAL),
    (K3Error, ExitStatus.FAILURE),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (the process's own without it); returns the exit status."""
    status = ExitStatus.DONE
    try:
        try:
            _dispatch(argv)
        except BrokenPipeError:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of the core is no `Exception`
            status, message, hint = _explain(error)
            print_error(message, hint)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except BrokenPipeError:
        # The reader has seen enough, which is its right.
        _discard_output()
    except OSError as error:
        _discard_output()
        status, message, hint = _explain(error)
        print_error(message, hint)
    return status


def run() -> NoReturn:
    """The installed `k3rs` program."""
    sys.exit(main())


def _dispatch(argv: Sequence[str] | None) -> None:
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit:  # argparse has printed `--help` or `--version`
        return
    console = Console(
        quiet=getattr(arguments, "quiet", False), verbose=getattr(arguments, "verbose", False)
    )
    # Imported when chosen, so that no command pays for the others.
    command = importlib.import_module(f"k3rs.cli.commands.{arguments.command}")
    command.run(arguments, console)


def _explain(error: BaseException) -> tuple[ExitStatus, str, str | None]:
    """The status that stands for `error`, what happened, and what to do about it."""
    if isinstance(error, KeyboardInterrupt):
        return ExitStatus.INTERRUPTED, "interrupted", None
    if isinstance(error, K3Error):
        status = next(status for kind, status in _STATUS_OF_ERROR if isinstance(error, kind))
        return status, str(error), error.hint
    if isinstance(error, OSError):
        place = "the output" if error.filename is None else f"`{error.filename}`"
        return (
            ExitStatus.FAILURE,
            f"cannot use {place}: {error.strerror or error}",
            "check that the path exists, may be used by this user, and that its disk has room",
        )
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return (
        ExitStatus.FAILURE,
        f"internal error: {words}",
        "this is a mistake in k3rs; please report it with the command",
    )


def _discard_output() -> None:
    """Sends what is still buffered nowhere, so that the interpreter can exit in silence."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
