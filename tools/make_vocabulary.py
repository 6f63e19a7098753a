"""Makes the two small vocabularies of `fixtures/`, always the same bytes.

    python tools/make_vocabulary.py [--output DIRECTORY]

`vocabulary/` is a byte-level BPE vocabulary learned from `fixtures/vocabulary/text.txt`:
many scripts, every byte has a token. `tiny_k3/model/` gets 64 tokens, picked by hand, for a
model whose tables must stay small: it covers lower case English and refuses the rest.
Both have the special tokens of Kimi K3 behind their ranks. Needs k3rs to be installed.
"""

import argparse
import base64
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from k3rs.pretokenizer import PIECE_PATTERN
from k3rs.vocabulary import CONFIG_FILE, RANKS_FILE

ROOT = Path(__file__).resolve().parent.parent

LEARNED_SIZE = 1152
"""Ranks of the learned vocabulary, the 256 bytes included."""

TINY_CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,!?'\"-:;()=_`/<>|+*#"
TINY_MERGES = ("th", "he", "the", "in", "er")

# Slot behind the ranks -> text; every other slot of the 256 is reserved.
NAMED_SLOTS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}


def learn(text: str, size: int) -> list[bytes]:
    """The 256 bytes, then the tokens of the most frequent pairs, the smaller pair at a tie."""
    splitter = pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated")
    pieces = Counter(piece for piece, _ in splitter.pre_tokenize_str(text))
    words = [[bytes([byte]) for byte in piece.encode()] for piece in pieces]
    counts = list(pieces.values())
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)

    pair_counts: Counter[tuple[bytes, bytes]] = Counter()
    words_with: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        for pair in pairwise(word):
            pair_counts[pair] += counts[index]
            words_with[pair].add(index)

    while len(tokens) < size:
        best = min(pair_counts, key=lambda pair: (-pair_counts[pair], pair))
        if pair_counts[best] < 2:
            raise SystemExit(f"the text is too short: it yields {len(tokens)} of {size} tokens")
        token = best[0] + best[1]
        if token not in known:
            known.add(token)
            tokens.append(token)
        for index in words_with.pop(best):
            for pair in pairwise(words[index]):
                pair_counts[pair] -= counts[index]
            words[index] = merged(words[index], best)
            for pair in pairwise(words[index]):
                pair_counts[pair] += counts[index]
                words_with[pair].add(index)
    return tokens


def merged(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """`word` with every occurrence of `pair` joined, from the left."""
    result: list[bytes] = []
    index = 0
    while index < len(word):
        if tuple(word[index : index + 2]) == pair:
            result.append(pair[0] + pair[1])
            index += 2
        else:
            result.append(word[index])
            index += 1
    return result


def write(directory: Path, tokens: list[bytes]) -> None:
    """Writes both files in the form in which the released ones come."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (directory / RANKS_FILE).write_bytes(b"".join(lines))
    config = {
        "added_tokens_decoder": {
            str(len(tokens) + slot): {"content": text, "special": True}
            for slot, text in NAMED_SLOTS.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Writes both vocabularies."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "fixtures", metavar="DIRECTORY")
    output = parser.parse_args().output

    text = (ROOT / "fixtures" / "vocabulary" / "text.txt").read_text(encoding="utf-8")
    write(output / "vocabulary", learn(text, LEARNED_SIZE))
    tiny = [token.encode() for token in (*TINY_CHARACTERS, *TINY_MERGES)]
    write(output / "tiny_k3" / "model", tiny)


if __name__ == "__main__":
    main()
