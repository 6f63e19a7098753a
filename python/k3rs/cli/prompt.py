"""The prompt of a command line, as token ids."""

import argparse
from pathlib import Path

import k3rs
from k3rs.exceptions import InputError

__all__ = ["prompt_ids"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def prompt_ids(
    arguments: argparse.Namespace,
    tokenizer: k3rs.Tokenizer | None,
    directory: Path,
    *,
    required: bool,
) -> list[int]:
    """The ids of `--ids`, `--prompt` or `--prompt-file`, whichever was given.

    Without any of them, none, unless a prompt is `required`.
    """
    if (arguments.ids, arguments.prompt, arguments.prompt_file) == (None, None, None):
        if not required:
            return []
        raise InputError(
            "one of the arguments --prompt --prompt-file --ids is required",
            hint="`k3rs generate --help` lists the arguments",
        )
    if arguments.ids is not None:
        return _parse_ids(arguments.ids)
    if tokenizer is None:
        raise InputError(
            f"{directory}: expected a tokenizer for a prompt of text, found no tiktoken.model",
            hint="give the prompt as --ids 1,2,3, or add the vocabulary files of the release",
        )
    if arguments.prompt is not None:
        text, source = arguments.prompt, "--prompt"
    else:
        text, source = read_text(Path(arguments.prompt_file)), arguments.prompt_file
    if not text:
        raise InputError(
            f"{source}: expected a prompt, found empty text", hint="write at least one word"
        )
    return tokenizer.encode(text)


def _parse_ids(text: str) -> list[int]:
    ids: list[int] = []
    for index, word in enumerate(text.split(",")):
        try:
            ids.append(int(word))
        except ValueError:
            raise InputError(
                f"--ids: expected a whole number at place {index + 1}, found `{word[:40]}`",
                hint="write ids with commas between them: --ids 1,2,3",
            ) from None
    return ids


def read_text(path: Path) -> str:
    """The text of a file exactly as it is, line ends included, but for a byte order mark."""
    data = path.read_bytes()
    try:
        # Decoded with the mark in place, so that the offset is that of the file.
        return data.decode("utf-8").removeprefix(_BYTE_ORDER_MARK.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at offset "
            f"{error.start}",
            hint="save the file as UTF-8",
        ) from None
