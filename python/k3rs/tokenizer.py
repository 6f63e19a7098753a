"""Text to token ids and back, as the tokenizer published with Kimi K3 does it.

The published files give ranks, not merges: of all adjacent pairs, the one whose
concatenation has the lowest rank is merged first, the leftmost at a tie. The `tokenizers`
package wants merges. *Every* split of every token into two tokens is listed, in order of
rank; one split per token would mis-merge ordinary words. A piece that is a token as a
whole is taken without merging (`ignore_merges`).

Text comes in two modes. `encode` never recognises a special token, so nothing that a
user or a tool writes can become markup. `encode_markup` recognises all of them.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from k3rs.exceptions import InputError
from k3rs.pretokenizer import PIECE_PATTERN, guard_rail_cuts
from k3rs.vocabulary import Vocabulary, read_vocabulary


class Tokenizer:
    """A vocabulary with its encoder; immutable, and safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._rank_count = len(vocabulary.ordinary)
        self._bytes_of = [*vocabulary.ordinary, *(text.encode() for text in vocabulary.special)]
        self._special_ids = {
            text: self._rank_count + slot for slot, text in enumerate(vocabulary.special)
        }
        longest_first = sorted(vocabulary.special, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._known_bytes = bytes(token[0] for token in vocabulary.ordinary if len(token) == 1)
        self._encoder = _build_encoder(vocabulary.ordinary)

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Reads `tiktoken.model` and `tokenizer_config.json` of a checkpoint.

        Raises `CheckpointError` if a file is missing or malformed, `ConfigError` if the
        vocabulary is not one of Kimi K3. Takes a second or two at the released size.
        """
        return cls(read_vocabulary(Path(path)))

    @property
    def vocabulary_size(self) -> int:
        """The number of ids, special ones included."""
        return len(self._bytes_of)

    @property
    def rank_count(self) -> int:
        """The number of ordinary tokens, which is also the first special id."""
        return self._rank_count

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The id of each special token by its text, slots without a name included."""
        return MappingProxyType(self._special_ids)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which nothing is special: `<|open|>` is eight characters.

        Raises `InputError` if `text` has a lone surrogate, or a byte without a token.
        """
        return self._encode_stretch(text, 0, len(text), guard_rail_cuts(text))

    def encode_markup(self, text: str) -> list[int]:
        """The ids of `text`, in which special tokens are recognised wherever they stand.

        The earliest wins, the longest at a tie. For trusted text only. A special token is
        never divided by a guard rail. Raises `InputError` as `encode` does.
        """
        cuts = guard_rail_cuts(text)
        ids: list[int] = []
        position = 0
        for match in self._special_pattern.finditer(text):
            ids += self._encode_stretch(text, position, match.start(), cuts)
            ids.append(self._special_ids[match.group()])
            position = match.end()
        return ids + self._encode_stretch(text, position, len(text), cuts)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that `token_id` stands for; a special token stands for its text.

        Raises `InputError` if the vocabulary has no such id.
        """
        if not 0 <= token_id < len(self._bytes_of):
            raise InputError(
                f"expected a token id in 0..{len(self._bytes_of) - 1}, found {token_id}",
                hint="ids belong to one vocabulary; were these made for another model?",
            )
        return self._bytes_of[token_id]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of all `ids`. Raises `InputError` for an id outside the vocabulary."""
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of all `ids`; bytes that are not UTF-8 become U+FFFD.

        A token may hold part of a character, so texts of single ids do not add up to this;
        `TextStream` does. Raises `InputError` for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def _encode_stretch(self, text: str, start: int, end: int, cuts: list[int]) -> list[int]:
        """Encodes `text[start:end]`, divided at those of `cuts` that lie strictly within."""
        if start == end:
            return []
        self._check_encodable(text[start:end], start)
        inner = cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]
        ids: list[int] = []
        for left, right in pairwise([start, *inner, end]):
            ids += self._encoder.encode(text[left:right], add_special_tokens=False).ids
        return ids

    def _check_encodable(self, text: str, offset: int) -> None:
        """Raises `InputError` if `text`, which starts at `offset` of the input, has no ids."""
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"expected text, found half a surrogate pair, U+{ord(text[error.start]):04X}, "
                f"at character {offset + error.start}",
                hint="the text was decoded wrongly; was its file UTF-8?",
            ) from None
        # The encoder would drop such bytes without a word.
        unknown = data.translate(None, self._known_bytes)
        if unknown:
            index = len(data[: data.index(unknown[0])].decode("utf-8", "ignore"))
            raise InputError(
                f"expected text that the vocabulary covers, found byte 0x{unknown[0]:02X}, "
                f"which has no token, in {text[index]!r} at character {offset + index}",
                hint=f"this vocabulary has tokens for {len(self._known_bytes)} of 256 bytes",
            )


def _build_encoder(ordinary: list[bytes]) -> tokenizers.Tokenizer:
    """The byte-pair encoder of the tokens, listed by rank, with the pre-tokeniser in front."""
    names = _byte_names()
    # Latin-1 maps byte to character one to one, so that `translate` renames bytes.
    tokens = [token.decode("latin-1").translate(names) for token in ordinary]
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    merges = [
        (left, right)
        for token in tokens
        for middle in range(1, len(token))
        if (left := token[:middle]) in rank_of and (right := token[middle:]) in rank_of
    ]
    encoder = tokenizers.Tokenizer(models.BPE(vocab=rank_of, merges=merges, ignore_merges=True))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return encoder


def _byte_names() -> dict[int, int]:
    """The character by which `ByteLevel` names each byte: itself where it is visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: 256 + index for index, byte in enumerate(hidden)}
