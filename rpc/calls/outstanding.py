"""The calls of a worker that have no outcome yet, and every end but a reply in time.

Owns the call table, its lock and the counters of the calls made. ``caller`` opens calls and
takes their replies; here are their futures, and here they are cancelled, expire, and fail
with their workers.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from rpc.calls.call_parts import CallParts
from rpc.errors import (
    AgentClosedError,
    CallCancelledError,
    RpcTimeoutError,
    RRefCreationError,
    UnknownWorkerError,
    WorkerLostError,
    caused,
)
from rpc.ids import GlobalId
from rpc.observe.metrics import Book, CallMetrics, ErrorKind
from rpc.observe.spans import feeds, goes_on, tell_expired
from rpc.outcomes.call_future import CallFuture
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import Sink
from rpc.protocol.calls import CallTable, Ending
from rpc.runtime import finalizers
from rpc.runtime.signals import restore, shut_out
from rpc.runtime.stack_room import require as require_room
from rpc.transports.base import Patience
from rpc.wire.control import Cancel
from rpc.wire.remote_errors import raisable

if TYPE_CHECKING:
    from rpc.calls.caller import Call


class OutstandingCalls:
    """The calls of one worker that are open, or whose late reply may still come.

    Args:
        shared: with the other parts of the worker's calls.

    Attributes:
        book: counts the calls made.
    """

    def __init__(self, shared: CallParts) -> None:
        self._shared = shared
        self._now = shared.clock.now
        self._lock = threading.Lock()
        self._table: CallTable[Call] = CallTable()
        self.replies_to_come: Callable[[], int] = self._table.open_calls
        self.book = Book()
        self._armed: float | None = None
        """The time when the next call expires, as far as the pulse knows."""
        self._processing = 0
        self._sent = 0
        self.closed_because: str | None = None
        # Made once: what every open call has of its own costs each collection of garbage time.
        self._waiter, self._waker, self._canceller = self.wait, self._wake, self.cancel

    # --- Waiting

    def future(self, description: str) -> Future[Any]:
        """A future that waits the way this worker's transport likes it."""
        future: CallFuture[Any] = CallFuture(
            description=description,
            waiter=self._waiter,
            waker=self._waker,
            canceller=self._canceller,
        )
        future.number = 0
        return future

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Waits as the transport likes it."""
        require_room()  # what arrives meanwhile must not be taken in by half
        self._shared.transport.wait(done, block)  # another one's in a forked child

    def _wake(self) -> None:
        self._shared.transport.wake()

    def later(self, start: Callable[[], Future[Any]]) -> Future[Any]:
        """The outcome of a call that is made soon, on another thread; safe in finalizers."""
        future = self.future("a call made by a finalizer")

        def begin() -> None:
            try:
                call = start()
            except BaseException as error:  # such as a SystemExit of somebody's pickling
                future.set_exception(raisable(error))
            else:
                call.add_done_callback(lambda done: future.complete_from(done.value))

        self._shared.references.do_later(partial(self._shared.completions.submit, begin))
        return future

    # --- Giving up

    def cancel(self, future: Future[Any]) -> bool:
        """Gives up the call whose outcome ``future`` waits for; False if it is over.

        In a finalizer that is not known yet: it is done later.
        """
        if finalizers.running():
            self._shared.references.do_later(partial(self.cancel, future))
            return True
        number = future.number if type(future) is CallFuture else 0
        before = shut_out()
        try:
            return self._cancel(number, lambda sink: feeds(sink, future))
        finally:
            restore(before)

    def cancel_where(self, wanted: Callable[[Sink], bool]) -> bool:
        """Gives up the call whose sink is wanted; False if there is none."""
        return self._cancel(0, wanted)

    def _cancel(self, number: int, wanted: Callable[[Sink], bool]) -> bool:
        """Cancels a call by the number that it likely has, else by looking through all."""
        with self._lock:
            likely = self._table.find(number)
            found: int | None = number
            if likely is None or not wanted(likely.sink):
                found = self._table.find_first(lambda call: wanted(call.sink))
            ended = None if found is None else self._table.cancel(found)
            if ended is not None:
                self._count_failures((ended.call,), ErrorKind.OTHER)
        if ended is None:
            return False
        call = ended.call
        call.sink.failed(CallCancelledError(f"{call.description} was cancelled by its caller"))
        self._shared.transport.look_again(call.to)
        self.tell_cancelled([call])
        return True

    def creation_gone(self, fork: GlobalId, reason: BaseException) -> None:
        """Fails what waits, through ``fork``, for the value of a ``remote()`` that failed."""
        with self._lock:
            numbers = [r.call_id for r in self._table.outstanding() if r.call.through == fork]
            calls = [ended.call for each in numbers if (ended := self._table.cancel(each))]
            self._count_failures(calls, ErrorKind.OTHER)
        for call in calls:
            call.sink.failed(RRefCreationError(f"RRef creation failed: {reason}"))
        if calls:
            self._shared.transport.wake()
            self._look_again({call.to for call in calls})
            self._shared.completions.submit(lambda: self.tell_cancelled(calls))

    def tell_cancelled(self, calls: Iterable[Call]) -> None:
        """Lets those who serve the calls know that nobody waits any more."""
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for call in calls:
            numbers[call.to].append(call.number)
        for to, theirs in numbers.items():
            self._shared.control.tell(self._shared.group.life(to), Cancel(tuple(theirs)))

    # --- Requests that are not sent

    def _refusal(self, call: Call) -> AgentClosedError:
        error = AgentClosedError(f"{call.description}: {self.closed_because}")
        self._shared.references.lending.unsent(call.loan, str(error))
        return error

    def _take_back(self, call: Call, error: BaseException) -> bool:
        """Forgets a call whose request could not be sent; False if it has ended meanwhile.

        Raises:
            WorkerLostError: that is why.
        """
        shared = self._shared
        with self._lock:
            withdrawn = self._table.withdraw(call.number)
            if withdrawn:
                self._count_failures((call,), ErrorKind.OTHER)
        shared.references.lending.unsent(call.loan, str(error))
        shared.shutdown.activity_changed()
        lost = shared.group.lost_error(call.to)
        if withdrawn and lost is not None and isinstance(error, UnknownWorkerError):
            raise caused(lost, None) from None  # the transport was told to forget it
        return withdrawn or not isinstance(error, Exception)

    # --- Ends that nobody asked for

    def expire(self, now: float) -> float | None:
        """Ends calls past their deadline; returns when to come back."""
        with self._lock:
            ended = self._table.expire(now)
            self._count_failures((e.call for e in ended), ErrorKind.TIMEOUT)
            expiry = self._table.next_expiry()
            if expiry is not None or (self._armed is not None and self._armed <= now):
                self._armed = expiry
            armed = self._armed  # kept when idle, so that a lone call need not wake the pulse
        for item in ended:
            tell_expired(item.call.sink, item.call)
            limit = f"{item.call.timeout * 1000:g}"
            item.call.sink.failed(
                RpcTimeoutError(
                    f"RPC ran for more than set timeout ({limit} ms) and will now be marked "
                    f"with an error: {item.call.description}"
                )
            )
        if ended:
            self._shared.transport.wake()
            self._look_again({item.call.to for item in ended})
            expired = [item.call for item in ended if not goes_on(item.call.sink)]
            self._shared.completions.submit(lambda: self.tell_cancelled(expired))
        return armed

    def worker_lost(self, worker_id: int, error: WorkerLostError) -> None:
        """Fails every call that waits for a worker which is gone."""
        with self._lock:
            ended = self._table.lose(worker_id)
            lost = (e.call for e in ended if e.ending is Ending.LOST)
            self._count_failures(lost, ErrorKind.LOST)
        for item in ended:
            self._shared.references.lending.call_ended(item.call.loan)
            if item.ending is Ending.LOST:
                item.call.sink.failed(copy(error))  # who raises it adds frames to it
        self._shared.transport.wake()
        self._shared.shutdown.activity_changed()

    def close(self, reason: str) -> None:
        """Fails whatever is outstanding and refuses new calls."""
        with self._lock:
            self.closed_because = reason
            destinations = {row.to for row in self._table.outstanding()}
            ended = [e for to in sorted(destinations) for e in self._table.lose(to)]
            open_calls = (e.call for e in ended if e.ending is Ending.LOST)
            self._count_failures(open_calls, ErrorKind.OTHER)
        for item in ended:
            if item.ending is Ending.LOST:
                item.call.sink.failed(AgentClosedError(f"{item.call.description}: {reason}"))
        self._shared.transport.wake()
        self._look_again(destinations)

    def _look_again(self, destinations: Iterable[int]) -> None:
        """Drops requests that still wait to be sent, as their calls to these workers ended."""
        for to in destinations:
            self._shared.transport.look_again(to)

    def _count_failures(self, calls: Iterable[Call], kind: ErrorKind) -> None:
        """Counts calls that have ended without a reply. Needs the lock."""
        now = self._now()
        for call in calls:
            call.series.ended(now - call.opened_at, call.sent, 0)
            call.series.failed(kind)

    # --- Looking

    def patience(self, number: int) -> Patience:
        """See :meth:`rpc.transports.base.Receiver.patience`."""
        with self._lock:
            call = self._table.find(number)
        return Patience.OVER if call is None else call.patience

    def quiet(self) -> bool:
        """True if no request is under way and no outcome is being handed out."""
        with self._lock:
            return not self._table and not self._processing

    def sent(self) -> int:
        """Requests sent so far."""
        return self._sent

    def outstanding(self) -> list[dict[str, Any]]:
        """A dump of the outstanding calls, oldest first."""
        now = self._now()
        with self._lock:
            rows = [*self._table.outstanding()]
        return [{"call": r.call.description, "to": r.to, "age": now - r.opened_at} for r in rows]

    def destinations(self) -> set[int]:
        """The workers that a reply is expected from."""
        with self._lock:
            return self._table.destinations()

    def metrics(self) -> tuple[CallMetrics, ...]:
        """The calls made, by method and peer."""
        with self._lock:
            rows = [row.call for row in self._table.outstanding()]
            return self.book.read(
                ((call.series, call.sent) for call in rows),
                lambda worker: self._shared.group.peer(worker).info.name,
            )
