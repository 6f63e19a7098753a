"""How text is cut before byte pairs are merged. No merge crosses a cut.

Two cuts exist. `guard_rail_cuts` bounds the work: it splits only extremely long input.
`PIECE_PATTERN` then divides each part into pieces: words, numbers, punctuation, white
space. Both follow the tokenizer published with Kimi K3; a cut in another place gives
other token ids, silently.
"""

import re

CUT_LENGTH = 400_000
"""Characters after which input is cut, wherever that is."""

RUN_LENGTH = 25_000
"""White space, or its absence, is cut after this many consecutive characters."""

# Marks, modifier letters and letters without case belong to both halves of a word. Han
# belongs to neither: leaving the intersection out would glue Han to its neighbours.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\p{L}\p{N}\r\n]?"
_CONTRACTION = r"(?:'(?i:[sdmt]|ll|re|ve))?"

# In order of preference: the first alternative that matches at a position wins.
_ALTERNATIVES = (
    r"\p{Han}+",
    _LEAD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
    _LEAD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
    r"\p{N}{1,3}",
    r"\ ?[^\p{L}\p{N}\s]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",  # leaves the last white space to the word that follows
    r"\s+",
)

PIECE_PATTERN = "|".join(_ALTERNATIVES)
"""Matches one piece, in the dialect of the `tokenizers` package (Oniguruma)."""

_RUN = re.compile(r"\s+|\S+")


def guard_rail_cuts(text: str) -> list[int]:
    """Positions where `text` is cut before anything else, ascending, without its two ends.

    White space is what `str.isspace` says, which is a little more than the pieces' `\\s`.
    Runs are counted anew after each cut at a multiple of `CUT_LENGTH`.
    """
    cuts: list[int] = []
    if len(text) <= RUN_LENGTH:
        return cuts
    for start in range(0, len(text), CUT_LENGTH):
        if start > 0:
            cuts.append(start)
        for run in _RUN.finditer(text, start, min(start + CUT_LENGTH, len(text))):
            cuts.extend(range(run.start() + RUN_LENGTH, run.end(), RUN_LENGTH))
    return cuts
