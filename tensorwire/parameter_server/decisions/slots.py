"""Decides which shard keeps which slot. An id belongs to one of 1 024 slots, by its hash, for good.

A map gives each slot a shard. When shards come or go, as few slots move as can be, so that
each shard has its fair share afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

SLOT_BITS: Final = 10
SLOTS: Final = 1 << SLOT_BITS

_MULTIPLIER: Final = 0xD6E8FEB86659FD93
_MASK: Final = (1 << 64) - 1


def mix(value: int) -> int:
    """The 64-bit hash of an id. Its high bits give the slot, its low ones a place in an index."""
    value &= _MASK
    for _ in range(2):
        value ^= value >> 32
        value = value * _MULTIPLIER & _MASK
    return value ^ (value >> 32)


def slot_of(identity: int) -> int:
    """The slot of an id."""
    return mix(identity) >> (64 - SLOT_BITS)


def evenly(shards: Sequence[int]) -> tuple[int, ...]:
    """A first map: each shard has an equal share of the slots, next to each other."""
    return tuple(shards[slot * len(shards) // SLOTS] for slot in range(SLOTS))


def moved(old: Sequence[int], shards: Sequence[int]) -> tuple[int, ...]:
    """The map for other shards that moves the fewest slots.

    Args:
        old: by slot, its shard until now.
        shards: those that are to have slots from now on, without repetition.
    """
    shares = _shares(old, shards)
    kept: Counter[int] = Counter()
    new: list[int | None] = []
    for shard in old:
        stays = kept[shard] < shares.get(shard, 0)
        kept[shard] += stays
        new.append(shard if stays else None)
    wanting = [shard for shard in shards for _ in range(shares[shard] - kept[shard])]
    takers = iter(wanting)
    return tuple(next(takers) if shard is None else shard for shard in new)


def _shares(old: Sequence[int], shards: Sequence[int]) -> dict[int, int]:
    """The number of slots that each shard is to have; who has most keeps the odd ones."""
    least, odd = divmod(len(old), len(shards))
    held = Counter(old)
    by_size = sorted(shards, key=lambda shard: -held[shard])
    return {shard: least + (place < odd) for place, shard in enumerate(by_size)}
