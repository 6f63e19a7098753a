"""The text: the King James Bible as the Debian package `bible-kjv-text` carries it.

The text is in the public domain; the package's own terms are unrestricted use. It is fetched with
`apt-get download` at a pinned version and refused if its hash differs. The data file is a table of
windows, each compressed by the method of compress(1) without the three bytes of its header.

The training text is made of sections, one a chapter: a heading such as `Genesis 1`, an empty
line, then a line for each verse; an empty line stands between sections.
"""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGE, VERSION = "bible-kjv-text", "4.38"
PACKAGE_SHA256 = "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a"
DATA_FILE = "usr/lib/bible.data"
#: Big-endian offsets of the windows in the data file: their place, then their number plus one.
OFFSETS_AT, WINDOWS = 0x5C, 68
#: The first book of the held-out part, about 5 % of the text, which goes to the end.
FIRST_HELD_OUT_BOOK = "1Th"

#: Headings of the books that the package abbreviates.
BOOK_NAMES = {
    "Ge": "Genesis",
    "Exo": "Exodus",
    "Lev": "Leviticus",
    "Num": "Numbers",
    "Deu": "Deuteronomy",
    "Josh": "Joshua",
    "Jdgs": "Judges",
    "1Sm": "1 Samuel",
    "2Sm": "2 Samuel",
    "1Ki": "1 Kings",
    "2Ki": "2 Kings",
    "1Chr": "1 Chronicles",
    "2Chr": "2 Chronicles",
    "Neh": "Nehemiah",
    "Est": "Esther",
    "Psa": "Psalm",
    "Prv": "Proverbs",
    "Eccl": "Ecclesiastes",
    "SSol": "Song of Solomon",
    "Isa": "Isaiah",
    "Jer": "Jeremiah",
    "Lam": "Lamentations",
    "Eze": "Ezekiel",
    "Dan": "Daniel",
    "Hos": "Hosea",
    "Obad": "Obadiah",
    "Mic": "Micah",
    "Hab": "Habakkuk",
    "Zep": "Zephaniah",
    "Hag": "Haggai",
    "Zec": "Zechariah",
    "Mal": "Malachi",
    "Mat": "Matthew",
    "Rom": "Romans",
    "1Cor": "1 Corinthians",
    "2Cor": "2 Corinthians",
    "Gal": "Galatians",
    "Eph": "Ephesians",
    "Phi": "Philippians",
    "Col": "Colossians",
    "1Th": "1 Thessalonians",
    "2Th": "2 Thessalonians",
    "1Tim": "1 Timothy",
    "2Tim": "2 Timothy",
    "Phmn": "Philemon",
    "Heb": "Hebrews",
    "Jas": "James",
    "1Pet": "1 Peter",
    "2Pet": "2 Peter",
    "1Jn": "1 John",
    "2Jn": "2 John",
    "3Jn": "3 John",
    "Rev": "Revelation",
}


@dataclass(frozen=True)
class Corpus:
    """The two parts of the text."""

    training: str
    held_out: str


def load(cache: Path) -> Corpus:
    """The text, from the package in `cache`, which is fetched if it is not there."""
    data = _data_file(cache)
    offsets = struct.unpack_from(f">{WINDOWS + 1}I", data, OFFSETS_AT)
    windows = pairwise(offsets)
    text = b"".join(decompress(data[begin:end]) for begin, end in windows).decode("ascii")
    sections: dict[tuple[str, str], list[str]] = {}
    for line in text.splitlines()[1:]:
        match = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line)
        if match is None:
            raise ValueError(f"expected a verse `Book1:2 text`, found {line[:80]!r}")
        sections.setdefault((match[1], match[2]), []).append(match[3].strip())
    books = list(dict.fromkeys(book for book, _ in sections))
    split = books.index(FIRST_HELD_OUT_BOOK)
    parts: tuple[list[str], list[str]] = ([], [])
    for (book, chapter), verses in sections.items():
        heading = f"{BOOK_NAMES.get(book, book)} {chapter}"
        parts[books.index(book) >= split].append("\n".join([heading, "", *verses]) + "\n")
    training, held_out = ("\n".join(part) for part in parts)
    return Corpus(training, held_out)


def excerpt(text: str, length: int) -> str:
    """The first whole sections of `text`, at most `length` characters."""
    return text[: text.rindex("\n\n", 0, text.rindex("\n\n", 0, length)) + 1]


def _data_file(cache: Path) -> bytes:
    path = cache / f"{PACKAGE}_{VERSION}_all.deb"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = ["apt-get", "download", f"{PACKAGE}={VERSION}"]
        subprocess.run(command, cwd=cache, check=True)  # noqa: S603
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != PACKAGE_SHA256:
        raise ValueError(f"{path}: expected SHA-256 {PACKAGE_SHA256}, found {digest}")
    command = ["dpkg-deb", "-x", str(path), str(cache / PACKAGE)]
    subprocess.run(command, check=True)  # noqa: S603
    return (cache / PACKAGE / DATA_FILE).read_bytes()


def decompress(data: bytes) -> bytes:
    """Undoes compress(1): LZW with codes of 9 to 16 bits, lowest bit first, code 256 clears.

    Codes are written in groups of eight; when their width changes, the rest of a group is unused.
    """
    table = [bytes([value]) for value in range(256)] + [b""]
    result: list[bytes] = []
    previous: bytes | None = None
    position, group_start, width = 0, 0, 9
    while position + width <= 8 * len(data):
        word = int.from_bytes(data[position >> 3 : (position >> 3) + 4], "little")
        code = (word >> (position & 7)) & ((1 << width) - 1)
        position += width
        new_width = width
        if code == 256:
            del table[257:]
            previous, new_width = None, 9
        else:
            if previous is not None:
                first = table[code][:1] if code < len(table) else previous[:1]
                table.append(previous + first)
            previous = table[code]
            result.append(previous)
            if len(table) == 1 << width and width < 16:
                new_width = width + 1
        if code == 256 or new_width != width:
            group = 8 * width
            position = group_start + -(-(position - group_start) // group) * group
            group_start, width = position, new_width
    return b"".join(result)
