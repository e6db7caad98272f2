"""Holdings, loans and adopted references, which the reference keeper hands out and takes back.

Plain data. What becomes of it is decided in ``references`` and carried out by
``keeper``, ``lending`` and ``creations``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from rpc.errors import RRefCreationError, RRefDeletedError, StaleRRefError, WorkerLostError
from rpc.ids import GlobalId, Reference
from rpc.outcomes.slot import Slot
from rpc.protocol.reference_terms import Failure, FailureKind, Handle, UserHandle
from rpc.wire.control import Passed
from rpc.wire.kept_errors import again
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.rrefs.ledger import ReferenceLedger
    from rpc.rrefs.rref import RRef

NOT_USABLE = "has been deleted. Cannot call to_here() on it after deletion."

Maker = tuple[int, str]
"""A worker, and the name of a function that ``remote()`` ran there."""


@dataclass(slots=True)
class Holding:
    """All that one ``RRef`` object holds on to.

    Args:
        handle: how the reference table knows it.
        value: the place of the value, on its owner.
        creation: done when ``remote()`` is, at its caller.
        maker: what makes the value, and where, at the caller of ``remote()``.
        creation_ends_at: when ``creation`` will be done at the latest; 0 if that is not known.
        constant: the value, if it came with the news that it was made.
        dropped: the object is gone.
        looked_at: whoever used it was told how ``creation`` ended, or will be.
        called_through: requests that need the value were made through it.
    """

    handle: Handle
    value: Slot | None = None
    creation: Slot | None = None
    maker: Maker | None = None
    creation_ends_at: float = 0.0
    constant: tuple[Any, ...] = ()
    dropped: bool = False
    looked_at: bool = False
    called_through: bool = False

    def unread(self) -> BaseException | None:
        """The reason why ``remote()`` failed, once, if nobody can learn of it any more."""
        if not self.dropped or self.looked_at or self.creation is None:
            return None
        error = self.creation.error()
        self.looked_at = error is not None
        return error

    def require_created(self) -> None:
        """Raises if the call that should have made this worker's own value never did."""
        error = None if self.value is None else self.value.error()
        if isinstance(error, RRefCreationError):
            self.looked_at = True
            raise again(error)

    def unusable(
        self, failure: Failure, deleted: str, owner: Callable[[Holding], WorkerInfo]
    ) -> Exception:
        """The error for the use of a handle that must not be used any more.

        Args:
            failure: why not.
            deleted: what it says of one that was deleted.
            owner: gives the owner of the value.
        """
        self.looked_at = True
        if failure.kind is FailureKind.CREATION:
            return RRefCreationError(failure.reason)
        if failure.kind is FailureKind.DELETED:
            name = f"UserRRef(RRefId = {self.reference.rref}, ForkId = {self.fork})"
            return RRefDeletedError(f"{name} {deleted} ({failure.reason})")
        if failure.kind is FailureKind.OWNER_LOST:
            incarnation = self.reference.owner.incarnation
            return WorkerLostError(owner(self).name, incarnation, failure.reason)
        return StaleRRefError(f"{self.reference.rref} is stale: {failure.reason}")

    @property
    def reference(self) -> Reference:
        """The value that is meant."""
        return self.handle.reference

    @property
    def fork(self) -> GlobalId | None:
        """The user's fork; None on the owner."""
        return self.handle.fork if isinstance(self.handle, UserHandle) else None


class Loan(NamedTuple):
    """The references inside one message on its way out."""

    passed: tuple[Passed, ...] = ()
    table: bytes = b""


@dataclass(slots=True)
class Adopted:
    """The references inside one message that arrived.

    Args:
        ledger: of the worker's references.
        handles: new ``RRef`` objects, in the order of the message's table.
        pending: forks that their owners have yet to confirm.
    """

    ledger: ReferenceLedger
    handles: list[RRef[Any]] = field(default_factory=list)
    pending: list[UserHandle] = field(default_factory=list)

    def when_confirmed(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` once no fork is pending, whatever became of them."""
        self.ledger.when_settled(self.pending, callback)


NOTHING_LENT = Loan()


class Countdown:
    """Calls back when as many things have happened as were added, and one more."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left = 1
        self._callback = callback

    def add(self) -> None:
        """Adds one thing that has to happen."""
        with self._lock:
            self._left += 1

    def one_less(self) -> None:
        """Notes that one of them happened."""
        with self._lock:
            self._left -= 1
            over = self._left == 0
        if over:
            self._callback()
