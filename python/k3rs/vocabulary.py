"""The vocabulary files of a checkpoint, read whole or refused.

`tiktoken.model` has one line per ordinary token: its bytes in base64, a space, its rank.
The rank is the token's id, and the order in which merges are tried. `SPECIAL_SLOT_COUNT`
special tokens follow the ranks; `tokenizer_config.json` names some of them.

A damaged line would not stop anything by itself: text would only become other ids, and
the model would answer badly. So every line is checked.
"""

import base64
import binascii
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3rs.exceptions import CheckpointError, ConfigError

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

SPECIAL_SLOT_COUNT = 256
"""Special tokens after the ordinary ones; the released model has 163,584 + 256 ids."""

OPEN_SLOT = 3
OPEN_TEXT = "<|open|>"

_DOWNLOAD_HINT = "download the file again, or compare its size with the published one"
_RANK_DIGITS_MAX = 9


@dataclass(frozen=True)
class Vocabulary:
    """All tokens: `ordinary[rank]` is bytes, `special[slot]` text.

    The id of an ordinary token is its rank; that of a special one `len(ordinary) + slot`.
    """

    ordinary: list[bytes]
    special: list[str]


def read_vocabulary(directory: Path) -> Vocabulary:
    """Reads both files of `directory`.

    Raises `CheckpointError`, with the file and where possible the line, if a file is missing
    or malformed; `ConfigError` if the special tokens are those of another model.
    """
    ordinary = _read_ranks(directory / RANKS_FILE)
    config_path = directory / CONFIG_FILE
    special = _special_texts(_read_json(config_path), len(ordinary), config_path)
    if special[OPEN_SLOT] != OPEN_TEXT:
        # Kimi K2 uses the same ids with other meanings: they would all be accepted.
        raise ConfigError(
            f"`{config_path}`: expected token {len(ordinary) + OPEN_SLOT} to be `{OPEN_TEXT}`, "
            f"found `{special[OPEN_SLOT]}`",
            hint="this is not a Kimi K3 vocabulary; take both files from the K3 repository",
        )
    return Vocabulary(ordinary, special)


def reserved_text(token_id: int) -> str:
    """The text of a special slot that has no name."""
    return f"<|reserved_token_{token_id}|>"


def _malformed(path: Path, line: int | None, expected: str, found: str) -> CheckpointError:
    place = f"`{path}`" if line is None else f"`{path}`, line {line}"
    return CheckpointError(f"{place}: expected {expected}, found {found}", hint=_DOWNLOAD_HINT)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"`{path}`: expected a readable file, found: {error.strerror or error}",
            hint=f"a vocabulary is the two files `{RANKS_FILE}` and `{CONFIG_FILE}`",
        ) from error


def _read_ranks(path: Path) -> list[bytes]:
    """The tokens of `tiktoken.model` by rank; lines may come in any order."""
    lines = _read_file(path).splitlines()
    if not lines:
        raise _malformed(path, None, "lines of `base64 rank`", "an empty file")
    by_rank: dict[int, bytes] = {}
    line_of: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        token, rank = _parse_line(path, number, line)
        if rank >= len(lines):
            expected = f"a rank below {len(lines)}, the number of lines"
            found = f"rank {rank}, so that a smaller one is missing"
            raise _malformed(path, number, expected, found)
        if rank in by_rank:
            earlier = line_of[by_rank[rank]]
            raise _malformed(path, number, "each rank once", f"rank {rank} of line {earlier} again")
        earlier = line_of.setdefault(token, number)
        if earlier != number:
            found = f"the token of line {earlier} again, {token!r}"
            raise _malformed(path, number, "each token once", found)
        by_rank[rank] = token
    # As many distinct ranks as lines, all below that number: none is missing.
    return [by_rank[rank] for rank in range(len(lines))]


def _parse_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    encoded, _, rank = line.partition(b" ")
    if not encoded or not rank.isdigit() or len(rank) > _RANK_DIGITS_MAX:
        raise _malformed(path, number, "`base64 rank`", repr(line[:80]))
    try:
        token = binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error as error:
        raise _malformed(path, number, "base64", f"{encoded[:80]!r} ({error})") from None
    if base64.b64encode(token) != encoded:
        raise _malformed(path, number, "canonical base64", repr(encoded[:80]))
    return token, int(rank)


def _read_json(path: Path) -> dict[str, Any]:
    data = _read_file(path)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _malformed(path, line, "UTF-8", f"byte 0x{data[error.start]:02X}") from None
    except json.JSONDecodeError as error:
        found = f"{error.msg} at column {error.colno}"
        raise _malformed(path, error.lineno, "JSON", found) from None
    except (ValueError, RecursionError) as error:
        raise _malformed(path, None, "JSON", str(error)) from None
    if not isinstance(value, dict):
        raise _malformed(path, None, "a JSON object", type(value).__name__)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key `{repeated}` twice in one object")
    return keys


def _special_texts(config: dict[str, Any], rank_count: int, path: Path) -> list[str]:
    """The text of every special slot, from `added_tokens_decoder`: id -> {"content": text}."""
    named = config.get("added_tokens_decoder")
    if not isinstance(named, dict):
        found = "nothing" if named is None else type(named).__name__
        raise _malformed(path, None, "an object `added_tokens_decoder`", found)
    last = rank_count + SPECIAL_SLOT_COUNT - 1
    special = [reserved_text(token_id) for token_id in range(rank_count, last + 1)]
    for key, entry in named.items():
        place = f"`added_tokens_decoder[{json.dumps(key)}]`"
        if not (key.isascii() and key.isdigit() and len(key) <= _RANK_DIGITS_MAX):
            raise _malformed(path, None, "ids as keys of `added_tokens_decoder`", place)
        if not rank_count <= int(key) <= last:
            expected = f"special ids in {rank_count}..{last}, after the ranks of `{RANKS_FILE}`"
            raise _malformed(path, None, expected, place)
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text or not _is_encodable(text):
            raise _malformed(path, None, f"text in `content` of {place}", repr(text))
        special[int(key) - rank_count] = text
    for slot, text in enumerate(special):
        if text in special[:slot]:
            found = f"{text!r} for {rank_count + special.index(text)} and {rank_count + slot}"
            raise _malformed(path, None, "a different text for each special token", found)
    return special


def _is_encodable(text: str) -> bool:
    """Whether `text` has UTF-8 bytes: JSON escapes can smuggle in half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
