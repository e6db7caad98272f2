"""References inside messages: lent on the way out, adopted on the way in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rpc.errors import StaleRRefError
from rpc.group.members import Group
from rpc.ids import Life, new_tuple
from rpc.protocol.reference_terms import (
    Carrier,
    Effect,
    Failure,
    Handle,
    OwnerHandle,
    UserHandle,
)
from rpc.rrefs.ledger import ReferenceLedger
from rpc.rrefs.rref import RRef
from rpc.rrefs.transfer import NOT_USABLE, Adopted, Holding, Loan
from rpc.wire.control import Passage, Passed, decode_passed, encode_passed

if TYPE_CHECKING:
    from rpc.rrefs.keeper import ReferenceKeeper

_NOT_SHAREABLE = "Cannot call fork an UserRRef after deletion."


class Lending:
    """The references of one worker that travel in messages.

    Args:
        keeper: of the worker's references.
        ledger: has them.
        group: the workers that it knows.

    Attributes:
        nothing_adopted: from a message that brought no references.
    """

    def __init__(self, keeper: ReferenceKeeper, ledger: ReferenceLedger, group: Group) -> None:
        self._keeper = keeper
        self._ledger = ledger
        self._lock = ledger.lock
        self._table = ledger.table
        self._group = group
        self.nothing_adopted = Adopted(ledger)

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
            through = self._share(rref, life, Carrier.REQUEST, NOT_USABLE)
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
        if rref._keeper is not self._keeper:  # the same ids may mean something else here
            raise rref._not_for(self._keeper.me)
        holding = rref._holding
        if holding.value is not None:
            holding.require_created()
        with self._lock:
            shared = self._table.share(holding.handle, to, carrier)
            if not isinstance(shared, Failure) and holding.value is not None:
                self._ledger.values.setdefault(holding.reference.rref, holding.value)
        if isinstance(shared, Failure):
            raise holding.unusable(shared, deleted, self._keeper.owner_of)
        return shared

    def require_shareable(self, holding: Holding) -> None:
        """Raises the error of a handle that must not be passed on."""
        holding.require_created()
        with self._lock:
            failure = self._table.failure(holding.handle)
        if failure is not None:
            raise holding.unusable(failure, _NOT_SHAREABLE, self._keeper.owner_of)

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
            self._ledger.perform(effects)

    def _each(self, loan: Loan, event: Callable[[Passed], list[Effect]]) -> None:
        if loan.passed:
            with self._lock:
                effects = [effect for passed in loan.passed for effect in event(passed)]
            self._ledger.perform(effects)

    def adopt(self, table: bytes) -> Adopted:
        """Takes in the references of a message that has some, each as a new handle."""
        adopted = Adopted(self._ledger)
        effects: list[Effect] = []
        with self._lock:
            for passed in decode_passed(table):
                handle, caused = self._table.receive(passed)
                effects += caused
                adopted.handles.append(RRef._of(self._keeper, self._holding(handle)))
                if isinstance(handle, UserHandle) and self._ledger.is_pending(handle):
                    adopted.pending.append(handle)
        self._ledger.perform(effects)
        return adopted

    def _holding(self, handle: Handle) -> Holding:
        if isinstance(handle, OwnerHandle):
            return Holding(handle, self._ledger.place(handle.reference.rref))
        return Holding(handle)
