"""Carries out what the reference protocol decides: the I/O half of ``references``.

The keeper uses references, and hears of workers that come and go. References in messages are
``lending``, those of ``remote()`` ``creations``; ``ledger`` has the table, its lock and the values
of this worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.errors import RpcError
from rpc.group.members import Group
from rpc.ids import Life
from rpc.outcomes.completions import Completions
from rpc.outcomes.futures import Future
from rpc.outcomes.slot import Slot
from rpc.protocol.reference_terms import Counts
from rpc.rrefs.collaborators import Calls, SendsControl
from rpc.rrefs.creations import Creations
from rpc.rrefs.ledger import ReferenceLedger
from rpc.rrefs.lending import Lending
from rpc.rrefs.report import ReferenceReport
from rpc.rrefs.rref import RRef
from rpc.rrefs.transfer import NOT_USABLE, Holding
from rpc.runtime.deadlines import Timeouts
from rpc.runtime.reaper import Reaper
from rpc.wire.control import ControlMessage
from rpc.worker_info import WorkerInfo


class ReferenceKeeper:
    """The references of one worker.

    Args:
        me: the worker.
        life: its id and incarnation.
        group: the workers that it knows.
        timeouts: how long to wait for values; and the worker's time.
        control: tells other workers of references.
        completions: runs what may take long.
        ended: told when something ended that a graceful shutdown may be waiting for.

    Attributes:
        calls: makes calls to the owners of values; set by :meth:`call_by`.
        creations: of ``remote()``.
        lending: references in messages.
        report: describes them.
        stopped: the worker shut down; its handles mean nothing to a later one of its name.
    """

    calls: Calls

    def __init__(
        self,
        me: WorkerInfo,
        life: Life,
        group: Group,
        timeouts: Timeouts,
        control: SendsControl,
        completions: Completions,
        ended: Callable[[], None],
    ) -> None:
        self.me = me
        self.life = life
        self.stopped = False
        self._group = group
        self._timeouts = timeouts
        self._completions = completions
        self._ledger = ledger = ReferenceLedger(life, control, completions)
        self._lock = ledger.lock
        self._table = ledger.table
        self.lending = Lending(self, ledger, group)
        self.creations = Creations(self, ledger, group, timeouts, completions)
        self.report = ReferenceReport(ledger.lock, ledger.table, ledger.values)
        self._reaper: Reaper[Holding] = Reaper(f"rpc-reaper-{me.name}", self._bury, ended)

    def call_by(self, calls: Calls) -> None:
        """Says what makes calls; before the first reference is made."""
        self.calls = self.creations.calls = calls

    def start(self) -> None:
        """Starts to collect dead handles."""
        self._reaper.start()

    def stop(self) -> None:
        """Stops to collect dead handles; frees every value."""
        self.stopped = True
        self._reaper.stop()
        self._ledger.close()

    def own(self, value: object) -> Holding:
        """A reference to a value of this worker; nobody else knows of it yet."""
        with self._lock:
            handle = self._table.new_value()
        slot = Slot()
        slot.fill(value)
        return Holding(handle, slot)

    # --- Using

    def require_usable(self, holding: Holding) -> None:
        """Raises the error of a handle that must not be used any more."""
        with self._lock:
            failure = self._table.failure(holding.handle)
        if failure is not None:
            raise holding.unusable(failure, NOT_USABLE, self.owner_of)

    def to_here(self, rref: RRef[Any], timeout: float) -> object:
        """The value, from wherever it lives."""
        holding = rref._holding
        self.require_usable(holding)
        if holding.value is not None:
            holding.looked_at = True
            return holding.value.wait(self._timeouts.of(timeout))
        waited = not holding.constant and self.creations.await_constant(holding, timeout)
        if waited and not holding.constant:
            self.require_usable(holding)
        if holding.constant:
            if timeout is not UNSET_RPC_TIMEOUT:
                self._timeouts.of(timeout)  # refuses what a call would refuse
            return holding.constant[0]
        return self.calls.fetch(rref, self.owner_of(holding), timeout)

    def local_value(self, holding: Holding) -> object:
        """The value, on its owner; in a handler, its caller's deadline bounds the wait."""
        if holding.value is None:
            raise RpcError(
                f"For UserRRef(rref_id={holding.reference.rref}, fork_id={holding.fork}), "
                f"can't call localValue() on user {self.me}. "
                f"Call it on owner {self.owner_of(holding)}"
            )
        holding.looked_at = True
        if holding.value.done():
            return holding.value.value()
        return holding.value.wait(self._timeouts.of(0.0))

    def await_local(self, holding: Holding) -> Any:
        """The value that a call through a reference is for; fails if it is not here."""
        self.require_usable(holding)
        return self.local_value(holding)

    def owner_of(self, holding: Holding) -> WorkerInfo:
        """The worker on which the value lives."""
        worker = holding.handle.reference.owner.worker
        return self._group.reachable.get(worker) or self._group.peer(worker).info

    def is_confirmed(self, holding: Holding) -> bool:
        """True if the owner is known to keep the value for this handle."""
        if holding.fork is None:
            return True
        with self._lock:
            return self._table.is_confirmed(holding.fork)

    def creation_of(self, holding: Holding) -> Future[None]:
        """A future of the ``remote()`` behind a handle; done for handles got otherwise."""
        future: Future[None] = self.calls.future("the creation of an RRef")
        if holding.creation is None:
            future.set_result(None)
        else:
            holding.looked_at = True
            completions = self._completions
            holding.creation.when_done(
                lambda slot: completions.submit(lambda: future.complete_from(slot.value))
            )
        return future

    # --- What arrives and who goes

    def dropped(self, holding: Holding) -> None:
        """Notes that a handle was garbage collected; safe in finalizers."""
        self._reaper.put(holding)

    def do_later(self, task: Callable[[], object]) -> None:
        """Runs a task soon, on a thread that it must not block; safe in finalizers."""
        self._reaper.call(task)

    def control_arrived(self, sender: Life, message: ControlMessage) -> None:
        """Takes a control message about references."""
        with self._lock:
            effects = self._table.message_arrived(sender, message)
        self._ledger.perform(effects)

    def worker_lost(self, life: Life, reason: str) -> None:
        """Ends the references of a worker that is gone."""
        with self._lock:
            effects = self._table.worker_lost(life, reason)
        self._ledger.perform(effects)

    def expelled(self, reason: str) -> None:
        """Ends the references to all others, who declared this worker lost."""
        with self._lock:
            effects = self._table.expelled(reason)
        self._ledger.perform(effects)

    def worker_joined(self, life: Life) -> None:
        """Takes note of a worker that came, perhaps in a new life."""
        with self._lock:
            effects = self._table.worker_joined(life)
        self._ledger.perform(effects)

    def release_all_users(self) -> None:
        """Makes every user handle unusable and tells the owners."""
        with self._lock:
            effects = self._table.release_all_users()
        self._ledger.perform(effects)

    def quiet(self) -> bool:
        """True if no registration is under way and every dead handle was dealt with."""
        if not self._reaper.quiet():
            return False
        with self._lock:
            return self._table.counts().num_pending_users == 0

    def counts(self) -> Counts:
        """Counts the references of each kind."""
        with self._lock:
            return self._table.counts()

    def _bury(self, dead: list[Holding]) -> None:
        with self._lock:
            effects = [e for holding in dead for e in self._table.dropped(holding.handle)]
            for holding in dead:
                holding.dropped = True
        self._ledger.perform(effects)
        self.creations.tell_unread(dead)
