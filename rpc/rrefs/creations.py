"""The calls of ``remote()``: references to values that are yet to be made, at both ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rpc.errors import FrameError, RRefCreationError, StaleRRefError
from rpc.group.members import Group
from rpc.ids import GlobalId, Life
from rpc.outcomes.completions import Completions
from rpc.outcomes.slot import Slot
from rpc.protocol.reference_terms import Effect
from rpc.rrefs.collaborators import Calls
from rpc.rrefs.creation_sink import CreationSink
from rpc.rrefs.ledger import ReferenceLedger
from rpc.rrefs.rref import RRef
from rpc.rrefs.transfer import Holding, Loan, Maker
from rpc.runtime.deadlines import Timeouts
from rpc.runtime.stack_room import require as require_room
from rpc.runtime.text import text_of
from rpc.wire.control import PASSED_BYTES, Passage, Passed, borrowed_value, decode_passed
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.rrefs.keeper import ReferenceKeeper

_logger = logging.getLogger("rpc")


class Creations:
    """Values that calls of ``remote()`` make: for this worker elsewhere, and here for others.

    Args:
        keeper: of the worker's references.
        ledger: has them.
        group: the workers that it knows.
        timeouts: how long to wait for values; and the worker's time.
        completions: runs what may take long.

    Attributes:
        calls: makes calls to the owners of values; set before the first reference is made.
    """

    calls: Calls

    def __init__(
        self,
        keeper: ReferenceKeeper,
        ledger: ReferenceLedger,
        group: Group,
        timeouts: Timeouts,
        completions: Completions,
    ) -> None:
        self._keeper = keeper
        self._ledger = ledger
        self._lock = ledger.lock
        self._table = ledger.table
        self._group = group
        self._timeouts = timeouts
        self._completions = completions
        self._under_way = 0  # guarded by the lock
        self._makes_constants: dict[Maker, bool] = {}

    # --- At the caller

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
        if owner.id == self._keeper.life.worker:
            return self._create_here()
        life = self._group.life(owner.id)
        with self._lock:
            handle, passed = self._table.create_remote(life)
            self._under_way += 1
        maker = (owner.id, getattr(func, "__qualname__", ""))
        ends_at = self._timeouts.now() + limit if limit else 0.0
        holding = Holding(handle, None, Slot(), maker, ends_at)
        return RRef._of(self._keeper, holding), passed, CreationSink(self, holding)

    def _create_here(self) -> tuple[RRef[Any], Passed, CreationSink]:
        slot = Slot()
        with self._lock:
            handle = self._table.create_here()
            self._ledger.values[handle.reference.rref] = slot
            self._under_way += 1
        holding = Holding(handle, slot, Slot())
        reference = handle.reference
        passed = Passed(reference, reference.rref, Passage.LOOPBACK)
        return RRef._of(self._keeper, holding), passed, CreationSink(self, holding)

    def not_sent(self, rref: RRef[Any], passed: Passed, error: BaseException) -> None:
        """Takes back a ``remote()`` whose request could not be sent."""
        with self._lock:
            self._under_way -= 1
        if passed.passage is Passage.CREATION:
            self._keeper.lending.unsent(Loan((passed,)), text_of(error))
        elif rref._holding.value is not None:  # the error itself would keep the handle alive
            rref._holding.value.fail(RRefCreationError(f"RRef creation failed: {text_of(error)}"))

    def given_up(self, passed: Passed) -> None:
        """Tells the owner that the call of a ``remote()`` ended before its request was sent."""
        if passed.passage is Passage.CREATION:
            self._keeper.lending.unsent(Loan((passed,)), "its call ended before it was sent")

    def replied(self, holding: Holding) -> None:
        """Notes that the owner has run the function that makes the value."""
        effects: list[Effect] = []
        with self._lock:
            self._under_way -= 1
            if holding.fork is not None:
                effects = self._table.creation_confirmed(holding.fork)
        self._ledger.perform(effects)
        if holding.maker is not None:
            self._makes_constants[holding.maker] = bool(holding.constant)
        if holding.creation is not None:
            holding.creation.fill(None)

    def gone(self, holding: Holding, error: Exception) -> None:
        """Fails the reference of a ``remote()`` whose request failed or timed out."""
        fork = holding.fork
        with self._lock:
            self._under_way -= 1
            effects = self._table.creation_failed(fork, text_of(error)) if fork is not None else []
        self._ledger.perform(effects)
        if fork is None and holding.value is not None:
            holding.value.fail(RRefCreationError(f"RRef creation failed: {text_of(error)}"))
        if holding.creation is not None:
            holding.creation.fail(error)
        if fork is not None and holding.called_through:
            self.calls.creation_gone(fork, error)
        if holding.dropped:
            self._completions.submit(lambda: self.tell_unread([holding]))

    def under_way(self) -> int:
        """Calls of ``remote()`` whose outcome is not known yet."""
        with self._lock:
            return self._under_way

    def await_constant(self, holding: Holding, timeout: float) -> bool:
        """Waits for the news that the value was made if that will likely bring the value.

        It may not be waited for longer than the caller has time. False if nothing was waited for.
        """
        creation, maker, ends_at = holding.creation, holding.maker, holding.creation_ends_at
        if creation is None or maker is None or creation.done() or not ends_at:
            return False
        limit = self._timeouts.of(timeout)
        in_time = not limit or ends_at <= self._timeouts.now() + limit
        is_likely = in_time and self._makes_constants.get(maker, False)
        if is_likely:
            creation.wait_with(self.calls.wait)
        return is_likely

    def tell_unread(self, holdings: Iterable[Holding]) -> None:
        """Logs why ``remote()`` failed for those that were dropped before anybody asked."""
        with self._lock:
            unread = [error for holding in holdings if (error := holding.unread())]
        for error in unread:
            kind, text = type(error).__name__, text_of(error)  # logs may be kept
            _logger.error("a remote() failed and nobody looked: %s: %s", kind, text)

    # --- At the owner

    def arrived(self, sender: Life, target: bytes) -> GlobalId:
        """Makes and names the place for the value of a ``remote()`` whose request came."""
        passed = _passed(target)
        rref = passed.reference.rref
        if passed.passage is not Passage.LOOPBACK:
            with self._lock:
                effects = self._table.creation_arrived(passed, sender)
                if self._table.is_kept(rref):
                    self._ledger.place(rref)
            self._ledger.perform(effects)
        return rref

    def created(self, rref: GlobalId, value: object) -> None:
        """Takes what the function of a ``remote()`` returned."""
        slot = self._ledger.slot_of(rref)
        if slot is not None:
            slot.fill(value)

    def raised(self, rref: GlobalId, error: BaseException) -> None:
        """Takes what the function of a ``remote()`` raised."""
        slot = self._ledger.slot_of(rref)
        if slot is not None:
            slot.fail(error)

    def place_of(self, target: bytes) -> Slot:
        """The place of the value that a request of its user is made through.

        Raises:
            StaleRRefError: there is none any more.
            FrameError: ``target`` is not what ``lending.lend_through`` wrote.
        """
        rref = borrowed_value(target)
        if rref is None:
            raise FrameError("a request can only be made through a borrowed reference")
        with self._lock:
            slot = self._ledger.values.get(rref)
            if slot is not None:
                return slot
            stale = self._table.look_up(_passed(target).reference)
            if stale is None:
                return self._ledger.place(rref)
        raise StaleRRefError(f"{rref} is stale: {stale}")


def _passed(target: bytes) -> Passed:
    """The reference in the target of a request; that may go on with a request id."""
    (passed,) = decode_passed(target[:PASSED_BYTES])
    return passed
