"""Text of one paragraph in the columns of a terminal."""

import textwrap

from k3rs.cli.console import printable

__all__ = ["one_line", "paragraph"]

_COLUMNS = 80


def one_line(text: str) -> str:
    """`text`, which may have names of files in it, with nothing that moves the cursor."""
    return printable(text).translate({ord("\n"): "\u240a", ord("\t"): "\u2409"})


def paragraph(text: str, first: str = "", below: str | None = None) -> list[str]:
    """Lines of `text` behind `first`, and all but the first behind `below`; `first` without it.

    A word that is longer than a line, such as a path, stays whole.
    """
    return textwrap.wrap(
        one_line(text),
        _COLUMNS,
        initial_indent=first,
        subsequent_indent=first if below is None else below,
        break_long_words=False,
        break_on_hyphens=False,
    )
