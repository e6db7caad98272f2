"""Checks a run when nothing is under way any more, and when programs let go of everything.

Compares what the workers know with each other, and with the ``ledger``, which holds each
step to its rules while things happen.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rpc.ids import GlobalId, Life
from rpc.protocol.reference_terms import OwnerHandle, UserHandle
from tests.simulation.group.packets import Value
from tests.simulation.group.rules import Rule, require

if TYPE_CHECKING:
    from tests.simulation.group.worker import SimWorker
    from tests.simulation.group.world import World


class AtRest:
    """The checks of the workers of one run.

    Args:
        world: what happened.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._books = world.ledger

    def check_settled(self) -> None:
        """Checks that everybody got what was promised, as nothing is under way any more."""
        self._check_views()
        lent = self._lent()
        for worker in self._world.living.values():
            require(not worker.records, Rule.CALLS_END, worker.life, worker.records)
            require(not worker.jobs, Rule.CALLS_END, worker.life, "serves", worker.jobs)
            require(not [*worker.calls.outstanding()], Rule.CALLS_END, worker.life, "a row")
            idle = worker.calls.next_expiry() is None
            require(idle, Rule.DEADLINES, worker.life, "waits for a deadline")
            self._check_filters(worker)
            self._check_handles(worker)
            self._check_counts(worker, lent[worker.life])

    def _check_filters(self, worker: SimWorker) -> None:
        """Checks that exactly what came is remembered, in as few ranges as can be."""
        for sender, known in worker.control.seen.items():
            came = self._books.batches[worker.life, sender]
            ranges = sum(number - 1 not in came for number in came)
            right = known.ranges == ranges and all(number in known for number in came)
            exact = right and max(came) + 1 not in known
            require(exact, Rule.DUPLICATES, worker.life, sender, known.ranges, came)

    def _lent(self) -> defaultdict[Life, dict[GlobalId, list[Life]]]:
        """Returns the holders of usable handles, by owner and value; one entry for each handle."""
        lent: defaultdict[Life, dict[GlobalId, list[Life]]] = defaultdict(dict)
        for worker in self._world.living.values():
            for handle in self._usable(worker):
                reference = handle.reference
                lent[reference.owner].setdefault(reference.rref, []).append(worker.life)
        return lent

    def _check_views(self) -> None:
        world = self._world
        for worker in world.living.values():
            expected = {
                life.worker: life
                for life in world.living
                if frozenset((life, worker.life)) not in world.cut
            }
            right = worker.view == expected
            require(right, Rule.CONVERGENCE, worker.life, worker.view, expected)

    def _check_handles(self, worker: SimWorker) -> None:
        for handle in worker.handles.values():
            if isinstance(handle, OwnerHandle):
                continue
            failure = worker.references.failure(handle)
            same = failure == self._books.failed.get(handle.fork)
            require(same, Rule.FAILURES_HAVE_CAUSES, worker.life, handle, failure)
            if failure is not None:
                continue
            known = handle.fork in self._books.confirmed
            sure = known and worker.references.is_confirmed(handle.fork)
            require(sure, Rule.HANDLES_WORK, worker.life, handle, "is not confirmed")
            owner = self._world.living.get(handle.reference.owner)
            there = owner is not None and handle.reference.rref in owner.values
            require(there, Rule.HANDLES_WORK, worker.life, handle, "dangles")

    def _check_counts(self, worker: SimWorker, lent: dict[GlobalId, list[Life]]) -> None:
        counts = worker.references.counts()
        mine = [h for h in worker.handles.values() if isinstance(h, UserHandle)]
        usable = len(self._usable(worker))
        forks = sum(map(len, lent.values()))
        found = (counts.num_user_rrefs, counts.num_owner_rrefs, counts.num_forks)
        right = found == (usable, len(worker.values), forks)
        require(right, Rule.COUNTS, worker.life, counts, usable, len(worker.values), forks)
        passing = (counts.num_pending_users, counts.num_pending_children, counts.num_borrows)
        require(passing == (0, 0, 0), Rule.COUNTS, worker.life, counts)
        listed = {handle.fork for handle, _ in worker.references.users()}
        require(listed == {handle.fork for handle in mine}, Rule.COUNTS, worker.life, listed, mine)
        leaks = {leak.rref: leak.users for leak in worker.references.leaks()}
        expected = {rref: tuple(sorted(set(users))) for rref, users in lent.items()}
        require(leaks == expected, Rule.COUNTS, worker.life, leaks, expected)
        waiting = [rref for rref, value in worker.values.items() if value is Value.AWAITED]
        require(not waiting, Rule.HANDLES_WORK, worker.life, "never made", waiting)

    @staticmethod
    def _usable(worker: SimWorker) -> list[UserHandle]:
        """Returns the handles to others' values that did not fail."""
        users = [h for h in worker.handles.values() if isinstance(h, UserHandle)]
        return [handle for handle in users if worker.references.failure(handle) is None]

    def check_departing(self, worker: SimWorker) -> None:
        """Checks that one that was declared lost waits for nothing and keeps nothing."""
        waits = worker.records or worker.jobs or len(worker.calls)
        require(not waits, Rule.CALLS_END, worker.life, worker.records, worker.jobs)
        stays = worker.begun and not worker.finished
        require(not stays, Rule.SHUTDOWN_ENDS, worker.life, "cannot leave")
        self._check_keeps_nothing(worker)

    def check_empty(self) -> None:
        """Checks that nothing is kept for programs that let go of everything."""
        for worker in self._world.living.values():
            self._check_keeps_nothing(worker)

    @staticmethod
    def _check_keeps_nothing(worker: SimWorker) -> None:
        counts = worker.references.counts()
        kept = (
            counts.num_user_rrefs
            + counts.num_owner_rrefs
            + counts.num_forks
            + counts.num_pending_children
            + counts.num_borrows
        )
        nothing = kept == 0 and not worker.values and not worker.references.users()
        require(nothing, Rule.ALWAYS_FREED, worker.life, counts, worker.values)
        require(not worker.references.leaks(), Rule.ALWAYS_FREED, worker.life, "leaks")
