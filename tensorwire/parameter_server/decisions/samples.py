"""Decides which trainer trains which batch of samples, and keeps the account of those trained.

The batches of all epochs are numbered one after the other. An *account* is the set of numbers that
are part of the state. A *deal* gives all others to trainers, in turn: it is made at a point in
everybody's pushes that is the same on every shard, and holds until other trainers take part. A
push says from which batches it came and of which deal they are; one of an earlier deal is not
taken, as its batches have been given out again. So no batch can be taken twice, and what was given
to a trainer that died or left is given to others by the next deal. Part of the clock (``clock``).

Deals are for BSP. Under SSP and async, where trainers are at steps of their own, a trainer that has
nothing left asks one shard, the *lessor*, for a run of batches: a *lease*. What a trainer had on
lease and had not pushed when it was dismissed is free again. No batch is on lease twice, so none
is pushed by two. Where rows move to other shards, and with them the part of the lessor, all leases
end, and the deal's number rises: whatever is pushed of an ended lease is not taken.

Files (``files``) are dealt and leased like batches. As one file may be much longer than another,
a deal is also made when one trainer has finished all of its files and another has two or more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from tensorwire.parameter_server.decisions.files import Begun, Part, advanced, follows
from tensorwire.parameter_server.opaque import Json

LONGEST_LEASE: Final = 64
"""Batches that are given out at a time, so that asking for them costs little of each step."""

Ranges = tuple[tuple[int, int], ...]
"""A set of numbers: the first of each run and the one behind its last, in order, with gaps."""


def united(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """The set with further numbers."""
    return _joined(ranges, tuple((each, each + 1) for each in numbers))


def _joined(*sets: Ranges) -> Ranges:
    """All numbers of some sets."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(each for ranges in sets for each in ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return tuple(merged)


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


def without(ranges: Ranges, numbers: Iterable[int]) -> Ranges:
    """The set without some numbers."""
    left = list(ranges)
    for number in numbers:
        for at, (begin, end) in enumerate(left):
            if begin <= number < end:
                parts = (begin, number), (number + 1, end)
                left[at : at + 1] = [(a, b) for a, b in parts if a < b]
                break
    return tuple(left)


def size(ranges: Ranges) -> int:
    """The number of numbers in the set."""
    return sum(end - begin for begin, end in ranges)


def _ranges(value: Iterable[Sequence[Json]]) -> Ranges:
    return tuple((int(begin), int(end)) for begin, end in value)


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches from which a push came.

    Args:
        sampler: the name of the sampler.
        deal: the number of the deal that gave them to its sender.
        numbers: of the batches; of files, those that end with this push.
        parts: of files.
        window: of files that were dealt: those that its sender knows to be left are from the first
            of these numbers on to before the second.
    """

    sampler: str
    deal: int
    numbers: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    window: tuple[int, int] = (0, 0)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles in one call, as each push is; a dataclass would look up its fields one by one."""
        return Batches, (self.sampler, self.deal, self.numbers, self.parts, self.window)


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
class LeaseAsked:
    """A trainer asks for batches.

    Args:
        trainer: who asks.
        sampler: of which sampler.
        number: counts its requests; one that comes again is answered as before.
        begin: of the batches from this one on,
        end: to before this one.
        pushes: that it has made.
        is_first: it has nothing on lease, as far as it knows: what it has is free again.
        least: how many it can make use of at once.
    """

    trainer: int
    sampler: str
    number: int
    begin: int
    end: int
    pushes: int = 0
    is_first: bool = False
    least: int = 1


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to :class:`LeaseAsked`.

    Args:
        begin: the first batch that is the asker's now,
        end: and the one behind the last; the same if none is free.
        deal: its number.
        deals: of the clock.
        time: pushes of the fastest trainer.
        is_done: all that it asked of are part of the state.
        begun: of files, how far those that are the asker's now are trained.
    """

    begin: int
    end: int
    deal: int
    deals: int
    time: int
    is_done: bool
    begun: tuple[Begun, ...] = ()


@dataclass(frozen=True, slots=True)
class NoLessor:
    """The answer of a shard that gives no leases, or not yet: look again, and ask again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The batches that a trainer is to train.

    Args:
        trainer: who.
        number: of its last request.
        given: the answer to that: the first batch, and the one behind the last.
        open: all batches that it was given and that are not part of the state.
    """

    trainer: int
    number: int
    given: tuple[int, int]
    open: Ranges


@dataclass(frozen=True, slots=True)
class Account:
    """The batches of one sampler that are part of a shard's state.

    Args:
        done: their numbers.
        deal: who is to train the others.
        leases: likewise, under SSP and async; only the lessor knows.
        begun: the files of which a part is done.
    """

    done: Ranges = ()
    deal: Deal = field(default_factory=Deal)
    leases: tuple[Lease, ...] = ()
    begun: tuple[Begun, ...] = ()

    def encode(self) -> list[object]:
        """Encodes it as a value of JSON, without leases."""
        begun = [each.encode() for each in self.begun]
        return [self.done, self.deal.number, self.deal.members, self.deal.done, begun]

    @classmethod
    def decode(cls, value: Sequence[Json]) -> Account:
        """The inverse of :meth:`encode`; takes what earlier versions wrote, without files."""
        done, number, members, before, *files = value
        deal = Deal(int(number), tuple(map(int, members)), _ranges(before))
        begun = tuple(Begun.decode(each) for some in files for each in some)
        return cls(_ranges(done), deal, begun=begun)

    def unassigned(self) -> Account:
        """The same account, for a cluster with trainers of its own."""
        return Account(self.done, begun=self.begun)

    def remaining(self, trainer: int, begin: int, end: int) -> Iterator[int]:
        """The batches from ``begin`` to before ``end`` that a trainer has still to train."""
        yield from self.untrained(self.deal.of(trainer, begin, end))

    def untrained(self, numbers: Iterable[int]) -> Iterator[int]:
        """Those of some batches that are not part of the state, in the same order."""
        done = [range(*each) for each in self.done]
        for number in numbers:
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
        numbers = (*batches.numbers, *(part.file for part in batches.parts))
        done = (range(*each) for each in self.done)
        is_repeated = any(number in each for each in done for number in numbers)
        has_gap = not all(follows(self.begun, part) for part in batches.parts)
        return is_repeated or has_gap or batches.deal != self.deal.number

    def stepped(self, taken: Iterable[Batches], members: Collection[int]) -> Account:
        """Deals anew after a step of these members, if need be; its batches were entered."""
        ended = [each for each in taken if each.parts and each.numbers]
        if self.deal.members != tuple(sorted(members)) or self._is_uneven(ended):
            return self.dealt(members)
        return self

    def _with(self, batches: Batches) -> Account:
        """Enters batches, or parts of files."""
        done = united(self.done, batches.numbers) if batches.numbers else self.done
        begun = advanced(self.begun, batches.parts) if batches.parts else self.begun
        return replace(self, done=done, begun=begun)

    def _is_uneven(self, ended: Sequence[Batches]) -> bool:
        """True if a trainer has no file left, as some have ended, and another has two or more."""
        if not ended:
            return False
        begin, end = min(e.window[0] for e in ended), max(e.window[1] for e in ended)
        lefts = [self.remaining(who, begin, end) for who in self.deal.members]
        counts = [len(list(islice(left, 2))) for left in lefts]
        return min(counts, default=0) == 0 and max(counts, default=0) == 2

    # --- leases

    def lease(self, asked: LeaseAsked, trainers: int) -> tuple[Account, tuple[int, int]]:
        """Gives a trainer a run of batches that are free.

        Args:
            asked: what it asks.
            trainers: how many there are, who share what is left.

        Returns:
            The account with the lease, and the first batch and the one behind the last.
        """
        known = self._lease_of(asked.trainer)
        if known is not None and known.number >= asked.number:
            return self, known.given if known.number == asked.number else (0, 0)
        before = self.forgetting(asked.trainer) if asked.is_first else self
        given = before._free(asked, trainers)
        held = () if known is None or asked.is_first else known.open
        lease = Lease(asked.trainer, asked.number, given, united(held, range(*given)))
        return before._with_lease(lease), given

    def _lease_of(self, trainer: int) -> Lease | None:
        return next((each for each in self.leases if each.trainer == trainer), None)

    def _with_lease(self, lease: Lease) -> Account:
        others = tuple(each for each in self.leases if each.trainer != lease.trainer)
        return replace(self, leases=(*others, lease))

    def _free(self, asked: LeaseAsked, trainers: int) -> tuple[int, int]:
        """The next batches to be leased: fewer at a time, the fewer are left for each trainer."""
        begin, end = asked.begin, asked.end
        taken = _joined(self.done, *(each.open for each in self.leases))
        free = [(max(first, begin), behind) for first, behind in gaps(taken, end) if behind > begin]
        if not free:
            return 0, 0
        share = min(LONGEST_LEASE, size(tuple(free)) // (2 * max(1, trainers)))
        longest = max(1, asked.least, share)
        first, behind = free[0]
        return first, min(behind, first + longest)

    def is_done(self, begin: int, end: int) -> bool:
        """True if all batches from ``begin`` to before ``end`` are part of the state."""
        return all(behind <= begin for _, behind in gaps(self.done, end))

    def forgetting(self, trainer: int) -> Account:
        """Frees the batches that a trainer had on lease."""
        if self._lease_of(trainer) is None:
            return self
        return replace(self, leases=tuple(e for e in self.leases if e.trainer != trainer))

    def trained(self, trainer: int, batches: Batches | None) -> Account:
        """Enters a push of a trainer that was taken."""
        if batches is None:
            return self
        after = self._with(batches)
        lease = self._lease_of(trainer)
        if lease is None:
            return after
        return after._with_lease(replace(lease, open=without(lease.open, batches.numbers)))

    def free(self) -> Account:
        """Ends all leases; whatever is pushed of them is not taken any more."""
        return Account(self.done, Deal(self.deal.number + 1), begun=self.begun)

    def begun_in(self, begin: int, end: int) -> tuple[Begun, ...]:
        """The files from ``begin`` to before ``end`` of which a part is done."""
        return tuple(each for each in self.begun if begin <= each.file < end)

    def without_leases(self) -> Account:
        """The same account, as shards other than the lessor have it."""
        return replace(self, leases=()) if self.leases else self
