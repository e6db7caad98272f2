"""Sans-IO: where stages and their backups go, and which version a pipeline goes back to.

A *seat* is one replica of one stage. Its *version* s is its state after s cuts; a cut is made at
the first step after the optimizer has stepped. A version is usable if every seat has a copy of
it somewhere, with its owner or with its backup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

Owners = tuple[tuple[str, ...], ...]
"""The workers of each stage: one, or its replicas."""


@dataclass(frozen=True, slots=True, order=True)
class Seat:
    """One replica of one stage."""

    stage: int
    replica: int = 0

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f", replica {self.replica}" if self.replica else "")


@dataclass(frozen=True, slots=True)
class Copy:
    """Names a copy of a seat's state."""

    seat: Seat
    version: int


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a living worker that was asked what it has.

    Args:
        host: names its machine.
        copies: whole ones only.
    """

    host: str
    copies: frozenset[Copy] = frozenset()


class NoCopyError(Exception):
    """There is no version of which every seat has a copy.

    Attributes:
        seat: one without a copy.
    """

    def __init__(self, seat: Seat, reason: str) -> None:
        super().__init__(reason)
        self.seat = seat


class NoPlaceError(Exception):
    """No living worker can take a seat now.

    Attributes:
        seat: which.
    """

    def __init__(self, seat: Seat) -> None:
        super().__init__(f"no living worker can take {seat}")
        self.seat = seat


def seats_of(owners: Sequence[Sequence[str]]) -> list[Seat]:
    """All seats, stage by stage."""
    return [Seat(s, r) for s, replicas in enumerate(owners) for r in range(len(replicas))]


def owner_in(owners: Sequence[Sequence[str]], seat: Seat) -> str:
    """The worker that has a seat."""
    return owners[seat.stage][seat.replica]


def newest_common_version(seats: Iterable[Seat], answers: Mapping[str, Found]) -> int:
    """The newest version of which every seat has a copy at some worker.

    Args:
        seats: of the pipeline.
        answers: what the living workers have.

    Raises:
        NoCopyError: there is none.
    """
    common: set[int] | None = None
    for seat in seats:
        versions = _versions(seat, answers)
        if not versions:
            raise NoCopyError(seat, f"no living worker has a copy of {seat}")
        common = versions if common is None else common & versions
        if not common:
            raise NoCopyError(seat, f"no copy of {seat} is as old as those of the stages before")
    return max(common or {0})


def safest_version(seats: Sequence[Seat], answers: Mapping[str, Found]) -> int:
    """The newest version that every seat has twice, or else the newest that all have.

    For a driver that comes back: it cannot go back from there to an older one.

    Raises:
        NoCopyError: there is no version that all have.
    """
    twice = [
        {v for v in _versions(seat, answers) if len(holders_of(seat, v, answers)) > 1}
        for seat in seats
    ]
    safe = set.intersection(*twice)
    return max(safe) if safe else newest_common_version(seats, answers)


def _versions(seat: Seat, answers: Mapping[str, Found]) -> set[int]:
    return {c.version for each in answers.values() for c in each.copies if c.seat == seat}


def holders_of(seat: Seat, version: int, answers: Mapping[str, Found]) -> list[str]:
    """The workers with a copy."""
    return [name for name, each in answers.items() if Copy(seat, version) in each.copies]


def choose_owners(
    wanted: Owners,
    answers: Mapping[str, Found],
    spares: Sequence[str] = (),
    version: int | None = None,
) -> Owners:
    """The owners of all seats: those wanted where they live, or else others in their place.

    The place of a lost worker is taken by a spare without a stage, by a worker with a copy, or by
    whoever has the fewest stages. One worker never gets two replicas of a stage.

    Args:
        wanted: owners if all were living.
        answers: the living workers.
        spares: workers without stages, preferred.
        version: of the copies that make a good owner.

    Raises:
        NoPlaceError: nobody is left for a seat.
    """
    chosen = [[each if each in answers else None for each in stage] for stage in wanted]
    for seat in seats_of(wanted):
        if chosen[seat.stage][seat.replica] is None:
            taken = {each for each in chosen[seat.stage] if each is not None}
            candidates = [each for each in answers if each not in taken]
            if not candidates:
                raise NoPlaceError(seat)
            load = {each: sum(stage.count(each) for stage in chosen) for each in candidates}
            holders = () if version is None else holders_of(seat, version, answers)
            chosen[seat.stage][seat.replica] = min(
                candidates,
                key=lambda each: (
                    not (each in spares and not load[each]),
                    each not in holders,
                    load[each],
                    candidates.index(each),
                ),
            )
    return tuple(tuple(each for each in stage if each is not None) for stage in chosen)


def choose_backups(
    owners: Owners, answers: Mapping[str, Found], others: Sequence[str] = ()
) -> dict[Seat, str]:
    """The worker that backs each seat up: the owner's next neighbour on another host.

    Neighbours are the owners in the order of their first stages, then the other workers. Where
    all are on one host, it is the next neighbour; a seat without any has no backup.
    """
    ring = list(dict.fromkeys([w for stage in owners for w in stage] + list(others)))
    ring = [each for each in ring if each in answers]
    backups = {}
    for seat in seats_of(owners):
        owner = owner_in(owners, seat)
        at = ring.index(owner)
        neighbours = ring[at + 1 :] + ring[:at]
        elsewhere = [each for each in neighbours if answers[each].host != answers[owner].host]
        if neighbours:
            backups[seat] = (elsewhere or neighbours)[0]
    return backups


def choose_sources(owners: Owners, version: int, answers: Mapping[str, Found]) -> dict[Seat, str]:
    """The worker whose copy each seat takes: its owner's own if it has one.

    Raises:
        NoCopyError: there is no copy of a seat.
    """
    sources = {}
    for seat in seats_of(owners):
        holders = holders_of(seat, version, answers)
        if not holders:
            raise NoCopyError(seat, f"no living worker has version {version} of {seat}")
        owner = owner_in(owners, seat)
        sources[seat] = owner if owner in holders else holders[0]
    return sources


def spread(costs: Sequence[float], workers: Sequence[str], homes: Owners) -> Owners:
    """Deals stages without replicas out to workers, neighbours together, the dearest least dear.

    Args:
        costs: of each stage, such as seconds a step.
        workers: that are to have stages, in order.
        homes: where stages are to be; stages with replicas stay there.
    """
    single = _without_replicas(homes)
    workers = workers[: len(single)]
    groups = _even_groups([costs[stage] for stage in single], len(workers))
    owners = list(homes)
    stages = iter(single)
    for worker, count in zip(workers, groups, strict=True):
        for _ in range(count):
            owners[next(stages)] = (worker,)
    return tuple(owners)


def at_home(workers: Sequence[str], homes: Owners) -> Owners | None:
    """A worker for each stage without replicas, its home if that is there; None: too few."""
    single = _without_replicas(homes)
    if len(single) > len(workers):
        return None
    owners = list(homes)
    used: set[str] = set()
    for stage in single:
        (home,) = homes[stage]
        if home in workers and home not in used:
            used.add(home)
        else:
            owners[stage] = ("",)
    free = (each for each in workers if each not in used)
    return tuple((next(free),) if each == ("",) else each for each in owners)


def _without_replicas(homes: Owners) -> list[int]:
    return [stage for stage, replicas in enumerate(homes) if len(replicas) == 1]


def _even_groups(costs: Sequence[float], groups: int) -> list[int]:
    """The sizes of consecutive groups, none empty, such that the costliest costs least."""
    sums = [0.0, *accumulate(costs)]
    best: list[tuple[float, list[int]]] = [(each, [end]) for end, each in enumerate(sums)]
    for number in range(1, groups):
        fresh: list[tuple[float, list[int]]] = [(float("inf"), [])] * len(sums)
        for end in range(number + 1, len(sums)):
            fresh[end] = min(
                (max(best[start][0], sums[end] - sums[start]), [*best[start][1], end - start])
                for start in range(number, end)
            )
        best = fresh
    return best[-1][1]
