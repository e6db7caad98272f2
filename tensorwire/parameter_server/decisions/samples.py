"""Decides which trainer trains which batch of samples, and keeps the account of those trained.

The batches of all epochs are numbered one after the other. An *account* is the set of numbers that
are part of the state. A *deal* gives all others to trainers, in turn: it is made at a point in
everybody's pushes that is the same on every shard, and holds until other trainers take part. A
push says from which batches it came and of which deal they are; one of an earlier deal is not
taken, as its batches have been given out again. So no batch can be taken twice, and what was given
to a trainer that died or left is given to others by the next deal. Part of the clock (``clock``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Ranges = tuple[tuple[int, int], ...]
"""A set of numbers: the first of each run and the one behind its last, in order, with gaps."""


def united(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """The set with further numbers."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted([*ranges, *((each, each + 1) for each in numbers)]):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return tuple(found)


def gaps(ranges: Ranges, end: int) -> Iterator[tuple[int, int]]:
    """The runs of numbers below ``end`` that are not in the set."""
    last = 0
    for begin, behind in ranges:
        if begin >= end:
            break
        if last < begin:
            yield last, begin
        last = behind
    if last < end:
        yield last, end


def size(ranges: Ranges) -> int:
    """The number of numbers in the set."""
    return sum(end - begin for begin, end in ranges)


def _ranges(value: Iterable[Sequence[Any]]) -> Ranges:
    return tuple((int(begin), int(end)) for begin, end in value)


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches from which a push came.

    Args:
        sampler: the name of the sampler.
        deal: the number of the deal that gave them to its sender.
        numbers: of the batches.
    """

    sampler: str
    deal: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deal:
    """The trainers among whom all batches are divided that were not done at some point.

    Args:
        number: counts the deals of an account.
        members: the trainers, in order.
        done: the batches that were done.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    done: Ranges = ()

    def of(self, trainer: int, begin: int, end: int) -> Iterator[int]:
        """The numbers of a trainer's batches from ``begin`` to before ``end``, in order.

        All that is left is given to the members in turn, one batch to each.
        """
        if trainer not in self.members:
            return
        place, count, before = self.members.index(trainer), len(self.members), 0
        for first, behind in gaps(self.done, end):
            start = max(first, begin)
            turn = before + start - first
            yield from range(start + (place - turn) % count, behind, count)
            before += behind - first


@dataclass(frozen=True, slots=True)
class Account:
    """The batches of one sampler that are part of a shard's state.

    Args:
        done: their numbers.
        deal: who is to train the others.
    """

    done: Ranges = ()
    deal: Deal = field(default_factory=Deal)

    def encode(self) -> list[Any]:
        """As a value of JSON."""
        return [self.done, self.deal.number, self.deal.members, self.deal.done]

    @classmethod
    def decode(cls, value: Sequence[Any]) -> Account:
        """The inverse of :meth:`encode`."""
        done, number, members, before = value
        return cls(_ranges(done), Deal(int(number), tuple(map(int, members)), _ranges(before)))

    def unassigned(self) -> Account:
        """The same samples, for a cluster with trainers of its own."""
        return Account(self.done)

    def remaining(self, trainer: int, begin: int, end: int) -> Iterator[int]:
        """The batches from ``begin`` to before ``end`` that a trainer has still to train."""
        done = [range(*each) for each in self.done]
        for number in self.deal.of(trainer, begin, end):
            if not any(number in each for each in done):
                yield number

    def dealt(self, trainers: Collection[int]) -> Account:
        """Gives all that is not done to these trainers."""
        deal = Deal(self.deal.number + 1, tuple(sorted(trainers)), self.done)
        return replace(self, deal=deal)

    def at_cut(self, trainers: Collection[int], joining: Collection[int]) -> Account:
        """Gives work to all trainers at a cut, if none of those who stay has any.

        Otherwise who joins gets some after the first step in which it takes part: until then the
        others have batches under way.
        """
        staying = set(trainers) - set(joining)
        if not trainers or staying & set(self.deal.members):
            return self
        return self.dealt(trainers)

    def refuses(self, batches: Batches) -> bool:
        """True if these were given out again meanwhile, or some of them are done.

        A head that has just taken over may tell a trainer of an account that lacks its last push,
        which is sent to that head only now: the trainer trains these batches once more.
        """
        done = (range(*each) for each in self.done)
        is_repeated = any(number in each for each in done for number in batches.numbers)
        return is_repeated or batches.deal != self.deal.number

    def stepped(self, taken: Iterable[Batches], members: Collection[int]) -> Account:
        """A step of these members was taken, with these batches in it."""
        numbers = [number for each in taken for number in each.numbers]
        after = replace(self, done=united(self.done, numbers)) if numbers else self
        return after if after.deal.members == tuple(sorted(members)) else after.dealt(members)
