"""Sans-IO: the driver of a pipeline with backups: what it does next, also when workers die.

The coordinator keeps the operations since the newest version that every seat has twice. When a
worker is lost, it asks the living ones what they have, has them go back to the newest version of
which each seat has a copy, and performs the operations since then again. As operations are
deterministic, what comes of them is what came before.

Methods are generators: they yield effects and are sent their results. Whoever carries effects out
throws :class:`Lost` into the generator when a worker that takes part is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from tensorwire.pipeline.backups.places import (
    Found,
    NoCopyError,
    NoPlaceError,
    Owners,
    Seat,
    choose_backups,
    choose_owners,
    choose_sources,
    newest_common_version,
    owner_in,
    safest_version,
    seats_of,
)
from tensorwire.pipeline.backups.shelf import Epoch

_MOST_TRAINED: Final = 64
"""Steps without the optimizer's after which a cut is made all the same, to bound the log."""


class Lost(Exception):
    """A worker that takes part is gone; thrown into the coordinator's generators."""


class Kind(enum.Enum):
    """The kinds of operations, by what a failed one leaves behind."""

    TRAIN = enum.auto()
    """Adds gradients; leaves them as they were if it fails."""
    CHANGE = enum.auto()
    """Changes gradients or modes at each worker by itself; if it fails, some have changed."""
    STEP = enum.auto()
    """Changes what a backup has: parameters, the optimizer's state."""
    ASK = enum.auto()
    """Changes nothing, and is not kept."""
    UNREPEATABLE = enum.auto()
    """Changed what a backup has from outside; cannot be done again."""


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Something that all owners do.

    Args:
        kind: what a failure leaves behind.
        work: says to whoever carries it out what to do.
        kept: the driver's own state, which goes to backups with a cut.
        cut: the version that is copied to backups before it; None: none.
        drawn: how many training steps came before.
    """

    kind: Kind
    work: Any
    kept: Any = None
    cut: int | None = None
    drawn: int = 0


@dataclass(frozen=True, slots=True)
class Gather:
    """Asks workers for what they have; they obey this epoch from then on, and answer.

    Args:
        epoch: the epoch that they obey.
        names: of the workers, None for all of the group; lost workers give no answer.
        begins: the pipeline begins anew, so all copies are dropped.
    """

    epoch: Epoch
    names: tuple[str, ...] | None
    begins: bool = False


@dataclass(frozen=True, slots=True)
class Form:
    """Has workers take seats.

    Args:
        epoch: in which.
        owners: of each stage.
        backups: the worker that backs each seat up.
        version: that they go back to; None: they are as they are.
        sources: the worker with the copy for each seat.
    """

    epoch: Epoch
    owners: Owners
    backups: Mapping[Seat, str]
    version: int | None = None
    sources: Mapping[Seat, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Execute:
    """Has all owners do an operation; results in what comes of it."""

    epoch: Epoch
    operation: Operation


@dataclass(frozen=True, slots=True)
class Settle:
    """Tells all that every seat has a version twice; nobody waits for that."""

    epoch: Epoch
    version: int


@dataclass(frozen=True, slots=True)
class AwaitWorkers:
    """Waits until one of these workers is living, or for as long as one waits for them.

    Args:
        names: of the workers.
        are_needed: nobody else can take their stages.
    """

    names: frozenset[str]
    are_needed: bool


Effect: TypeAlias = "Gather | Form | Execute | Settle | AwaitWorkers"
Course: TypeAlias = Generator[Effect, Any, Any]


class Coordinator:
    """The driver's decisions for one pipeline.

    Args:
        homes: the owners that the user wants.
        spares: workers without stages that may take some.
        epoch: before the first.
        makes_backups: without, copies are made only while stages move.
        asks_all: copies may be with any worker of the group.
        waits: says whether to wait for the return of lost workers still, rather than to put
            their stages elsewhere.
    """

    def __init__(
        self,
        homes: Owners,
        spares: Sequence[str],
        epoch: Epoch,
        waits: Callable[[frozenset[str]], bool] = lambda lost: False,
        *,
        makes_backups: bool = True,
        asks_all: bool = True,
    ) -> None:
        self.homes = homes
        self.owners = homes
        self.spares = tuple(spares)
        self._pool: tuple[str, ...] = ()
        self.epoch = epoch
        self.trained = 0
        self.settled: int | None = None
        self.has_begun = False
        self.missing: frozenset[str] = frozenset()
        self._makes_backups = makes_backups
        self._asks_all = asks_all
        self._waits = waits
        self._log: list[Operation] = []
        self._newest = -1
        self._is_dirty = True

    def next_epoch(self) -> Epoch:
        """Begins an epoch."""
        self.epoch = replace(self.epoch, formation=self.epoch.formation + 1)
        return self.epoch

    def count(self, operation: Operation, work: Callable[[Operation], Any]) -> Any:
        """Does an operation of a pipeline without backups, in which a loss is an error."""
        operation = replace(operation, drawn=self.trained)
        result = work(operation)
        self.trained += operation.kind is Kind.TRAIN
        return result

    def open(self) -> Course:
        """Forms the pipeline for the first time, of what the owners have.

        Raises:
            NoPlaceError: an owner is not there.
        """
        self.next_epoch()
        self.owners = self.homes
        self._log.clear()
        self._is_dirty = True
        self.settled = None
        names = None if self._asks_all else self.known()
        answers = yield Gather(self.epoch, names, begins=True)
        for seat in seats_of(self.homes):
            if owner_in(self.homes, seat) not in answers:
                raise NoPlaceError(seat)
        self.missing = frozenset()
        yield Form(self.epoch, self.homes, self._backups(self.homes, answers))

    def resume(self) -> Course:
        """Forms the pipeline of copies that an earlier driver left; returns their version.

        Raises:
            NoCopyError: there are none of every seat.
        """
        self._log.clear()
        while True:
            try:
                self.settled = yield from self._go_back(None)
            except Lost:
                continue
            self._is_dirty = True  # so the first step has new backups made
            return self.settled

    def perform(self, operation: Operation) -> Course:
        """Has all owners do an operation, whoever dies; returns what comes of it.

        Raises:
            NoCopyError: every copy of some stage is lost.
            Exception: what the operation raised; then it was not done.
        """
        operation = self._prepared(operation)
        self._log.append(operation)
        self.has_begun = True
        while True:
            try:
                result = yield Execute(self.epoch, operation)
            except Lost:
                yield from self._recover(operation)
            except GeneratorExit:
                raise
            except BaseException:
                yield from self._failed(operation)
                raise
            else:
                yield from self._done(operation)
                return result

    def note(self, work: str) -> None:
        """Notes that stages were changed from outside, in a way that cannot be repeated."""
        self._log.append(Operation(Kind.UNREPEATABLE, work))
        self._is_dirty = True

    def back_up(self, kept: Any = None) -> Course:
        """Makes a cut now.

        Args:
            kept: the driver's own state.

        Raises:
            NoCopyError: every copy of some stage is lost.
        """
        self._is_dirty = True
        yield from self.perform(Operation(Kind.TRAIN, None, kept))

    def move(self, owners: Owners, homes: Owners | None = None, kept: Any = None) -> Course:
        """Puts stages on other workers, state and all.

        Args:
            owners: of each stage from now on.
            kept: the driver's own state.
            homes: where they go when the workers there have come back; default ``owners``.

        Raises:
            NoCopyError: every copy of some stage is lost.
        """
        yield from self.back_up(kept)
        self.homes = homes or owners
        yield from self._recover(None, owners)

    def at_home(self, living: Collection[str]) -> Owners:
        """The present owners, but at home those whose worker there is living."""
        return tuple(
            tuple(home if home in living else owner for home, owner in zip(h, o, strict=True))
            for h, o in zip(self.homes, self.owners, strict=True)
        )

    def known(self) -> tuple[str, ...]:
        """All workers that ever had a stage, or may have one."""
        names = [w for owners in (self.owners, self.homes) for stage in owners for w in stage]
        self._pool = tuple(dict.fromkeys([*self._pool, *names]))
        return tuple(dict.fromkeys([*self._pool, *self.spares]))

    def _asked(self) -> tuple[str, ...] | None:
        """The workers to ask for copies; a driver that came back knows none of their moves."""
        return None if self._asks_all and not self.has_begun else self.known()

    def _backups(self, owners: Owners, answers: Mapping[str, Found]) -> dict[Seat, str]:
        return choose_backups(owners, answers, self.known()) if self._makes_backups else {}

    def _failed(self, operation: Operation) -> Course:
        """Leaves the stages as they were before an operation that raised an error."""
        del self._log[-1]
        if operation.cut is not None:  # it may have been made: nothing was changed since the last
            self._log.append(replace(operation, work=None))
        if operation.kind in (Kind.CHANGE, Kind.STEP):
            yield from self._recover(None)

    def _prepared(self, operation: Operation) -> Operation:
        trained = sum(each.kind is Kind.TRAIN for each in self._log)
        if operation.kind is not Kind.TRAIN:
            return operation
        if self._is_dirty or trained >= _MOST_TRAINED:
            self._newest += 1
            return replace(operation, cut=self._newest, drawn=self.trained)
        return replace(operation, drawn=self.trained)

    def _done(self, operation: Operation) -> Course:
        if operation.kind is Kind.ASK:
            del self._log[-1]
        if operation.kind is Kind.STEP:
            self._is_dirty = True
        if operation.kind is Kind.TRAIN and operation.work is not None:
            self.trained = operation.drawn + 1
        if operation.cut is not None:
            self._is_dirty = False
            self._log = [operation]
            self.settled = operation.cut
            yield Settle(self.epoch, operation.cut)

    def _recover(self, pending: Operation | None, wanted: Owners | None = None) -> Course:
        """Goes back to the newest version, and does again what was done since, but ``pending``."""
        while True:
            try:
                version = yield from self._go_back(wanted)
                for operation in self._since(version, pending):
                    yield Execute(self.epoch, operation)
                return
            except Lost:
                continue

    def _go_back(self, wanted: Owners | None) -> Course:
        """Forms the pipeline of the newest version of which there are copies."""
        while True:
            self.next_epoch()
            answers: Mapping[str, Found] = yield Gather(self.epoch, self._asked())
            self._pool += tuple(name for name, each in answers.items() if each.copies)
            lost = frozenset(w for w in self.known() if w not in answers)
            if wanted is None and lost and self._waits(lost):
                yield AwaitWorkers(lost, are_needed=False)
                continue
            choose = newest_common_version if self.has_begun else safest_version
            version = choose(seats_of(self.homes), answers)
            try:
                owners = choose_owners(
                    wanted or self.at_home(answers), answers, self.spares, version
                )
            except NoPlaceError:
                yield AwaitWorkers(lost, are_needed=True)
                continue
            yield Form(
                self.epoch,
                owners,
                self._backups(owners, answers),
                version,
                choose_sources(owners, version, answers),
            )
            self.owners = owners
            # A number is never used twice, as a worker that has no seat now may keep a copy of it.
            self._newest = max(
                self._newest, *(c.version for f in answers.values() for c in f.copies)
            )
            self.missing = frozenset(w for s in self.homes for w in s if w not in answers)
            return version

    def _since(self, version: int, pending: Operation | None) -> list[Operation]:
        """The operations to do again.

        Raises:
            NoCopyError: the log does not go back so far, or one cannot be repeated.
        """
        starts = [at for at, each in enumerate(self._log) if each.cut == version]
        if not starts and version != self.settled and self._log:
            raise NoCopyError(Seat(0), f"version {version} is older than what can be done again")
        log = [each for each in self._log[starts[0] if starts else 0 :] if each is not pending]
        for each in log:
            if each.kind is Kind.UNREPEATABLE:
                raise NoCopyError(Seat(0), f"{each.work} after the last backup: do it again")
        return log
