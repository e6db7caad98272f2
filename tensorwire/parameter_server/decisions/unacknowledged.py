"""Decides, at a trainer, which pushes it must keep and what it sends again to whom.

A push is kept until every shard has said that it is safe. If a shard has a new head, it is sent
what it did not say that of, as it was. If a shard refuses a push, as it was split by the map
of an earlier epoch, the push is split anew and goes to all shards under the same number; so it is
if a shard that has not answered is no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Whole = TypeVar("Whole")
Part = TypeVar("Part")


@dataclass(slots=True)
class Kept(Generic[Whole, Part]):
    """A push that is not safe everywhere.

    Args:
        number: of the push.
        epoch: of the map by which it was split.
        whole: what to split anew.
        parts: by shard that has not said it is safe, what was sent to it.
    """

    number: int
    epoch: int
    whole: Whole
    parts: dict[int, Part] = field(default_factory=dict)


class Unacknowledged(Generic[Whole, Part]):
    """The pushes of one trainer that are under way."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept[Whole, Part]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def holds(self, number: int, shard: int | None = None) -> bool:
        """True if a push is not safe everywhere, or not at one shard."""
        kept = self._kept.get(number)
        return kept is not None and (shard is None or shard in kept.parts)

    def whole(self, number: int) -> Whole | None:
        """The push of this number; None if it is safe everywhere."""
        kept = self._kept.get(number)
        return None if kept is None else kept.whole

    def missing(self, number: int) -> list[int]:
        """The shards that have not said of a push that it is safe."""
        kept = self._kept.get(number)
        return [] if kept is None else sorted(kept.parts)

    def epoch(self, number: int) -> int:
        """The epoch by whose map a push was split; -1 if it is safe everywhere."""
        kept = self._kept.get(number)
        return -1 if kept is None else kept.epoch

    def oldest(self) -> int | None:
        """The number of the first push that is not safe everywhere."""
        return min(self._kept, default=None)

    def add(self, number: int, epoch: int, whole: Whole, parts: Mapping[int, Part]) -> None:
        """Keeps a push that is sent, or is sent again as it was split anew."""
        self._kept[number] = Kept(number, epoch, whole, dict(parts))

    def safe(self, shard: int, count: int) -> None:
        """Notes that the first ``count`` pushes are safe at a shard."""
        for number in [number for number in self._kept if number < count]:
            self._drop(number, shard)

    def stranded(self, shards: Collection[int]) -> list[int]:
        """The pushes of which a part went to a shard that is not one of these, in order.

        A shard that is no more does not say what it took. These must be split anew and sent to
        all under the same number: those who keep what it had say whether they have it.
        """
        there = set(shards)
        return [number for number, kept in sorted(self._kept.items()) if set(kept.parts) - there]

    def _drop(self, number: int, shard: int) -> None:
        kept = self._kept[number]
        kept.parts.pop(shard, None)
        if not kept.parts:
            del self._kept[number]

    def again(self, shard: int) -> list[tuple[int, int, Part]]:
        """The pushes that a new head of a shard must be sent: number, epoch and part, in order."""
        return [
            (number, kept.epoch, kept.parts[shard])
            for number, kept in sorted(self._kept.items())
            if shard in kept.parts
        ]

    def refused(self, number: int, epoch: int) -> Whole | None:
        """Takes the refusal of a part that was split under ``epoch``.

        Returns:
            The whole push, which must be split anew; None if it was already.
        """
        kept = self._kept.get(number)
        return kept.whole if kept is not None and kept.epoch == epoch else None

    def clear(self) -> int:
        """Forgets all, as the cluster went back; returns how many."""
        count = len(self._kept)
        self._kept.clear()
        return count
