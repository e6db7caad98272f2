"""The calling side of a worker: makes requests, tracks them, hands out their outcome.

Owns the call table and its lock. What a request carries is put together by
``packing``; where an outcome goes is a sink's business; time comes from the
agent's pulse.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from rpc.calls import packing
from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.errors import (
    AgentClosedError,
    CallCancelledError,
    EncodeError,
    RpcTimeoutError,
    RRefCreationError,
    UnknownWorkerError,
)
from rpc.ids import GlobalId, new_tuple
from rpc.observe import tracing
from rpc.observe.metrics import Book, CallMetrics, ErrorKind, Series, tensor_bytes
from rpc.observe.names import MethodName, method_name, text_of
from rpc.observe.spans import (
    WatchedSink,
    feeds,
    goes_on,
    leads_to,
    profiler_enabled,
    tell_expired,
    traced,
    watching,
)
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import CallFuture, Decode, FutureSink, Sink, WaitingCaller
from rpc.protocol.calls import CallTable, Ended, Ending
from rpc.rrefs.rref import RRef, call_method
from rpc.rrefs.transfer import Loan
from rpc.runtime import deadlines, finalizers, streams
from rpc.runtime.signals import restore, shut_out
from rpc.runtime.stack_room import require as require_room
from rpc.transports.base import Frame, FrameKind, Patience, Unreceived
from rpc.wire import codec
from rpc.wire.control import Cancel
from rpc.wire.messages import Extensions, Operation, Reply, Request, Status
from rpc.wire.remote_errors import decode_error
from rpc.wire.tensor_table import pack_tensors
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.agent import Agent

_REPLY = Ending.REPLY
_ERROR = Status.ERROR
_BARE = Reply(Status.OK)  # nothing comes with the payload


@dataclass(slots=True)
class Call:
    """One outgoing request, from before it is sent until nothing of it is under way.

    Args:
        method: what it is.
        sink: takes the outcome.
        timeout: seconds it was given, 0 for none.
        loan: references lent to it, alive at least as long as this.
        extensions: the metadata it carried.
        series: counts it when it is over.
        sent: bytes of its request.
        opened_at: when it was sent.
        to: the worker it was sent to.
        number: what the call table calls it.
        patience: of its request, while it is open.
        through: the user's fork that it was made through, if it needs the value of that.
    """

    method: MethodName
    sink: Sink
    timeout: float
    loan: Loan
    extensions: Extensions
    series: Series
    sent: int = 0
    opened_at: float = 0.0
    to: int = 0
    number: int = 0
    patience: Patience = Patience.WAITS
    through: GlobalId | None = None

    @property
    def description(self) -> str:
        """What it is, for errors and dumps."""
        return text_of(self.method)


class Caller:
    """Makes this worker's requests."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._table: CallTable[Call] = CallTable()
        self._book = Book()
        self._armed: float | None = None
        self._processing = 0
        self._sent = 0
        self._closed: str | None = None
        # Made once: what every open call has of its own costs each collection of garbage time.
        self._waiter, self._waker, self._canceller = self._wait, self._wake, self.cancel

    def call(
        self,
        to: WorkerInfo,
        func: object,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float,
        sink: Sink,
        target: bytes | None = None,
        once: bytes = b"",
    ) -> bool:
        """Asks ``to`` to run ``func``; with ``target``, to keep the result under that RRef.

        With ``once``, a packed ``RequestId``, it runs once however often this comes. False if
        the call ended before it was sent.
        """
        operation = Operation.CALL if target is None else Operation.CREATE
        target = target or once
        try:
            if func is call_method and not target and to.id != self._agent.info.id:
                return self._call_method(to, args, kwargs, timeout, sink)
            function = b"" if kwargs else codec.name_of(func) or b""
            by_name = function and func is not call_method
            name = function if by_name else method_name(func, args)
            value = tuple(args) if function else (func, args, kwargs)
            return self.request(operation, to, value, timeout, sink, target, name, function)
        except EncodeError as error:
            name = method_name(func, args)
            if func is call_method:
                args = args[2:]
            detail = codec.describe_unpicklable(text_of(name), func, args, kwargs, error)
            raise EncodeError(detail) from error

    def _call_method(
        self,
        to: WorkerInfo,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        timeout: float,
        sink: Sink,
    ) -> bool:
        """Calls a method of a value at its owner, which needs no handle of its own for that."""
        rref, method, *rest = args
        name, function = method_name(call_method, args), method.encode()
        value = [tuple(rest), kwargs] if kwargs else tuple(rest)
        return self.request(
            Operation.METHOD, to, value, timeout, sink, b"", name, function, through=rref
        )

    def request(
        self,
        operation: Operation,
        to: WorkerInfo,
        value: object,
        timeout: float,
        sink: Sink,
        target: bytes,
        name: MethodName,
        function: bytes = b"",
        through: RRef[Any] | None = None,
    ) -> bool:
        """Sends a request whose payload is ``value``; its outcome goes to ``sink``.

        What is made ``through`` a reference to a value of ``to`` has that as its target.
        False if the call ended before it was sent.

        Raises:
            RecursionError: too little is left of the stack.
        """
        require_room()
        agent = self._agent
        extended = agent.extensions.used
        if (
            profiler._is_profiler_enabled or profiler_enabled() or (extended and traced())
        ) and type(sink) is not WatchedSink:
            with watching(agent, operation, to, text_of(name), sink) as watched:
                return self.request(
                    operation, to, value, timeout, watched, target, name, function, through
                )
        limit = deadlines.effective_timeout(timeout, agent.rpc_timeout, agent.clock.now())
        peer = to.id
        attach = agent.extensions.attach_request(peer) if extended else None
        if agent.announce is not None and (attach is not None or packing.takes_long(value)):
            agent.announce(peer, FrameKind.REQUEST)
        packed = packing.pack(value, peer, agent.references, attach, borrow=True)
        loan = packed.loan
        if through is not None:
            target, loan = agent.references.lend_through(through, peer, loan)
        series = self._book[name, peer]
        call = Call(name, sink, limit, loan, packed.extensions, series)
        payload, plain, extensions, _, table, slots = packed
        header: Request = new_tuple(
            Request, (operation, plain, limit, target, extensions, loan.table, table, function)
        )
        try:
            encoded = header.encode()
        except EncodeError as error:
            agent.references.unsent(loan, str(error))
            raise
        if through is None:
            return self._send(call, to, encoded, payload, slots)
        holding = through._holding
        call.through, holding.called_through = holding.fork, True
        sent = self._send(call, to, encoded, payload, slots)
        creation = holding.creation
        reason = None if creation is None else creation.error()
        if reason is not None and call.through is not None:  # maybe before the call was open
            self.creation_gone(call.through, reason)
        return sent

    def message(
        self,
        to: WorkerInfo,
        extension: str,
        body: bytes,
        tensors: Sequence[torch.Tensor],
        timeout: float,
        sink: Sink,
    ) -> None:
        """Sends an extension's own message; the answer's bytes go to ``sink``."""
        if timeout == UNSET_RPC_TIMEOUT:
            timeout = self._agent.rpc_timeout
        timeout = deadlines.limit_of(timeout)
        before = shut_out()
        try:
            if traced() is None or extension == tracing.Tracing.name:
                self._message(to, extension, (body, *tensors), timeout, sink)
            else:
                name = f"{extension} message"
                with watching(self._agent, Operation.EXTENSION, to, name, sink) as watched:
                    self._message(to, extension, (body, *tensors), timeout, watched)
        finally:
            restore(before)

    def _message(
        self, to: WorkerInfo, extension: str, value: object, timeout: float, sink: Sink
    ) -> None:
        require_room()
        announce = self._agent.announce
        if announce is not None:
            announce(to.id, FrameKind.REQUEST)
        packed = packing.pack(
            value, to.id, self._agent.references, None, borrow=True, lower=pack_tensors
        )
        riding = tracing.riding()
        name = f"{extension} message"
        call = Call(name, sink, timeout, packed.loan, riding, self._book[name, to.id])
        call.patience = Patience.HURRIES  # user code waits for what waits for this
        header = Request(
            Operation.EXTENSION,
            packed.plain,
            timeout,
            extension.encode(),
            riding,
            packed.loan.table,
            packed.tensor_table,
        ).encode()
        self._send(call, to, header, packed.payload, packed.slots)

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

    def _wait(self, done: Callable[[], bool], block: Callable[[], None]) -> None:
        require_room()  # what arrives meanwhile must not be taken in by half
        self._agent.transport.wait(done, block)  # another one's in a forked child

    def _wake(self) -> None:
        self._agent.transport.wake()

    def cancel(self, future: Future[Any]) -> bool:
        """Gives up the call whose outcome ``future`` waits for; False if it is over.

        In a finalizer that is not known yet: it is done later.
        """
        if finalizers.running():
            self._agent.references.do_later(partial(self.cancel, future))
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
        """The same, with the number that the call likely has, so as not to look at all."""
        with self._lock:
            likely = self._table.find(number)
            found: int | None = number
            if likely is None or not wanted(likely.sink):
                found = self._table.find_first(lambda call: wanted(call.sink))
            ended = None if found is None else self._table.cancel(found)
            if ended is not None:
                _count_failures((ended.call,), self._agent.clock.now(), ErrorKind.OTHER)
        if ended is None:
            return False
        call = ended.call
        call.sink.failed(CallCancelledError(f"{call.description} was cancelled by its caller"))
        self._agent.transport.look_again(call.to)
        self.tell_cancelled([call])
        return True

    def creation_gone(self, fork: GlobalId, reason: BaseException) -> None:
        """``remote()`` failed: what waits for its value through ``fork`` does so, too."""
        with self._lock:
            found = [r.call_id for r in self._table.outstanding() if r.call.through == fork]
            calls = [ended.call for each in found if (ended := self._table.cancel(each))]
            _count_failures(calls, self._agent.clock.now(), ErrorKind.OTHER)
        for call in calls:
            call.sink.failed(RRefCreationError(f"RRef creation failed: {reason}"))
        if calls:
            self._agent.transport.wake()
            self._look_again({call.to for call in calls})
            self._agent.completions.submit(lambda: self.tell_cancelled(calls))

    def tell_cancelled(self, calls: Iterable[Call]) -> None:
        """Lets those who serve the calls know that nobody waits any more."""
        agent = self._agent
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for call in calls:
            numbers[call.to].append(call.number)
        for to, theirs in numbers.items():
            agent.control.tell(agent.group.life(to), Cancel(tuple(theirs)))

    def sync(self, sink: WaitingCaller) -> Any:
        """Waits for a sink's outcome; gives the call up if something ends the wait itself."""
        try:
            return sink.result(self._agent.transport.wait)
        except BaseException:
            if sink.is_waiting and not self.cancel_where(lambda each: leads_to(each, sink)):
                sink.abandon(self._agent.references.adopt)
            raise

    def patience(self, number: int) -> Patience:
        """See :meth:`rpc.transports.base.Receiver.patience`."""
        with self._lock:
            call = self._table.find(number)
        return Patience.OVER if call is None else call.patience

    def reply_arrived(self, sender: int, frame: Frame) -> None:
        """Matches a reply to its call and hands it to the call's sink."""
        reply = Reply.decode(frame.header)
        size = len(frame.header) + len(frame.payload)
        if frame.tensors:
            size += tensor_bytes(frame.tensors)
        now = self._agent.clock.now()
        with self._lock:
            ended = self._table.close(frame.correlation, sender)
            self._processing += 1
            if ended is not None:
                call = ended.call
                if ended.ending is _REPLY:
                    call.series.ended(now - call.opened_at, call.sent, size)
                    if reply.status is _ERROR:
                        call.series.failed(ErrorKind.REMOTE)
                else:
                    call.series.received_late(size)
        try:
            if ended is not None:
                self._dispatch(ended, sender, reply, frame)
        finally:
            with self._lock:
                self._processing -= 1
            self._agent.group_shutdown.activity_changed()

    def expire(self, now: float) -> float | None:
        """Ends calls past their deadline; returns when to come back."""
        with self._lock:
            ended = self._table.expire(now)
            _count_failures((e.call for e in ended), now, ErrorKind.TIMEOUT)
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
            self._agent.transport.wake()
            self._look_again({item.call.to for item in ended})
            expired = [item.call for item in ended if not goes_on(item.call.sink)]
            self._agent.completions.submit(lambda: self.tell_cancelled(expired))
        return armed

    def worker_lost(self, worker_id: int, error: Exception) -> None:
        """Fails every call that waits for a worker which is gone."""
        now = self._agent.clock.now()
        with self._lock:
            ended = self._table.lose(worker_id)
            lost = (e.call for e in ended if e.ending is Ending.LOST)
            _count_failures(lost, now, ErrorKind.LOST)
        for item in ended:
            self._agent.references.call_ended(item.call.loan)
            if item.ending is Ending.LOST:
                item.call.sink.failed(copy(error))  # who raises it adds frames to it
        self._agent.transport.wake()
        self._agent.activity_changed()

    def close(self, reason: str) -> None:
        """Fails whatever is outstanding and refuses new calls."""
        with self._lock:
            self._closed = reason
            destinations = {row.to for row in self._table.outstanding()}
            ended = [e for to in sorted(destinations) for e in self._table.lose(to)]
            open_calls = (e.call for e in ended if e.ending is Ending.LOST)
            _count_failures(open_calls, self._agent.clock.now(), ErrorKind.OTHER)
        for item in ended:
            if item.ending is Ending.LOST:
                item.call.sink.failed(AgentClosedError(f"{item.call.description}: {reason}"))
        self._agent.transport.wake()
        self._look_again(destinations)

    def _look_again(self, destinations: Iterable[int]) -> None:
        """Calls to these workers ended; if their requests still wait, they are not sent."""
        for to in destinations:
            self._agent.transport.look_again(to)

    def quiet(self) -> bool:
        """True if no request is under way and no outcome is being handed out."""
        with self._lock:
            return not self._table and not self._processing

    def sent(self) -> int:
        """Requests sent so far."""
        return self._sent

    def outstanding(self) -> list[dict[str, Any]]:
        """A dump of the outstanding calls, oldest first."""
        now = self._agent.clock.now()
        with self._lock:
            rows = [*self._table.outstanding()]
        return [{"call": r.call.description, "to": r.to, "age": now - r.opened_at} for r in rows]

    def destinations(self) -> set[int]:
        """The workers that a reply is expected from."""
        with self._lock:
            return self._table.destinations()

    def metrics(self) -> tuple[CallMetrics, ...]:
        """The calls made, by method and peer."""
        peer = self._agent.group.peer
        with self._lock:
            rows = [row.call for row in self._table.outstanding()]
            return self._book.read(
                ((call.series, call.sent) for call in rows), lambda i: peer(i).info.name
            )

    def _send(
        self,
        call: Call,
        to: WorkerInfo,
        header: bytes,
        payload: bytes,
        slots: tuple[torch.Tensor, ...],
    ) -> bool:
        """False if the call ended before it was sent."""
        agent = self._agent
        call.sent = len(header) + len(payload)
        if slots:
            call.sent += tensor_bytes(slots)
            streams.leave_tensors(slots)  # another thread may send, or send again
        try:
            with self._lock:
                if self._closed is not None:
                    raise AgentClosedError(f"{call.description}: {self._closed}")
                call.opened_at = now = agent.clock.now()
                call.to = to.id
                call.number = call_id = self._table.open(call, to.id, now, call.timeout)
                self._sent += 1
                expiry = now + call.timeout
                rearm = call.timeout > 0 and (self._armed is None or expiry < self._armed)
                if rearm:  # the pulse must run earlier than it would
                    self._armed = expiry
        except AgentClosedError as error:
            agent.references.unsent(call.loan, str(error))
            raise
        if rearm:
            agent.pulse.wake()
        sink = call.sink
        if type(sink) is FutureSink and type(sink.future) is CallFuture:
            sink.future.number = call_id
        try:
            frame = new_tuple(Frame, (FrameKind.REQUEST, call_id, header, payload, slots))
            agent.transport.send(to.id, frame)
        except BaseException as error:
            with self._lock:
                withdrawn = self._table.withdraw(call_id)
                if withdrawn:
                    _count_failures((call,), now, ErrorKind.OTHER)
            agent.references.unsent(call.loan, str(error))
            agent.activity_changed()
            lost = agent.group.lost_error(to.id)
            if withdrawn and lost is not None and isinstance(error, UnknownWorkerError):
                raise lost from None  # the transport was told to forget it
            if withdrawn or not isinstance(error, Exception):
                raise
            return False
        return True

    def _dispatch(self, ended: Ended[Call], sender: int, reply: Reply, frame: Frame) -> None:
        call = ended.call
        if call.loan.passed:
            self._agent.references.call_ended(call.loan)
        if ended.ending is Ending.LATE_REPLY:
            if reply.references:
                self._agent.references.adopt(reply.references)
            return

        def unpack(reply: Reply, frame: Frame, decode: Decode) -> Any:
            if reply == _BARE and type(frame.payload) is not Unreceived:
                return decode(frame.payload, (), ())
            return self._unpack(call, sender, reply, frame, decode)

        call.sink.replied(reply, frame, unpack)

    def _unpack(self, call: Call, sender: int, reply: Reply, frame: Frame, decode: Decode) -> Any:
        if reply.status is Status.ERROR and type(frame.payload) is not Unreceived:
            raise decode_error(bytes(frame.payload))
        references, replace = self._agent.references, None
        adopted = references.nothing_adopted
        if reply.references:
            adopted = references.adopt(reply.references)
        if reply.extensions:
            replace = self._agent.extensions.on_reply(sender, call.extensions, reply.extensions)
        return packing.unpack(
            frame.payload, reply.tensor_table, frame.tensors, adopted, replace, decode
        )


def _count_failures(calls: Iterable[Call], now: float, kind: ErrorKind) -> None:
    for call in calls:
        call.series.ended(now - call.opened_at, call.sent, 0)
        call.series.failed(kind)
