"""The text of `MODEL_CARD.md`, which stands beside the exported weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import corpus
from architecture import Architecture

_TEXT = """# A small Kimi K3

A language model of exactly the architecture of Kimi K3 with {parameters:.1f} million parameters,
trained from nothing by `tools/train_nano`. It exists to be run and taken apart: it writes
sentences in the manner of its only book and knows nothing. It has no weights, text or answers of
the released Kimi K3.

## Data

The King James Version of the Bible (1611), {training_bytes:,} bytes of training text and
{held_out_bytes:,} held out, as the Debian package `{package}` {version} carries it. The text is in
the public domain. The package puts its own files under this notice: "This file is provided for
unrestricted use provided that this legend is included on all tape media and as a part of the
software program in whole or part. Users may copy, modify or distribute this file at will. -- Chip
Chapin, September 4, 1989". The weights come under the licence of k3rs.

Verse numbers are left out: a section is a heading (`Genesis 1`), an empty line, and a line for each
verse. Everything from `1 Thessalonians 1` to the end is held out and was never trained on.

## Model

* {layers} layers of width {hidden}: KDA, and gated MLA in layers {mla} (counted from 1); the
  first has a dense MLP; residual snapshots every {residual_block} layers.
* KDA: {kda_heads} heads of {kda_head_dim}, convolution over {kernel_size} tokens, log decay
  above -5.
* MLA: {mla_heads} heads, latent {latent_rank}, query rank {query_rank}, no rotation.
* Experts: {experts} in a layer and {experts_per_token} for a token, width {expert_size} on a latent
  of {expert_input}; {shared_experts} shared ones.
* Vocabulary: {rank_count} byte-level ranks, then the 256 special slots of K3.
* Stored in BF16, routed experts in MXFP4: {size:.2f} MB with index, config and vocabulary.

## Training

{steps} steps of {step_tokens} tokens ({epochs:.1f} passes over the text) in windows of {short}, for
the last {long_share:.0%} of {long}; Muon and Adam; seed {seed}. Every forward pass used the weights
as they are stored: experts rounded to MXFP4, the rest to BF16, with straight-through gradients. The
router's bias was moved by the sign of each expert's excess load; there was no balancing loss and
no token was dropped. Training loss at the end: {training_loss} nats per token.

## Measured

{measured}

## Limits

It continues text, it does not answer. The special tokens were never seen in training: it does not
stop by itself and cannot chat. Words and spelling outside of its book are foreign to it. It was
trained on windows of at most {long} tokens; the loss of later positions is in the table above. Its
text repeats the attitudes of a translation of 1611, and passages of the book verbatim.
"""

_UNFINISHED = "This is a checkpoint of a training that has not ended: nothing was measured."


_METHOD = """Teacher-forced loss of the exported weights in the trainer's own forward pass, each
text as one sequence from an empty state, and of interpolated Kneser-Ney models over the same
tokens. The first token of a text is not predicted; there is no BOS."""


def write(shape: Architecture, facts: Mapping[str, Any], figures: Mapping[str, Any]) -> str:
    """The card from what the run knows and what was measured, by name of text and of model."""
    sizes = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
    mla = ", ".join(str(layer + 1) for layer in shape.mla_layers)
    return _TEXT.format(
        **sizes,
        **facts,
        mla=mla,
        package=corpus.PACKAGE,
        version=corpus.VERSION,
        measured=_table(figures) if figures else _UNFINISHED,
    )


def _table(figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    parts = [_METHOD]
    for text, models in figures.items():
        tokens = int(next(iter(models.values()))["tokens"])
        lines = [
            f"{text}: {tokens} predicted tokens.",
            "",
            "| model | nats per token | perplexity | bits per byte |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {model} | {loss['nats_per_token']:.4f} | {loss['perplexity']:.2f} "
            f"| {loss['bits_per_byte']:.4f} |"
            for model, loss in models.items()
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
