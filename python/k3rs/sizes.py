"""Amounts of memory as people write them: `8GB`, `7.5GiB`, `512MB`."""

import re
from fractions import Fraction

from k3rs.exceptions import InputError

__all__ = ["format_size", "parse_gigabytes", "parse_memory", "parse_size"]

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")
_LARGEST_BYTES = 2**63 - 1
_HINT = "write a number and a unit, such as `8GB` (10^9 bytes), `7.5GiB` (2^30 bytes) or `512MB`"


def parse_size(text: str) -> int:
    """The bytes that `text` stands for, rounded down.

    A bare number is refused: whether `8` means bytes or gigabytes would be a guess.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InputError(f"expected a size in bytes, found `{text}`", hint=_HINT)
    return _checked(int(Fraction(match[1]) * unit), text)


def parse_gigabytes(text: str) -> int:
    """The bytes of a plain number of gigabytes (10^9), as `--trunk-gb` takes it."""
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text.strip()) is None:
        raise InputError(
            f"expected a number of gigabytes, found `{text}`",
            hint="write a plain number such as `1.5`; one gigabyte is 10^9 bytes",
        )
    return _checked(int(Fraction(text.strip()) * 10**9), text, smallest=0)


def parse_memory(memory: str | int) -> int | None:
    """A budget in bytes from a size, a number of bytes, or `auto` (`None`)."""
    if isinstance(memory, int):
        return _checked(memory, str(memory))
    return None if memory.strip().lower() == "auto" else parse_size(memory)


def format_size(size_bytes: int) -> str:
    """`size_bytes` in decimal units with three significant digits: `17.5 MB`."""
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    if unit == "B":
        return f"{size_bytes} B"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def _checked(size_bytes: int, text: str, *, smallest: int = 1) -> int:
    if not smallest <= size_bytes <= _LARGEST_BYTES:
        raise InputError(
            f"expected a size from {smallest} byte to {_LARGEST_BYTES} bytes, found `{text}`",
            hint=_HINT,
        )
    return size_bytes
