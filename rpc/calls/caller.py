"""The calling side of a worker: makes requests, takes their replies.

The way of a call: :meth:`Caller.rpc_sync` and its siblings find the worker, :meth:`request`
encodes the value and sends it, :meth:`reply` hands the outcome to the call's sink. What
travels beside a value is put together by ``packing``; what else may become of a call is in
``outstanding``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler

from rpc.calls import packing
from rpc.calls.outstanding import Call, OutstandingCalls
from rpc.calls.packing import NOTHING_BESIDE
from rpc.calls.pending_joins import CallToCome
from rpc.calls.retrying import RetriedCall, Retries
from rpc.calls.shared import Shared
from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.errors import (
    AgentClosedError,
    EncodeError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.group.directory import Destination, Directory
from rpc.ids import Life, new_tuple
from rpc.observe import tracing
from rpc.observe.metrics import MOST_UNCOUNTED, ErrorKind, tensor_bytes
from rpc.observe.names import MethodName, method_name, text_of
from rpc.observe.profiling import collector as profiled_calls
from rpc.observe.spans import WatchedSink, leads_to, profiler_enabled, traced, watching
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import (
    CallFuture,
    Decode,
    FutureSink,
    Sink,
    WaitingCaller,
)
from rpc.protocol.calls import Ending
from rpc.protocol.reference_terms import UserHandle
from rpc.protocol.retry import Retry
from rpc.rrefs.rref import RRef, call_method
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
    Operation,
    Reply,
    Request,
    Status,
    request_prefix,
)
from rpc.wire.remote_errors import decode_error, raisable
from rpc.wire.simple_values import encode_simple
from rpc.wire.tensor_table import pack_tensors
from rpc.worker_info import WorkerInfo

_CALL = Operation.CALL
_EXTENSION = Operation.EXTENSION
_REPLIED = Ending.REPLY
_ERROR = Status.ERROR
_REQUEST = FrameKind.REQUEST
_NAMED_KINDS = (FunctionType, BuiltinFunctionType)
_MOST_NAMES = 4096


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

    def __init__(self, shared: Shared, directory: Directory, hurry: Callable[[], None]) -> None:
        super().__init__(shared)
        self.find = directory.find
        self._directory = directory
        self._reachable = shared.group.reachable
        self._hurry = hurry
        self._named: dict[Any, _Named] = {}
        self.retries = Retries(shared, directory, self)
        # Made once: what every open call has of its own costs each collection of garbage time.
        self._waiter, self._waker, self._canceller = self.wait, self._wake, self.cancel

    # --- What users call

    def rpc_sync(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> Any:
        """Runs ``func`` on ``to`` and returns its result; see ``rpc.rpc_sync``."""
        name = self._named.get(func) if type(func) in _NAMED_KINDS else None
        is_plain = name is not None and kwargs is None and (args is None or type(args) is tuple)
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
        held, here.held = here.held, True
        try:
            self.call(peer, func, args or (), kwargs or {}, timeout, sink)
            return self.sync(sink)
        finally:
            here.held = held
            if here.due and not held:
                raise_due()

    def rpc_async(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        retry: Retry | None = None,
    ) -> Future[Any]:
        """Runs ``func`` on ``to``; see ``rpc.rpc_async``."""
        require_call(func, args, kwargs)
        if finalizers.collecting and finalizers.running():
            return self.later(lambda: self.rpc_async(to, func, args, kwargs, timeout, retry))
        if retry is not None:
            return self.retries.future(
                RetriedCall(to, func, args or (), kwargs or {}), timeout, retry
            )
        whom = to.name if isinstance(to, WorkerInfo) else to
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
            held, here.held = here.held, True
            try:
                self.call(peer, func, args or (), kwargs or {}, timeout, sink)
            finally:
                here.held = held
                if here.due and not held:
                    raise_due()
        except (WorkerLostError, RpcTimeoutError) as error:
            future.set_exception(error)
        return future

    def remote(
        self,
        to: Destination,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_RPC_TIMEOUT,
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
            rref, passed, sink = references.create(owner, func, limit)
            target = encode_passed((passed,))
            try:
                sent = self.call(owner, func, args or (), kwargs or {}, timeout, sink, target)
            except BaseException as error:
                references.creation_not_sent(rref, passed, error)
                raise
            if not sent:
                references.creation_given_up(passed)
            return rref
        finally:
            restore(before)

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

        completions = self._shared.completions
        self._shared.references.do_later(lambda: completions.submit(begin))
        return future

    # --- From a function to a request

    def call(
        self,
        to: WorkerInfo,
        func: Any,
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
            raise _described(func, args, kwargs, error) from error

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
        kwargs: dict[str, Any],
        timeout: float,
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
        shared = self._shared
        extended = shared.extensions.used
        if (
            profiler._is_profiler_enabled
            or profiler_enabled()
            or profiled_calls() is not None
            or (extended and traced())
        ) and type(sink) is not WatchedSink:
            load = shared.extensions.load
            with watching(shared.me, operation, to, text_of(name), sink, load) as watched:
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
            target, loan = shared.references.lend_through(through, peer, loan)
        if target or extensions or loan.table:
            parts = operation, plain, limit, target, extensions, loan.table, table, function
            message: Request = new_tuple(Request, parts)
            try:
                header = message.encode()
            except EncodeError as error:
                shared.references.unsent(loan, str(error))
                raise
        else:
            header = request_prefix(operation, function, limit, plain) + table
        series = self._book[name, peer]
        call = Call(name, sink, limit, loan, extensions, series, peer)
        if through is None:
            return self._send(call, header, payload, slots)
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
        sent = self._send(call, header, payload, slots)
        creation = holding.creation
        reason = None if creation is None else creation.error()
        if reason is not None and call.through is not None:  # maybe before the call was open
            self.creation_gone(call.through, reason)
        return sent

    def _send(
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
            if type(sink) is not WaitingCaller:
                transport.attend()
        except BaseException as error:
            if self._take_back(call, error):
                raise
            return False
        return True

    def _refusal(self, call: Call) -> AgentClosedError:
        error = AgentClosedError(f"{call.description}: {self.closed_because}")
        self._shared.references.unsent(call.loan, str(error))
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
        shared.references.unsent(call.loan, str(error))
        shared.shutdown.activity_changed()
        lost = shared.group.lost_error(call.to)
        if withdrawn and lost is not None and isinstance(error, UnknownWorkerError):
            raise lost from None  # the transport was told to forget it
        return withdrawn or not isinstance(error, Exception)

    # --- Messages of extensions

    def send_extension_message(
        self, to: int, extension: str, body: bytes, timeout: float = UNSET_RPC_TIMEOUT
    ) -> Future[bytes]:
        """Sends an extension's own message to its counterpart on worker ``to``.

        Args:
            to: its id.
            extension: the extension's name.
            body: what the extension makes of it.
            timeout: seconds until the future fails, -1 for the default, 0 for no limit.

        Returns:
            A future of what the counterpart's ``on_message`` returned.
        """
        info = self._shared.group.peer(to).info
        future = self.future(f"{extension} message to {info.name}")
        sink = FutureSink(future, self._shared.completions)
        self.message(info, extension, body, (), timeout, sink)
        return future

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
        name, is_traced = f"{extension} message", traced() is not None
        if is_traced and extension != tracing.Tracing.name and type(sink) is not WatchedSink:
            shared = self._shared
            with watching(shared.me, _EXTENSION, to, name, sink, shared.extensions.load) as watched:
                self.message(to, extension, body, tensors, timeout, watched)
            return
        if timeout == UNSET_RPC_TIMEOUT:
            timeout = self._shared.timeouts.default
        timeout = 0.0 if timeout >= deadlines.FOREVER else timeout
        held, here.held = here.held, True
        try:
            require_room()
            shared, value = self._shared, (body, *tensors)
            encoded = encode_simple(value) or codec.encode_any(value)
            beside = NOTHING_BESIDE
            if encoded.tensors or encoded.references:
                beside = packing.pack(
                    encoded,
                    to.id,
                    shared.references,
                    shared.host_moves,
                    None,
                    borrow=True,
                    lower=pack_tensors,
                )
            _, loan, table, slots = beside
            riding = tracing.riding() if is_traced else ()
            call = Call(name, sink, timeout, loan, riding, self._book[name, to.id], to.id)
            call.patience = Patience.HURRIES  # user code waits for what waits for this
            target, plain = extension.encode(), encoded.plain
            parts = _EXTENSION, plain, timeout, target, riding, loan.table, table, b""
            request: Request = new_tuple(Request, parts)
            self._send(call, request.encode(), encoded.payload, slots)
        finally:
            here.held = held
            if here.due and not held:
                raise_due()

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

    def wait(self, done: Callable[[], bool], block: Callable[[], None]) -> None:
        """Waits as the transport likes it."""
        require_room()  # what arrives meanwhile must not be taken in by half
        self._shared.transport.wait(done, block)  # another one's in a forked child

    def _wake(self) -> None:
        self._shared.transport.wake()

    def sync(self, sink: WaitingCaller) -> Any:
        """Waits for a sink's outcome; gives the call up if something ends the wait itself."""
        try:
            return sink.result(self._shared.transport.wait)
        except BaseException:
            if sink.is_waiting and not self.cancel_where(lambda each: leads_to(each, sink)):
                sink.abandon(self._shared.references.adopt)
            raise

    def fetch(self, rref: RRef[Any], owner: WorkerInfo, timeout: float) -> Any:
        """Asks the owner of a value for a copy, and waits."""
        sink = WaitingCaller()
        held, here.held = here.held, True
        try:
            self.request(Operation.FETCH, owner, (), timeout, sink, b"", "to_here", through=rref)
            return self.sync(sink)
        finally:
            here.held = held
            if here.due and not held:
                raise_due()

    # --- Replies

    def reply(self, sender: Life, frame: Frame) -> None:
        """Matches a reply to its call and hands it to the call's sink."""
        _, number, header, payload, tensors = frame
        reply = BARE_REPLY if header == BARE_REPLY_HEADER else Reply.decode(header)
        size = len(header) + len(payload)
        if tensors:
            size += tensor_bytes(tensors)
        with self._lock:
            ended = self._table.close(number, sender.worker)
            self._processing += 1
            if ended is not None:
                ending, call = ended
                series = call.series
                if ending is _REPLIED:
                    series.over.append((self._now() - call.opened_at, call.sent, size))
                    if len(series.over) >= MOST_UNCOUNTED:
                        series.count()
                    if reply.status is _ERROR:
                        series.failed(ErrorKind.REMOTE)
                else:
                    series.received_late(size)
        shared = self._shared
        try:
            if ended is not None:
                if call.loan.passed:
                    shared.references.call_ended(call.loan)
                if ending is _REPLIED:
                    call.sink.replied(reply, frame, partial(self._unpack, call))
                elif reply.references:
                    shared.references.adopt(reply.references)
        finally:
            with self._lock:
                self._processing -= 1
            if shared.shutdown.awaits_quiet:
                shared.shutdown.activity_changed()

    def _unpack(self, call: Call, reply: Reply, frame: Frame, decode: Decode) -> Any:
        payload, tensors = frame.payload, frame.tensors
        if reply.status is _ERROR and type(payload) is not Unreceived:
            raise decode_error(bytes(payload))
        references, replace = self._shared.references, None
        adopted = references.nothing_adopted
        if reply.references:
            adopted = references.adopt(reply.references)
        if reply.extensions:
            on_reply = self._shared.extensions.on_reply
            replace = partial(on_reply, call.to, call.extensions, reply.extensions)
        return packing.unpack(payload, reply.tensor_table, tensors, adopted, replace, decode)


def _described(
    func: object, args: Sequence[Any], kwargs: dict[str, Any], error: EncodeError
) -> EncodeError:
    """The same error, which says what part of the call cannot be sent."""
    name = text_of(method_name(func, args))
    if func is call_method:
        args = args[2:]
    return EncodeError(codec.describe_unpicklable(name, func, args, kwargs, error))
