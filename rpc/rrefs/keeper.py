"""Carries out what the reference protocol decides: the I/O half of ``references``.

Owns the table's lock, the values of this worker's RRefs and the waiters for
confirmations. Decisions are made under the lock; messages are sent, values
freed and waiters told after it was let go.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rpc.errors import (
    FrameError,
    RpcError,
    RRefCreationError,
    RRefDeletedError,
    StaleRRefError,
)
from rpc.group.members import Group
from rpc.ids import GlobalId, Life, new_tuple
from rpc.outcomes.completions import Completions
from rpc.outcomes.futures import Future
from rpc.outcomes.slot import Slot
from rpc.protocol.reference_terms import (
    Carrier,
    Counts,
    Effect,
    Failure,
    FailValue,
    FreeValue,
    Handle,
    HandleConfirmed,
    HandleFailed,
    OwnerHandle,
    Send,
    UserHandle,
)
from rpc.protocol.references import ReferenceTable
from rpc.rrefs.collaborators import Calls, SendsControl
from rpc.rrefs.creation_sink import CreationSink
from rpc.rrefs.report import ReferenceReport
from rpc.rrefs.rref import RRef
from rpc.rrefs.transfer import Adopted, Countdown, Holding, Loan, Maker
from rpc.runtime.deadlines import Timeouts
from rpc.runtime.reaper import Reaper
from rpc.runtime.stack_room import require as require_room
from rpc.runtime.text import text_of
from rpc.wire.control import (
    PASSED_BYTES,
    ControlMessage,
    Passage,
    Passed,
    borrowed_value,
    decode_passed,
    encode_passed,
)
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")

_NOT_SHAREABLE = "Cannot call fork an UserRRef after deletion."
_NOT_USABLE = "has been deleted. Cannot call to_here() on it after deletion."


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
        calls: makes calls to the owners of values; set before the first reference is made.
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
        self._group = group
        self._timeouts = timeouts
        self._control = control
        self._completions = completions
        self._lock = threading.Lock()
        self._table = ReferenceTable(life.worker, life.incarnation)
        self._values: dict[GlobalId, Slot] = {}
        self._settling: dict[GlobalId, list[Callable[[], None]]] = {}
        self._creations_under_way = 0
        self.stopped = False
        """The worker shut down; its handles mean nothing to a later one of its name."""
        self.report = ReferenceReport(self._lock, self._table, self._values)
        self._makes_constants: dict[Maker, bool] = {}
        self.nothing_adopted = Adopted(self)
        self._reaper: Reaper[Holding] = Reaper(f"rpc-reaper-{me.name}", self._bury, ended)

    def start(self) -> None:
        """Starts to collect dead handles."""
        self._reaper.start()

    def stop(self) -> None:
        """Stops to collect dead handles; frees every value."""
        self.stopped = True
        self._reaper.stop()
        with self._lock:
            values = list(self._values.values())
            self._values.clear()
            settling = [callback for group in self._settling.values() for callback in group]
            self._settling.clear()
        for slot in values:
            slot.fail(RRefDeletedError("the owner of the value shut down"))
        for callback in settling:
            callback()

    # --- Making

    def own(self, value: object) -> Holding:
        """A reference to a value of this worker; nobody else knows of it yet."""
        with self._lock:
            handle = self._table.new_value()
        slot = Slot()
        slot.fill(value)
        return Holding(handle, slot)

    def create(
        self, owner: WorkerInfo, func: Callable[..., Any], limit: float
    ) -> tuple[RRef[Any], Passed, CreationSink]:
        """A reference to a value that ``owner`` is about to make.

        Args:
            owner: of the value.
            func: what makes it.
            limit: seconds that may take, 0 for no limit.

        Raises:
            RecursionError: too little is left of the stack.
        """
        require_room()
        if owner.id == self.life.worker:
            return self._create_here()
        life = self._group.life(owner.id)
        with self._lock:
            handle, passed = self._table.create_remote(life)
            self._creations_under_way += 1
        maker = (owner.id, getattr(func, "__qualname__", ""))
        ends_at = self._timeouts.now() + limit if limit else 0.0
        holding = Holding(handle, None, Slot(), maker, ends_at)
        return RRef._of(self, holding), passed, CreationSink(self, holding)

    def _create_here(self) -> tuple[RRef[Any], Passed, CreationSink]:
        slot = Slot()
        with self._lock:
            handle = self._table.create_here()
            self._values[handle.reference.rref] = slot
            self._creations_under_way += 1
        holding = Holding(handle, slot, Slot())
        reference = handle.reference
        passed = Passed(reference, reference.rref, Passage.LOOPBACK)
        return RRef._of(self, holding), passed, CreationSink(self, holding)

    def creation_not_sent(self, rref: RRef[Any], passed: Passed, error: BaseException) -> None:
        """The request of ``remote()`` could not be sent."""
        with self._lock:
            self._creations_under_way -= 1
        if passed.passage is Passage.CREATION:
            self.unsent(Loan((passed,)), text_of(error))
        elif rref._holding.value is not None:  # the error itself would keep the handle alive
            rref._holding.value.fail(RRefCreationError(f"RRef creation failed: {text_of(error)}"))

    def creation_given_up(self, passed: Passed) -> None:
        """The call of ``remote()`` ended before its request was sent: the owner is told."""
        if passed.passage is Passage.CREATION:
            self.unsent(Loan((passed,)), "its call ended before it was sent")

    def creation_replied(self, holding: Holding) -> None:
        """The owner has run the function that makes the value."""
        effects: list[Effect] = []
        with self._lock:
            self._creations_under_way -= 1
            if holding.fork is not None:
                effects = self._table.creation_confirmed(holding.fork)
        self._perform(effects)
        if holding.maker is not None:
            self._makes_constants[holding.maker] = bool(holding.constant)
        if holding.creation is not None:
            holding.creation.fill(None)

    def creation_gone(self, holding: Holding, error: Exception) -> None:
        """The request of ``remote()`` failed or timed out."""
        fork = holding.fork
        with self._lock:
            self._creations_under_way -= 1
            effects = self._table.creation_failed(fork, text_of(error)) if fork is not None else []
        self._perform(effects)
        if fork is None and holding.value is not None:
            holding.value.fail(RRefCreationError(f"RRef creation failed: {text_of(error)}"))
        if holding.creation is not None:
            holding.creation.fail(error)
        if fork is not None and holding.called_through:
            self.calls.creation_gone(fork, error)
        if holding.dropped:
            self._completions.submit(lambda: self._tell_unread([holding]))

    def creations_under_way(self) -> int:
        """Calls of ``remote()`` whose outcome is not known yet."""
        with self._lock:
            return self._creations_under_way

    # --- The owner's side of remote()

    def creation_arrived(self, sender: Life, target: bytes) -> GlobalId:
        """A request of ``remote()`` came: makes the place for its value, and names it."""
        passed = _passed(target)
        rref = passed.reference.rref
        if passed.passage is not Passage.LOOPBACK:
            with self._lock:
                effects = self._table.creation_arrived(passed, sender)
                if self._table.is_kept(rref):
                    self._place(rref)
            self._perform(effects)
        return rref

    def created(self, rref: GlobalId, value: object) -> None:
        """The function of a ``remote()`` returned."""
        slot = self._slot_of(rref)
        if slot is not None:
            slot.fill(value)

    def creation_raised(self, rref: GlobalId, error: BaseException) -> None:
        """The function of a ``remote()`` raised."""
        slot = self._slot_of(rref)
        if slot is not None:
            slot.fail(error)

    def place_of(self, target: bytes) -> Slot:
        """The place of the value that a request of its user is made through.

        Raises:
            StaleRRefError: there is none any more.
            FrameError: ``target`` is not what :meth:`lend_through` wrote.
        """
        rref = borrowed_value(target)
        if rref is None:
            raise FrameError("a request can only be made through a borrowed reference")
        with self._lock:
            found = self._values.get(rref)
            if found is not None:
                return found
            stale = self._table.look_up(_passed(target).reference)
            if stale is None:
                return self._place(rref)
        raise StaleRRefError(f"{rref} is stale: {stale}")

    def _place(self, rref: GlobalId) -> Slot:
        """The place of a value that is kept, made if need be. Needs the lock."""
        slot = self._values.get(rref)
        if slot is None:
            slot = self._values[rref] = Slot()
        return slot

    def _slot_of(self, rref: GlobalId) -> Slot | None:
        with self._lock:
            return self._values.get(rref)

    # --- Passing on

    def lend(self, handles: Sequence[RRef[Any]], to: int, *, borrow: bool) -> Loan:
        """Prepares handles to travel in one message to worker ``to``.

        Raises:
            RRefError: one of them must not be used any more, or is another worker's.
        """
        life = self._group.life(to)
        carrier = Carrier.REQUEST if borrow else Carrier.REPLY
        passed: list[Passed] = []
        try:
            for rref in handles:
                passed.append(self._share(rref, life, carrier))
        except BaseException:
            self.unsent(Loan(tuple(passed)), "another reference in the message is unusable")
            raise
        return Loan(tuple(passed), encode_passed(passed))

    def lend_through(self, rref: RRef[Any], owner: int, loan: Loan) -> tuple[bytes, Loan]:
        """Prepares the handle that a request to its owner is made through.

        Args:
            rref: the handle.
            owner: the worker that the request goes to; not this one.
            loan: of the references in the request's value.

        Returns:
            The target of the request, and the loan of all its references.

        Raises:
            RRefError: the handle must not be used any more, or is another worker's.
        """
        try:
            life = self._group.living_now.get(owner) or self._group.life(owner)
            through = self._share(rref, life, Carrier.REQUEST, _NOT_USABLE)
        except BaseException:
            self.unsent(loan, "the reference that the call is made through is unusable")
            raise
        both: Loan = new_tuple(Loan, ((through, *loan.passed), loan.table))
        if through.passage is not Passage.BORROW:
            self.unsent(both, "the owner of the reference was replaced")
            raise StaleRRefError(f"{rref} is stale: its owner was replaced by a later life")
        return encode_passed((through,)), both

    def _share(
        self, rref: RRef[Any], to: Life, carrier: Carrier, deleted: str = _NOT_SHAREABLE
    ) -> Passed:
        if rref._keeper is not self:  # the same ids may mean something else here
            raise rref._not_for(self.me)
        holding = rref._holding
        if holding.value is not None:
            holding.require_created()
        with self._lock:
            shared = self._table.share(holding.handle, to, carrier)
            if not isinstance(shared, Failure) and holding.value is not None:
                self._values.setdefault(holding.reference.rref, holding.value)
        if isinstance(shared, Failure):
            raise holding.unusable(shared, deleted, self.owner_of)
        return shared

    def require_shareable(self, holding: Holding) -> None:
        """Raises the error of a handle that must not be passed on."""
        holding.require_created()
        with self._lock:
            failure = self._table.failure(holding.handle)
        if failure is not None:
            raise holding.unusable(failure, _NOT_SHAREABLE, self.owner_of)

    def unsent(self, loan: Loan, reason: str) -> None:
        """The message with these references did not leave."""
        self._each(loan, lambda passed: self._table.not_sent(passed, reason))

    def call_ended(self, loan: Loan) -> None:
        """Nothing of the call that carried these references is under way any more."""
        effects: list[Effect] = []
        with self._lock:
            for passed in loan.passed:
                if passed.passage is Passage.BORROW:  # the others do not end with it
                    effects += self._table.borrow_ended(passed.fork)
        if effects:
            self._perform(effects)

    def _each(self, loan: Loan, event: Callable[[Passed], list[Effect]]) -> None:
        if loan.passed:
            with self._lock:
                effects = [effect for passed in loan.passed for effect in event(passed)]
            self._perform(effects)

    def adopt(self, table: bytes) -> Adopted:
        """Takes in the references of a message that has some, each as a new handle."""
        adopted = Adopted(self)
        effects: list[Effect] = []
        with self._lock:
            for passed in decode_passed(table):
                handle, caused = self._table.receive(passed)
                effects += caused
                adopted.handles.append(RRef._of(self, self._holding(handle)))
                if isinstance(handle, UserHandle) and self._is_pending(handle):
                    adopted.pending.append(handle)
        self._perform(effects)
        return adopted

    def _holding(self, handle: Handle) -> Holding:
        if isinstance(handle, OwnerHandle):
            return Holding(handle, self._place(handle.reference.rref))
        return Holding(handle)

    def _is_pending(self, handle: UserHandle) -> bool:
        settled = self._table.is_confirmed(handle.fork) or self._table.failure(handle)
        return not settled

    def when_settled(self, handles: Iterable[UserHandle], callback: Callable[[], None]) -> None:
        """Calls ``callback`` once each handle is confirmed or has failed."""
        countdown = Countdown(callback)
        with self._lock:
            for handle in handles:
                if self._is_pending(handle):
                    countdown.add()
                    self._settling.setdefault(handle.fork, []).append(countdown.one_less)
        countdown.one_less()

    # --- Using

    def require_usable(self, holding: Holding) -> None:
        """Raises the error of a handle that must not be used any more."""
        with self._lock:
            failure = self._table.failure(holding.handle)
        if failure is not None:
            raise holding.unusable(failure, _NOT_USABLE, self.owner_of)

    def to_here(self, rref: RRef[Any], timeout: float) -> object:
        """The value, from wherever it lives."""
        holding = rref._holding
        self.require_usable(holding)
        if holding.value is not None:
            holding.looked_at = True
            return holding.value.wait(self._timeouts.of(timeout))
        if not holding.constant:
            self._await_constant(holding, timeout)
        if holding.constant:
            return holding.constant[0]
        return self.calls.fetch(rref, self.owner_of(holding), timeout)

    def _await_constant(self, holding: Holding, timeout: float) -> None:
        """Waits for the news that the value was made if that will likely bring the value.

        It may not be waited for longer than the caller has time.
        """
        creation, maker, ends_at = holding.creation, holding.maker, holding.creation_ends_at
        if creation is None or maker is None or creation.done() or not ends_at:
            return
        limit = self._timeouts.of(timeout)
        in_time = not limit or ends_at <= self._timeouts.now() + limit
        if in_time and self._makes_constants.get(maker, False):
            creation.wait_with(self.calls.wait)
            if not holding.constant:
                self.require_usable(holding)

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
        """A handle was garbage collected; safe in finalizers."""
        self._reaper.put(holding)

    def do_later(self, task: Callable[[], object]) -> None:
        """Runs a task soon, on a thread that it must not block; safe in finalizers."""
        self._reaper.call(task)

    def control_arrived(self, sender: Life, message: ControlMessage) -> None:
        """A control message about references came."""
        with self._lock:
            effects = self._table.message_arrived(sender, message)
        self._perform(effects)

    def worker_lost(self, life: Life, reason: str) -> None:
        """A worker is gone."""
        with self._lock:
            effects = self._table.worker_lost(life, reason)
        self._perform(effects)

    def worker_joined(self, life: Life) -> None:
        """A worker came, perhaps in a new life."""
        with self._lock:
            effects = self._table.worker_joined(life)
        self._perform(effects)

    def release_all_users(self) -> None:
        """Makes every user handle unusable and tells the owners."""
        with self._lock:
            effects = self._table.release_all_users()
        self._perform(effects)

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

    # --- Shared by the above

    def _bury(self, dead: list[Holding]) -> None:
        with self._lock:
            effects = [e for holding in dead for e in self._table.dropped(holding.handle)]
            for holding in dead:
                holding.dropped = True
        self._perform(effects)
        self._tell_unread(dead)

    def _tell_unread(self, holdings: Iterable[Holding]) -> None:
        """Logs why ``remote()`` failed for those that were dropped before anybody asked."""
        with self._lock:
            unread = [error for holding in holdings if (error := holding.unread())]
        for error in unread:
            kind, text = type(error).__name__, text_of(error)  # logs may be kept
            _logger.error("a remote() failed and nobody looked: %s: %s", kind, text)

    def _perform(self, effects: Iterable[Effect]) -> None:
        queued = False
        freed: list[Slot] = []
        for effect in effects:
            match effect:
                case Send():
                    self._control.queue(effect.to, effect.message)
                    queued = True
                case FreeValue():
                    self._free(effect.rref, freed)
                case FailValue():
                    self._fail_value(effect.rref, effect.reason)
                case HandleConfirmed() | HandleFailed():
                    self._settled(effect.fork)
        if queued:
            self._control.flush()
        if freed:  # their destructors may make calls, which nobody would deliver here
            self._completions.submit(freed.clear)

    def _free(self, rref: GlobalId, freed: list[Slot]) -> None:
        """Lets go of a value, or adds it to ``freed`` if its end may run code."""
        with self._lock:
            slot = self._values.pop(rref, None)
        if slot is None:
            return
        if not slot.done():
            slot.fail(StaleRRefError(f"the value of {rref} was given up before it was made"))
        elif not slot.runs_no_code():
            freed.append(slot)

    def _fail_value(self, rref: GlobalId, reason: str) -> None:
        with self._lock:
            if not self._table.is_kept(rref):
                return
            slot = self._place(rref)
        slot.fail(RRefCreationError(reason))

    def _settled(self, fork: GlobalId) -> None:
        with self._lock:
            callbacks = self._settling.pop(fork, ())
        for callback in callbacks:
            callback()


def _passed(target: bytes) -> Passed:
    """The reference in the target of a request; that may go on with a request id."""
    (passed,) = decode_passed(target[:PASSED_BYTES])
    return passed
