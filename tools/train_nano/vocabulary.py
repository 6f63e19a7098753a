"""A byte-level vocabulary in the form of the release, learned from the training text.

`tiktoken.model` lists the ranks, `tokenizer_config.json` names the special tokens behind them.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, models, pre_tokenizers, trainers

#: Where no merge crosses, as `k3rs.pretokenizer` has it: the cut of the published tokenizer.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\p{L}\p{N}\r\n]?", r"(?:'(?i:[sdmt]|ll|re|ve))?"
PIECE_PATTERN = "|".join(
    (
        r"\p{Han}+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r"\ ?[^\p{L}\p{N}\s]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

#: Slots behind the ranks that have a name; all others are reserved.
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


def learn(text: str, rank_count: int) -> list[bytes]:
    """The tokens by rank: the 256 bytes, then merges by falling frequency."""
    characters = _byte_characters()
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = _pre_tokenizer()
    alphabet = sorted(characters)
    learner.train_from_iterator(
        [text],
        trainers.BpeTrainer(vocab_size=rank_count, initial_alphabet=alphabet, show_progress=False),
    )
    ids = learner.get_vocab()
    merged = sorted((token for token in ids if len(token) > 1), key=lambda token: ids[token])
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes(characters[character] for character in token) for token in merged]
    if len(tokens) != rank_count:
        raise ValueError(f"expected {rank_count} ranks, found {len(tokens)}: the text is too short")
    return tokens


def encoder(tokens: list[bytes]) -> tokenizers.Tokenizer:
    """Encodes as `k3rs` does: every split of a token is a merge, in the order of ranks."""
    names = {byte: character for character, byte in _byte_characters().items()}
    named = ["".join(names[byte] for byte in token) for token in tokens]
    ranks = {token: rank for rank, token in enumerate(named)}
    merges = [
        (token[:middle], token[middle:])
        for token in named
        for middle in range(1, len(token))
        if token[:middle] in ranks and token[middle:] in ranks
    ]
    result = tokenizers.Tokenizer(models.BPE(vocab=ranks, merges=merges, ignore_merges=True))
    result.pre_tokenizer = _pre_tokenizer()
    return result


def write(directory: Path, tokens: list[bytes]) -> None:
    """Writes both vocabulary files."""
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    document = {
        "added_tokens_decoder": {
            str(len(tokens) + slot): {"content": text, "special": True}
            for slot, text in NAMED_SLOTS.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
    }
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read(directory: Path) -> list[bytes]:
    """The ranks that `write` wrote."""
    lines = (directory / "tiktoken.model").read_bytes().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_characters() -> dict[str, int]:
    """The byte for which each character of `ByteLevel` stands."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    named = {chr(byte): byte for byte in visible}
    return named | {chr(256 + index): byte for index, byte in enumerate(hidden)}
