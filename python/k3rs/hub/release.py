"""The released checkpoint as published: how many shards, and how large each is.

The sizes are those that the repository `moonshotai/Kimi-K3` lists for
`model-00001-of-000096.safetensors` to `model-00096-of-000096.safetensors`.
"""

from itertools import chain, repeat

__all__ = ["RELEASED_SHARD_BYTES"]

_SHARD_COUNT = 96

# The first shard is layer 0, which has no experts, and so on to layer 92; then come the embedding
# with the output matrix, and two shards for images. Every fourth layer has full attention, and
# the last as well; the others have linear attention. From layer 10 on the names of the tensors,
# and so the headers, are longer by a digit.
_LINEAR, _FULL = 16_990_911_504, 16_567_501_776
_LATE_LINEAR, _LATE_FULL = 16_990_916_912, 16_567_507_176
_SIZES = (
    2_341_216_112,
    _LINEAR, _LINEAR, _FULL,
    _LINEAR, _LINEAR, _LINEAR, _FULL,
    _LINEAR, _LINEAR, _LATE_LINEAR, _LATE_FULL,
    *chain.from_iterable(repeat((*repeat(_LATE_LINEAR, 3), _LATE_FULL), 20)),
    _LATE_FULL,
    4_697_664_072,
    92_289_328,
    802_448_352,
)  # fmt: skip

RELEASED_SHARD_BYTES = {
    f"model-{number:05}-of-{_SHARD_COUNT:06}.safetensors": size_bytes
    for number, size_bytes in enumerate(_SIZES, 1)
}
"""The size of every shard by its name."""
