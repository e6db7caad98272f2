"""Follows the batches of a sampler from the loader to the push that they become part of.

A *turn* is the time in which this trainer works through its part of one deal
(``decisions.samples``). It ends when the part is trained, when samples were given out anew, or when
the cluster went back; what the loader had read ahead by then is dropped, and the next turn begins.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from tensorwire.parameter_server.client.assignment import Assignment
from tensorwire.parameter_server.decisions.files import Part, finished, merged
from tensorwire.parameter_server.decisions.samples import Batches
from tensorwire.parameter_server.errors import RolledBack
from tensorwire.parameter_server.opaque import UserValue

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

_logger: Final = logging.getLogger("tensorwire")
Indices = Callable[[list[int]], list[list[int]]]
"""The indices of the samples of each of these batches."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch on its way.

    Args:
        sampler: the name of its sampler.
        numbers: that of the batch; none if it is of files.
        deal: that gave it to this trainer.
        turn: in which it was read.
        rollbacks: how often the cluster had gone back by then.
        parts: of files, what of them is in the batch.
        window: of files that were dealt: see ``Batches``.
    """

    sampler: str
    numbers: tuple[int, ...]
    deal: int
    turn: int
    rollbacks: int
    parts: tuple[Part, ...] = ()
    window: tuple[int, int] = (0, 0)


class Given:
    """The batches that were given out since the last push of this trainer.

    Attributes:
        pushed: how often the cluster had gone back when the batches of a loop that goes on were
            pushed, none of which has been given out since; else -1.
    """

    def __init__(self) -> None:
        self.pushed = -1
        self._tickets: list[Ticket] = []
        self._loops: dict[str, int] = {}
        self._live: set[str] = set()
        """Samplers whose latest loop goes on."""

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Notes a batch that is given out."""
        self.pushed = -1
        self._tickets.append(ticket)

    def require_no_others(self, sampler: str) -> None:
        """Refuses to go on with a sampler while batches of another one are to be pushed.

        Raises:
            ValueError: there are some.
        """
        others = {each.sampler for each in self._tickets} - {sampler}
        if others:
            raise ValueError(
                f"sampler {sampler!r}: batches of sampler {others.pop()!r} were given out and not "
                "pushed; push those of one before you take one of another"
            )

    def forget(self) -> None:
        """Forgets what was given out, as it will not be pushed."""
        self.pushed = -1
        self._tickets.clear()

    def begin(self, sampler: str) -> int:
        """Begins a loop over a sampler, which takes the place of the one before.

        Batches of loops that were left will not be pushed.

        Args:
            sampler: its name.

        Returns:
            The number of the loop.
        """
        self.end(sampler)
        self._tickets = [each for each in self._tickets if each.sampler in self._live]
        self._live.add(sampler)
        self._loops[sampler] = self._loops.get(sampler, 0) + 1
        return self._loops[sampler]

    def is_latest(self, sampler: str, loop: int) -> bool:
        """True if no loop over a sampler has taken the place of this one."""
        return self._loops[sampler] == loop

    def end(self, sampler: str) -> None:
        """Ends the latest loop over a sampler; what it gave out may still be pushed."""
        self.pushed = -1
        self._live.discard(sampler)

    def pushed_twice(self) -> RuntimeError:
        """Makes the error that refuses gradients of batches that were pushed already."""
        names = ", ".join(map(repr, sorted(self._live)))
        return RuntimeError(
            f"sampler {names}: the batch that was given out last has been pushed, and no other "
            "has been given out since; its samples would move the rows twice and count once. "
            "Push all gradients of a batch in one step"
        )

    def take(self, rollbacks: int) -> Batches | None:
        """Makes a push of all that was given out, unless the cluster went back meanwhile.

        Args:
            rollbacks: how often the cluster went back.

        Returns:
            The batches, which are of one sampler; None if all are from before it went back.
        """
        tickets, self._tickets = self._tickets, []
        if tickets[0].sampler in self._live:
            self.pushed = rollbacks
        if len(tickets) == 1 and not tickets[0].parts:  # as in almost each step
            (only,) = tickets
            is_current = only.rollbacks == rollbacks
            return Batches(only.sampler, only.deal, only.numbers) if is_current else None
        tickets = [each for each in tickets if each.rollbacks == rollbacks]
        if not tickets:
            return None
        oldest = min(each.deal for each in tickets)  # so that all are refused if one would be
        numbers = [number for each in tickets for number in each.numbers]
        parts = merged(part for each in tickets for part in each.parts)
        window = tickets[-1].window
        return Batches(tickets[0].sampler, oldest, (*numbers, *finished(parts)), parts, window)

    def require_whole_steps(self) -> None:
        """Refuses pushes of a part of a step.

        Raises:
            ValueError: the samples of this step are counted.
        """
        if self._tickets:
            raise ValueError(
                "ps.Optimizer: pushing=Pushing.BACKWARD makes several pushes of one batch, of "
                "which some may count and others not; with cluster.samples use Pushing.STEP"
            )


class Tracked(ABC):
    """The batches of a loader, each of which counts as trained with the next push.

    Made by :meth:`Samples.track` and :meth:`Files.track`, which say what comes out.

    Args:
        cluster: where the account is.
        name: of the sampler.
        assigned: finds out which batches are this trainer's.
        loader: reads them.

    Attributes:
        last: the number of the batch that was given out last; -1 before the first, and of files.
    """

    def __init__(
        self, cluster: Cluster, name: str, assigned: Assignment, loader: Iterable[object]
    ) -> None:
        self.last = -1
        self._cluster = cluster
        self._name = name
        self._loader = loader
        self._assigned = assigned
        self._batches: Iterator[UserValue] | None = None
        self._numbers: Iterator[int] = iter(())
        self._turn = 0

    def __iter__(self) -> Iterator[UserValue]:
        for turn in self.turns():
            for batch in turn:
                if not turn.give():
                    break
                yield batch

    def turns(self) -> Iterator[Turn]:
        """Yields the turns one after the other, until everything is trained."""
        loop = self._cluster.given.begin(self._name)
        self._batches = None
        try:
            while self._goes_on():
                yield Turn(self, loop)
                self.require_latest(loop)
        finally:
            if self._cluster.given.is_latest(self._name, loop):
                self._cluster.given.end(self._name)
                self._batches = None  # ends the loader's workers, also if the loop was left

    def require_latest(self, loop: int) -> None:
        """Refuses a loop that another one has taken the place of.

        Raises:
            RuntimeError: it has.
        """
        if not self._cluster.given.is_latest(self._name, loop):
            raise RuntimeError(
                f"sampler {self._name!r}: another loop over it has begun since this one, which "
                "yields nothing more; a trainer goes through its samples in one loop at a time"
            )

    @abstractmethod
    def next_batch(self) -> tuple[UserValue, Ticket]:
        """The next batch of this turn.

        Raises:
            StopIteration: there is none.
            RuntimeError: the loader does not read what it is told to.
        """

    @abstractmethod
    def _fill(self) -> bool:
        """Prepares the batches to read next; False if there are none."""

    def _next_numbers(self, most: int) -> list[int]:
        """The next that are at hand, at most so many; waits for one, if there is none."""
        first = list(islice(self._numbers, 1))
        more = min(self._assigned.at_hand, most - 1) if first else 0
        return first + list(islice(self._numbers, more))

    # --- turns

    def give(self, ticket: Ticket) -> bool:
        """Gives a batch out, unless it is another trainer's by now."""
        given, assigned = self._cluster.given, self._assigned
        if assigned.is_stale and (not len(given) or assigned.went_back):
            return False
        given.require_no_others(self._name)
        given.add(ticket)
        self.last = ticket.numbers[-1] if ticket.numbers else self.last
        return True

    def _goes_on(self) -> bool:
        """Begins a turn as soon as there is one for this trainer; False if all is trained."""
        while not self._waits_for_a_push():
            try:
                if self._turn and self._assigned.went_back:
                    self._cluster.reload()
                is_done = self._look()
                if self._fill():
                    return True
                if self._settles():
                    continue
                if is_done:
                    return False
                self._assigned.wait()
            except RolledBack as error:
                self.recover(error)
        return False

    def _waits_for_a_push(self) -> bool:
        """True if this trainer's part ends with batches that it has not pushed; the log says so."""
        given = self._cluster.given
        if self._assigned.went_back:
            given.forget()
        given.require_no_others(self._name)
        if given:
            _logger.warning(
                "sampler %r: the last %d batches were given out and not pushed; they count as "
                "trained with the next push, call optimizer.step()", self._name, len(given),
            )  # fmt: skip
        return bool(given)

    def _settles(self) -> bool:
        """Makes a step that only tells what was trained already; False if there is nothing."""
        return False

    def _look(self) -> bool:
        """Finds out what is this trainer's; returns True if all is trained."""
        numbers, is_done = self._assigned.look()
        self._turn += 1
        self._numbers = numbers
        return is_done

    def recover(self, error: RolledBack) -> None:
        """Goes on where the cluster went back to, as this trainer had nothing under way."""
        _logger.warning(
            "sampler %r goes on at step %d, as the cluster went back: %s",
            self._name, error.step, error,
        )  # fmt: skip
        self._cluster.reload()


class TrackedBatches(Tracked):
    """The batches of a loader that reads the indices it is given.

    Args:
        cluster: see :class:`Tracked`.
        name: likewise.
        assigned: likewise.
        loader: reads what ``indices`` says.
        indices: makes indices of the numbers of batches.
        at_a_time: of so many batches.
        offer: called before the loader begins to read: what it asks for then is this one's.
    """

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        assigned: Assignment,
        loader: Iterable[object],
        indices: Indices,
        at_a_time: int,
        offer: Callable[[TrackedBatches], object],
    ) -> None:
        super().__init__(cluster, name, assigned, loader)
        self._indices_of = indices
        self._at_a_time = at_a_time
        self._offer = offer
        self._is_opening, self._is_read = False, True
        self._read: deque[Ticket] = deque()
        self._block: deque[tuple[int, list[int]]] = deque()

    # --- what the loader is to read

    def next_indices(self) -> list[int]:
        """The samples of the next batch of this turn.

        Raises:
            StopIteration: it was the last.
        """
        if not self._fill():
            raise StopIteration
        number, indices = self._block.popleft()
        deal, (rollbacks, _) = self._assigned.deal, self._assigned.seen
        self._read.append(Ticket(self._name, (number,), deal, self._turn, rollbacks))
        return indices

    def _fill(self) -> bool:
        """See :class:`Tracked`."""
        if not self._block:
            numbers = self._next_numbers(self._at_a_time)
            self._block.extend(zip(numbers, self._indices_of(numbers), strict=True))
        return bool(self._block)

    # --- what the loader has read

    def next_batch(self) -> tuple[UserValue, Ticket]:
        """See :class:`Tracked`."""
        while True:
            begins = self._batches is None
            if self._batches is None:
                if not self._fill():
                    raise StopIteration
                self._batches = self._opened()
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None
                if begins:
                    raise RuntimeError(
                        f"the loader of sampler {self._name!r} ends before it has read anything"
                    ) from None
                continue
            ticket = self._read.popleft()
            if ticket.turn == self._turn:
                return batch, ticket

    def _opened(self) -> Iterator[UserValue]:
        """Begins to read with the loader."""
        self._read.clear()
        self._offer(self)
        self._is_opening, self._is_read = True, False
        try:
            return iter(self._loader)
        finally:
            self._is_opening = False

    def admits_a_reader(self) -> bool:
        """True if it is its own loader that begins to iterate over the sampler.

        A loader of torch does so once or twice in its ``__iter__``, and one that is a generator
        with its first batch.
        """
        is_first, self._is_read = not self._is_read, True
        return self._is_opening or is_first

    def _look(self) -> bool:
        self._block.clear()
        return super()._look()


class Turn:
    """The batches of one turn.

    Args:
        tracked: whose.
        loop: of which.
    """

    def __init__(self, tracked: Tracked, loop: int) -> None:
        self._tracked = tracked
        self._loop = loop
        self._waiting: deque[Ticket] = deque()

    def __iter__(self) -> Iterator[UserValue]:
        return self

    def __next__(self) -> UserValue:
        self._tracked.require_latest(self._loop)
        batch, ticket = self._tracked.next_batch()
        self._waiting.append(ticket)
        return batch

    def give(self) -> bool:
        """Gives out the first of the batches that were read and not given out.

        Returns:
            False if the turn is over, and this batch and those behind it are to be dropped.
        """
        return self._tracked.give(self._waiting.popleft())

    def recover(self, error: RolledBack) -> None:
        """See :meth:`Tracked.recover`."""
        self._tracked.recover(error)
