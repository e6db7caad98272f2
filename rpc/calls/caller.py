"""The calling side of a worker: makes requests, takes their replies.

The way of a call: :meth:`Caller.rpc_sync` and its siblings find the worker, :meth:`request`
encodes the value and sends it, :meth:`take_reply` hands the outcome to the call's sink. What
travels beside a value is put together by ``packing``; what else may become of a call is in
``outstanding``; messages of extensions, which are calls too, are made by
``extension_messages``.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch.autograd import profiler

from rpc.calls import packing
from rpc.calls.call_parts import CallParts
from rpc.calls.outstanding import OutstandingCalls
from rpc.calls.packing import NOTHING_BESIDE
from rpc.calls.pending_joins import CallToCome
from rpc.calls.retrying import RetriedCall, Retries
from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.errors import (
    EncodeError,
    FrameError,
    RpcTimeoutError,
    WorkerLostError,
    caused,
)
from rpc.group.directory import Destination, Directory
from rpc.ids import GlobalId, Life, new_tuple
from rpc.observe.metrics import MOST_UNCOUNTED, ErrorKind, Series, tensor_bytes
from rpc.observe.names import MethodName, method_name, text_of
from rpc.observe.profiling import collector as profiled_calls
from rpc.observe.spans import WatchedSink, leads_to, profiler_enabled, traced, watching
from rpc.outcomes.call_future import CallFuture
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import (
    READ_BY_SENDER,
    Decode,
    FutureSink,
    Sink,
    WaitingCaller,
)
from rpc.protocol.calls import Ending
from rpc.protocol.reference_terms import UserHandle
from rpc.protocol.retry import Retry
from rpc.rrefs.rref import RRef, call_method
from rpc.rrefs.transfer import Loan
from rpc.runtime import deadlines, finalizers, streams
from rpc.runtime.signals import here, raise_due, restore, shut_out
from rpc.runtime.stack_room import require as require_room
from rpc.transports.base import Frame, FrameKind, Patience, Unreceived
from rpc.wire import codec
from rpc.wire.callables import require_call
from rpc.wire.control import encode_passed
from rpc.wire.messages import (
    BARE_REPLY,
    BARE_REPLY_HEADER,
    Extensions,
    Operation,
    Reply,
    Request,
    Status,
    request_prefix,
)
from rpc.wire.remote_errors import decode_error
from rpc.wire.simple_values import encode_simple
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")
_CALL = Operation.CALL
_REPLIED = Ending.REPLY
_ERROR = Status.ERROR
_REQUEST = FrameKind.REQUEST
_NAMED_KINDS = (FunctionType, BuiltinFunctionType)
_MOST_NAMES = 4096


class Call:
    """One outgoing request, from before it is sent until nothing of it is under way.

    Args:
        method: names what is asked for.
        sink: takes the outcome.
        timeout: seconds it was given, 0 for none.
        loan: references lent to it, alive at least as long as this.
        extensions: the metadata it carried.
        series: counts it when it is over.
        to: the worker it is sent to.

    Attributes:
        sent: bytes of its request.
        opened_at: when it was sent.
        number: its key in the call table.
        patience: of its request, while it is open.
        through: the user's fork that it was made through, if it needs the value of that.
    """

    __slots__ = (
        "extensions",
        "loan",
        "method",
        "number",
        "opened_at",
        "patience",
        "sent",
        "series",
        "sink",
        "through",
        "timeout",
        "to",
    )

    def __init__(
        self,
        method: MethodName,
        sink: Sink,
        timeout: float,
        loan: Loan,
        extensions: Extensions,
        series: Series,
        to: int,
    ) -> None:
        self.method = method
        self.sink = sink
        self.timeout = timeout
        self.loan = loan
        self.extensions = extensions
        self.series = series
        self.to = to
        self.sent = 0
        self.opened_at = 0.0
        self.number = 0
        self.patience = Patience.WAITS
        self.through: GlobalId | None = None

    @property
    def description(self) -> str:
        """Its name, for errors and dumps."""
        return text_of(self.method)


class _Named(NamedTuple):
    """A function that every worker finds by its name, and where it is found here."""

    module: ModuleType
    attribute: str
    name: bytes


class Caller(OutstandingCalls):
    """Makes the calls of one worker.

    Args:
        shared: with the other parts of the worker's calls.
        directory: finds the worker that is meant.
        hurry: makes :meth:`expire` run soon.
    """

    def __init__(self, shared: CallParts, directory: Directory, hurry: Callable[[], None]) -> None:
        super().__init__(shared)
        self.find = directory.find
        self._directory = directory
        self._reachable = shared.group.reachable
        self._living = shared.group.living_now
        self._hurry = hurry
        self._named: dict[Any, _Named] = {}
        self.retries = Retries(shared, directory, self)

    # --- What users call

    def rpc_sync(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: SupportsFloat = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> Any:
        """Runs ``func`` on ``to`` and returns its result; see ``rpc.rpc_sync``."""
        is_known = type(func) in _NAMED_KINDS and func in self._named
        is_plain = is_known and kwargs is None and (args is None or type(args) is tuple)
        if not is_plain and func is not call_method:
            require_call(func, args, kwargs)
        if finalizers.collecting:
            finalizers.refuse("rpc_sync")
        if retry is not None:
            return self.retries.sync(
                RetriedCall(to, func, args or (), kwargs or {}), timeout, retry
            )
        sink = WaitingCaller()
        if type(to) is WorkerInfo:
            peer = self._reachable.get(to.id)
            peer = peer if peer is to else None
        else:
            peer = self._reachable.get(to) if type(to) is str else None
        if peer is None:
            peer = self.find(to, timeout)
        return self.run(sink, self.call, peer, func, args or (), kwargs or {}, timeout, sink)

    def rpc_async(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: SupportsFloat = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> Future[Any]:
        """Runs ``func`` on ``to``; see ``rpc.rpc_async``."""
        is_known = type(func) in _NAMED_KINDS and func in self._named
        is_plain = is_known and kwargs is None and (args is None or type(args) is tuple)
        if not is_plain:
            require_call(func, args, kwargs)
        if finalizers.collecting and finalizers.running():
            return self.later(lambda: self.rpc_async(to, func, args, kwargs, timeout, retry))
        if retry is not None:
            return self.retries.future(
                RetriedCall(to, func, args or (), kwargs or {}), timeout, retry
            )
        whom = getattr(to, "name", to)  # also of what is no destination, as is said below
        future = self.future(f"the call of {method_name(func, args or ())} on {whom}")
        sink = FutureSink(future, self._shared.completions)
        try:
            peer = self._reachable.get(to) if type(to) is str else None
            if peer is None:
                membership = self._directory.membership_of(to)
                if membership is not None and isinstance(to, str | int):
                    call = partial(self.call, func=func, args=args or (), kwargs=kwargs or {})
                    waits = CallToCome(self._shared, self, membership, to, sink, call)
                    waits.wait(self._shared.timeouts.of(timeout))
                    return future
                peer = self._shared.group.find(to)
            self.run(sink, self.call, peer, func, args or (), kwargs or {}, timeout, sink)
        except (WorkerLostError, RpcTimeoutError) as error:
            future.set_exception(error)
        return future

    def remote(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: SupportsFloat = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> RRef[Any]:
        """Runs ``func`` on ``to``, which keeps the result; see ``rpc.remote``."""
        require_call(func, args, kwargs)
        if finalizers.collecting:
            finalizers.refuse("remote")
        if retry is not None:
            tried = RetriedCall(to, func, args or (), kwargs or {})
            return self.retries.create(tried, timeout, retry)
        owner = self.find(to, timeout)
        references = self._shared.references
        before = shut_out()
        try:
            limit = self._shared.timeouts.of(timeout)
            rref, passed, sink = references.creations.create(owner, func, limit)
            target = encode_passed((passed,))
            try:
                sent = self.call(owner, func, args or (), kwargs or {}, timeout, sink, target)
            except BaseException as error:
                references.creations.not_sent(rref, passed, error)
                raise
            if not sent:
                references.creations.given_up(passed)
            return rref
        finally:
            restore(before)

    # --- From a function to a request

    def call(
        self,
        to: WorkerInfo,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: SupportsFloat,
        sink: Sink,
        target: bytes | None = None,
        once: bytes = b"",
    ) -> bool:
        """Asks ``to`` to run ``func``; with ``target``, to keep the result under that RRef.

        With ``once``, a packed ``RequestId``, it runs once however often this comes. False if
        the call ended before it was sent.
        """
        operation = _CALL if target is None else Operation.CREATE
        target = target or once
        try:
            if func is call_method and not target and to.id != self._shared.me.id:
                return self._call_method(to, args, kwargs, timeout, sink)
            function = b""
            if not kwargs and type(func) in _NAMED_KINDS:
                known = self._named.get(func)
                if known is None or getattr(known.module, known.attribute, None) is not func:
                    known = self._learn_name(func)
                if known is not None:
                    function = known.name
            if function and func is not call_method:
                name: MethodName = function
            else:
                name = method_name(func, args)
            value = tuple(args) if function else (func, args, kwargs)  # itself, if it is one
            return self.request(operation, to, value, timeout, sink, target, name, function)
        except EncodeError as error:
            raise caused(_described(func, args, kwargs, error), error) from error

    def _learn_name(self, func: Any) -> _Named | None:
        name = codec.name_of(func)
        if name is None:
            return None
        if len(self._named) >= _MOST_NAMES:
            self._named.clear()
        known = _Named(sys.modules[func.__module__ or ""], func.__name__, name)
        self._named[func] = known
        return known

    def _call_method(
        self,
        to: WorkerInfo,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout: SupportsFloat,
        sink: Sink,
    ) -> bool:
        """Calls a method of a value at its owner, which needs no handle of its own for that."""
        rref, method, *rest = args
        value = [tuple(rest), kwargs] if kwargs else tuple(rest)
        name = f"RRef.{method}"
        return self.request(
            Operation.METHOD, to, value, timeout, sink, b"", name, method.encode(), rref
        )

    def request(
        self,
        operation: Operation,
        to: WorkerInfo,
        value: object,
        timeout: SupportsFloat,
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
        shared = self._shared
        extended = shared.extensions.used
        if (
            profiler._is_profiler_enabled
            or profiler_enabled()
            or profiled_calls() is not None
            or (extended and (traced() or shared.extensions.observers))
        ) and type(sink) is not WatchedSink:
            load, looking_on = shared.extensions.load, shared.extensions.observers
            with watching(
                shared.me, operation, to, text_of(name), sink, load, looking_on
            ) as watched:
                return self.request(
                    operation, to, value, timeout, watched, target, name, function, through
                )
        timeouts, peer = shared.timeouts, to.id
        if type(timeout) is float and timeout == UNSET_RPC_TIMEOUT and deadlines.scope() is None:
            limit = timeouts.default
        else:
            limit = timeouts.of(timeout)
        encoded = encode_simple(value) or codec.encode_any(value)
        payload, tensors, references, plain, _ = encoded
        beside = NOTHING_BESIDE
        if tensors or references or extended:
            attach = partial(shared.extensions.attach_request, peer) if extended else None
            beside = packing.pack(
                encoded, peer, shared.references, shared.host_moves, attach, borrow=True
            )
        extensions, loan, table, slots = beside
        if through is not None:
            target, loan = shared.references.lending.lend_through(through, peer, loan)
        if target or extensions or loan.table:
            parts = operation, plain, limit, target, extensions, loan.table, table, function
            message: Request = new_tuple(Request, parts)
            try:
                header = message.encode()
            except EncodeError as error:
                shared.references.lending.unsent(loan, str(error))
                raise
        else:
            header = request_prefix(operation, function, limit, plain) + table
        call = Call(name, sink, limit, loan, extensions, self.book[name, peer], peer)
        if through is None:
            return self.send(call, header, payload, slots)
        return self._send_through(through, call, header, payload, slots)

    def _send_through(
        self,
        through: RRef[Any],
        call: Call,
        header: bytes,
        payload: bytes,
        slots: tuple[torch.Tensor, ...],
    ) -> bool:
        """Sends a request that needs the value of a reference, which may never be made."""
        holding = through._holding
        handle = holding.handle
        call.through = handle.fork if type(handle) is UserHandle else None
        holding.called_through = True
        sent = self.send(call, header, payload, slots)
        creation = holding.creation
        reason = None if creation is None else creation.error()
        if reason is not None and call.through is not None:  # maybe before the call was open
            self.creation_gone(call.through, reason)
        return sent

    def send(
        self, call: Call, header: bytes, payload: bytes, slots: tuple[torch.Tensor, ...]
    ) -> bool:
        """Opens a call and sends its request; False if it ended before that was sent."""
        call.sent = len(header) + len(payload)
        if slots:
            call.sent += tensor_bytes(slots)
            streams.leave_tensors(slots)  # another thread may send, or send again
        to, timeout, sink, rearm = call.to, call.timeout, call.sink, False
        with self._lock:
            if self.closed_because is None:
                call.opened_at = now = self._now()
                call.number = number = self._table.open(call, to, now, timeout)
                self._sent += 1
                if timeout > 0:  # the pulse must perhaps run earlier than it would
                    rearm = self._armed is None or now + timeout < self._armed
                    if rearm:
                        self._armed = now + timeout
        if not call.number:
            raise self._refusal(call)
        if rearm:
            self._hurry()
        if type(sink) is FutureSink and type(sink.future) is CallFuture:
            sink.future.number = number
        try:
            frame = new_tuple(Frame, (_REQUEST, number, header, payload, slots))
            transport = self._shared.transport
            transport.send(to, frame)
            if type(sink) not in READ_BY_SENDER:
                transport.attend()
        except BaseException as error:
            if self._take_back(call, error):
                raise
            return False
        return True

    # --- Waiting

    def run(self, sink: Sink, start: Callable[..., object], *args: Any) -> Any:
        """Starts a call by ``start(*args)`` and waits for its outcome, if ``sink`` is for that.

        Ctrl-C is held back but while it waits. If something ends the wait itself, the call is
        given up.
        """
        held, here.held = here.held, True
        try:
            start(*args)
            if type(sink) is not WaitingCaller:
                return None
            try:
                return sink.result(self._shared.transport.wait)
            except BaseException:
                if sink.is_waiting and not self.cancel_where(lambda each: leads_to(each, sink)):
                    sink.abandon(self._shared.references.lending.adopt)
                raise
        finally:
            here.held = held
            if here.due and not held:
                raise_due()

    def fetch(self, rref: RRef[Any], owner: WorkerInfo, timeout: SupportsFloat) -> Any:
        """Asks the owner of a value for a copy, and waits."""
        sink, fetch = WaitingCaller(), Operation.FETCH
        asked = fetch, owner, (), timeout, sink, b"", "to_here", b"", rref
        return self.run(sink, self.request, *asked)

    # --- Replies

    def take_reply(
        self, sender: Life, frame: Frame, in_batch: bool = False, was_kept: bool = False
    ) -> None:
        """Matches a reply to its call and hands it to the call's sink.

        See ``transports.base.Receiver``. One that ``was_kept`` has waited for the group already.
        """
        shared = self._shared
        must_wait = in_batch or shared.early.held is not None
        if must_wait and not was_kept and self._put_off(sender, frame, in_batch):
            return
        if self._living.get(sender[0]) != sender:
            shared.refused(sender)
            return
        _, number, header, payload, tensors = frame
        try:
            reply = BARE_REPLY if header == BARE_REPLY_HEADER else Reply.decode(header)
        except FrameError as error:
            _logger.error("dropped a reply from %s: %s", sender, error)
            return
        size = len(header) + len(payload)
        if tensors:
            size += tensor_bytes(tensors)
        with self._lock:
            ended = self._table.close(number, sender.worker)
            self._processing += 1
            if ended is not None:
                ending, call = ended.ending, ended.call
                series = call.series
                if ending is _REPLIED:
                    series.over.append((self._now() - call.opened_at, call.sent, size))
                    if len(series.over) >= MOST_UNCOUNTED:
                        series.count()
                    if reply.status is _ERROR:
                        series.failed(ErrorKind.REMOTE)
                else:
                    series.received_late(size)
        try:
            if ended is not None:
                if call.loan.passed:
                    shared.references.lending.call_ended(call.loan)
                if ending is _REPLIED:
                    call.sink.replied(reply, frame, partial(self._unpack, call))
                elif reply.references:
                    shared.references.lending.adopt(reply.references)
        finally:
            with self._lock:
                self._processing -= 1
            if shared.shutdown.awaits_quiet:
                shared.shutdown.activity_changed()

    def _put_off(self, sender: Life, frame: Frame, in_batch: bool) -> bool:
        """Keeps a reply that must wait, or takes it so that nothing blocks; False if neither."""
        shared = self._shared
        if shared.early.keep(partial(self.take_reply, sender, frame, in_batch, was_kept=True)):
            return True
        if in_batch:
            with shared.completions.elsewhere():
                self.take_reply(sender, frame, was_kept=True)
        return in_batch

    def _unpack(self, call: Call, reply: Reply, frame: Frame, decode: Decode) -> Any:
        payload, tensors = frame.payload, frame.tensors
        if reply.status is _ERROR and type(payload) is not Unreceived:
            raise decode_error(bytes(payload))
        references, replace = self._shared.references, None
        adopted = references.lending.nothing_adopted
        if reply.references:
            adopted = references.lending.adopt(reply.references)
        if reply.extensions:
            on_reply = self._shared.extensions.on_reply
            replace = partial(on_reply, call.to, call.extensions, reply.extensions)
        return packing.unpack(payload, reply.tensor_table, tensors, adopted, replace, decode)


def _described(
    func: object, args: Sequence[Any], kwargs: Mapping[str, Any], error: EncodeError
) -> EncodeError:
    """Returns the same error, with the part of the call that cannot be sent in its text."""
    name = text_of(method_name(func, args))
    if func is call_method:
        args = args[2:]
    return EncodeError(codec.describe_unpicklable(name, func, args, kwargs, error))
