"""One request that a worker serves, from its arrival until its reply is sent.

Adopts the references that came with it, runs what it asks for, and replies. A handler may
be a plain function, one marked with ``functions.async_execution`` or an ``async def``.
Which requests there are, and which of several like ones runs, is ``callee``'s.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler

from rpc.calls import packing
from rpc.calls.extension_set import Scopes, leave, require_future
from rpc.calls.handler_errors import print_traceback, tell_in_a_line, why_given_up
from rpc.calls.suspension import Suspension
from rpc.errors import (
    AgentClosedError,
    CallCancelledError,
    RemoteError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.ids import GlobalId, Life, new_tuple
from rpc.observe.metrics import tensor_bytes
from rpc.observe.names import UNDECODED, MethodName, announced_name, method_name, text_of
from rpc.observe.spans import profiler_enabled, run_handler, traced
from rpc.outcomes.slot import Slot
from rpc.protocol.retry import RequestId
from rpc.rrefs.rref import call_method
from rpc.rrefs.transfer import NOTHING_LENT, Adopted
from rpc.runtime import deadlines, streams
from rpc.runtime.text import repr_of
from rpc.transports.base import Frame, FrameKind, Unreceived
from rpc.wire import codec
from rpc.wire.control import PASSED_BYTES
from rpc.wire.kept_errors import keep
from rpc.wire.messages import (
    BARE_REPLY,
    BARE_REPLY_HEADER,
    Extensions,
    Operation,
    Reply,
    Request,
    Status,
)
from rpc.wire.remote_errors import encode_error, raisable, refuse_as_torch_does
from rpc.wire.script_functions import explained
from rpc.wire.simple_values import (
    NOT_SIMPLE,
    decode_simple,
    encode_constant,
    encode_simple,
)
from rpc.wire.tensor_table import pack_tensors, pack_tied_tensors

if TYPE_CHECKING:
    from rpc.calls.callee import Callee
    from rpc.calls.outcome import Outcome

_logger = logging.getLogger("rpc")

_ASYNC_MARK = "_wrapped_async_rpc_function"
_GIVEN_UP = (asyncio.CancelledError, CallCancelledError)
_NOBODY_THERE = (AgentClosedError, UnknownWorkerError, WorkerLostError)
_CALL, _EXTENSION, _REPLY = Operation.CALL, Operation.EXTENSION, FrameKind.REPLY
_NOWHERE = ("", "")


class Service:
    """One request, from its arrival to its reply.

    Args:
        callee: serves it.
        caller: the life of a worker that asks.
        request: its header.
        table: the table of its tensors.
        frame: the rest of it.
    """

    __slots__ = (
        "_callee",
        "_caller",
        "_creates",
        "_payload",
        "_stop",
        "_table",
        "_tensors",
        "_waking",
        "cancelled",
        "correlation",
        "deadline",
        "failed",
        "method",
        "number",
        "orphaned",
        "received",
        "request",
        "sender",
        "sent",
    )

    def __init__(
        self, callee: Callee, caller: Life, request: Request, table: bytes, frame: Frame
    ) -> None:
        self._callee = callee
        _, self.correlation, header, payload, tensors = frame
        self._payload = payload
        self._tensors = tensors
        self._table = table
        self._creates: GlobalId | None = None
        self._caller = caller
        self.sender = caller.worker
        self.request = request
        self.method: MethodName = UNDECODED
        self.received = len(header) + len(payload)
        if tensors:
            self.received += tensor_bytes(tensors)
        self.sent = 0
        self.number = 0
        self.failed = False
        self.deadline = 0.0
        self.cancelled = False
        self.orphaned = False
        self._stop: Callable[[], None] | None = None
        self._waking: tuple[Callable[[], None], ...] = ()

    @property
    def name(self) -> MethodName:
        """The name of what it asks for, if that is known yet."""
        return announced_name(self.request) if self.method is UNDECODED else self.method

    def is_one_of(self, sender: int, correlations: Collection[int]) -> bool:
        """True if this serves one of a worker's requests."""
        return self.sender == sender and self.correlation in correlations

    def cancel(self) -> None:
        """Cancels this request, as nobody waits for the reply any more."""
        with self._callee.waking:
            self.cancelled = True
            waking, self._waking = self._waking, ()
        stop = self._stop
        if stop is not None:
            stop()
        for wake in waking:
            wake()

    def when_cancelled(self, wake: Callable[[], None]) -> Callable[[], None]:
        """See :class:`rpc.runtime.deadlines.Scope`."""
        with self._callee.waking:
            cancelled = self.cancelled
            if not cancelled:
                self._waking += (wake,)
        if cancelled:
            wake()

        def undo() -> None:
            with self._callee.waking:
                self._waking = tuple(each for each in self._waking if each is not wake)

        return undo

    def run(self) -> None:
        """Adopts the references, and goes on when the owners have confirmed them."""
        request, references = self.request, self._callee.shared.references
        if request.operation is Operation.CREATE:
            self._creates = references.creations.arrived(self._caller, request.target)
        adopted = references.lending.nothing_adopted
        if request.references:
            adopted = references.lending.adopt(request.references)
        if not adopted.pending:
            self.serve(adopted)
            return
        context = contextvars.copy_context()
        submit = self._callee.executor.submit

        def go_on() -> None:
            submit(lambda: context.run(self.serve, adopted))

        adopted.when_confirmed(go_on)

    def serve(self, adopted: Adopted) -> None:
        """Runs what is asked for, and replies; all references have been taken in."""
        operation, extensions = self.request.operation, self.request.extensions
        try:
            if not extensions:
                if operation is _CALL and not self.request.target:
                    self._call(adopted, None, None)
                else:
                    self._serve_in(None, adopted)
                return
            scopes: Scopes = []
            try:
                self._serve_in(scopes, adopted)
            except BaseException as error:
                if scopes:
                    leave(scopes, error)
                raise
            if scopes:
                leave(scopes, None)
        except BaseException as error:
            self._report(
                self._reply_error if operation is Operation.EXTENSION else self._fail, error
            )

    def _report(self, tell: Callable[[BaseException], None], error: BaseException) -> None:
        """Replies with an error and ends, even if the error cannot be told."""
        try:
            tell(error)
        except BaseException:
            with suppress(BaseException):  # where the log goes may be broken, too
                _logger.exception("%s failed, and so did telling why", text_of(self.name))
            me = self._callee.shared.me
            told = RemoteError(f"the call failed on {me}, and so did telling why")
            if self.number:
                self._callee.ended_once(self, None, told)
            else:
                self._reply_error(told)

    def _serve_in(self, scopes: Scopes | None, adopted: Adopted) -> None:
        operation = self.request.operation
        if operation is Operation.FETCH:
            self._fetch(scopes)
        elif operation is Operation.EXTENSION:
            self._extension(adopted, scopes)
        else:
            value = None
            if operation is Operation.METHOD:
                value = self._callee.shared.references.creations.place_of(self.request.target)
                if not value.done():
                    again = self._later(lambda _: self.serve(adopted))
                    self._suspend(value.when_done, again, value.forget)
                    return
            # The id of a request that may come more than once, but is to run once; or nothing.
            once = self.request.target
            if operation is not Operation.CALL:
                once = once[PASSED_BYTES:]
            if not once or self._callee.admit(self, RequestId.decode(once)):
                self._call(adopted, scopes, value)

    def answer(self, outcome: Outcome) -> None:
        """Replies with what a function returned or raised, maybe for another request."""
        self.method = outcome.method
        if outcome.error is not None:
            self._reply_error(outcome.error)
            return
        try:
            if self.request.operation is Operation.CREATE:
                self._reply_created(outcome.result)
            else:
                self._reply(outcome.result)
        except BaseException as error:
            self._reply_error(error)

    def _unpack(self, adopted: Adopted, scopes: Scopes | None) -> Any:
        payload, table, tensors = self._payload, self._table, self._tensors
        bare = not table and not self.request.references and scopes is None
        if bare and type(payload) is not Unreceived:
            value = decode_simple(payload, (), ())
            if value is not NOT_SIMPLE:
                self._payload = b""
                return value
        replace = None
        if scopes is not None:
            on_request = self._callee.shared.extensions.on_request
            replace = partial(on_request, self.sender, self.request.extensions, scopes)
        value = packing.unpack(payload, table, tensors, adopted, replace)
        self._payload, self._tensors = b"", ()  # the handler owns them now
        return value

    def _call(self, adopted: Adopted, scopes: Scopes | None, value: Slot | None) -> None:
        deadlines.enter(self)
        callee, given_up = self._callee, self.cancelled
        if given_up or 0.0 < self.deadline <= callee.shared.clock.now():
            self.give_up()
            return
        function = self.request.function
        kwargs: Any = {}  # any mapping, as the caller gave it
        if value is None and function:
            module, attribute = callee.names.get(function, _NOWHERE)
            func = getattr(sys.modules.get(module), attribute, None) or callee.find(function)
            args = self._unpack(adopted, scopes)
            self.method = function
        elif value is None:
            func, args, kwargs = self._unpack(adopted, scopes)
            self.method = method_name(func, args)
        else:
            func, args, kwargs = self._method_of(value, adopted, scopes)
        if func is call_method:
            self.method = method_name(func, args)
            func, args, kwargs = call_method(*args, **kwargs)
        del adopted, value
        try:
            if (
                profiler._is_profiler_enabled
                or profiler_enabled()
                or traced() is not None
                or (scopes is not None and callee.shared.extensions.observers)
            ):
                result = self._run_observed(partial(func, *args, **kwargs))
            else:
                result = func(*args, **kwargs)
        except TypeError as error:
            refuse_as_torch_does(func, error)
            raise
        del args, kwargs
        if getattr(func, _ASYNC_MARK, None) is not None:
            self._finish_with_future(result)
        elif type(result) is CoroutineType:
            self._stop = callee.event_loop.run(result, self._succeed, self._fail)
            if self.cancelled:
                self._stop()
        else:
            self._succeed(result)

    def _method_of(self, value: Slot, adopted: Adopted, scopes: Scopes | None) -> Any:
        """The method of a value that is called, its arguments, and those it takes by name."""
        args = self._unpack(adopted, scopes)
        kwargs: Any = {}  # or any mapping
        if type(args) is list:
            args, kwargs = args
        name = self.request.function.decode()
        self.method = f"RRef.{name}"
        return getattr(value.value(), name), args, kwargs

    def _run_observed(self, run: Callable[[], Any]) -> Any:
        shared, name = self._callee.shared, text_of(self.method)
        caller = shared.group.peer(self.sender).info
        looking_on = shared.extensions.observers if self.request.extensions else ()
        return run_handler(shared.clock.now, caller, shared.me.name, name, run, looking_on)

    def _finish_with_future(self, future: object) -> None:
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {type(future).__name__}"
            )
        # Unlike its value(), a done future's wait() has this thread's streams wait, too.
        if future.done():  # by the function itself, so without another thread
            self._settle(future.wait, self._fail)
            return
        settle = self._later(lambda done: self._settle(done.wait, self._fail))
        self._suspend(future.add_done_callback, settle)

    def _place(self) -> Slot:
        """The place of the value that the request asks for, or whose method it calls."""
        return self._callee.shared.references.creations.place_of(self.request.target)

    def _later(self, go_on: Callable[[Any], None]) -> Callable[[Any], object]:
        """``go_on`` as a callback that leaves it to a handler thread, in this context."""
        context, submit = contextvars.copy_context(), self._callee.executor.submit
        return lambda done: submit(lambda: context.run(go_on, done))

    def _at_once(self, fail: Callable[[BaseException], None]) -> Callable[[Any], object]:
        """A callback that settles this where it is called, in this context."""
        context = contextvars.copy_context()
        return lambda done: context.run(self._settle, done.value, fail)

    def _suspend(
        self,
        when_done: Callable[[Callable[[Any], None]], object],
        go_on: Callable[[Any], object],
        forget: Callable[[Callable[[Any], None]], object] | None = None,
    ) -> None:
        """Goes on when something is done, unless the caller gives the request up before that.

        What is never done then keeps nothing: neither this nor a shutdown waits for it.

        Args:
            when_done: takes what is to be called when it is done.
            go_on: called then.
            forget: undoes ``when_done``, if that can be.
        """
        suspension = Suspension(go_on, self.give_up, forget)
        self._stop = suspension.stop
        when_done(suspension.resume)
        if self.cancelled:
            suspension.stop()

    def _settle(self, value: Callable[[], object], fail: Callable[[BaseException], None]) -> None:
        try:
            result = value()
        except BaseException as error:
            fail(error)
        else:
            self._succeed(result)

    def _fetch(self, scopes: Scopes | None) -> None:
        self.method = "to_here"
        if scopes is not None:
            extensions = self._callee.shared.extensions
            extensions.on_request(self.sender, self.request.extensions, scopes, [])
        slot = self._place()
        if slot.done():
            self._settle(slot.value, self._reply_error)
            return
        # Whoever fills the slot is a handler, which may as well encode the replies.
        self._suspend(slot.when_done, self._at_once(self._reply_error), slot.forget)

    def _extension(self, adopted: Adopted, scopes: Scopes | None) -> None:
        request = self.request
        self.method = f"{request.target.decode()} message"
        extensions = self._callee.shared.extensions
        if scopes is not None:
            extensions.on_request(self.sender, request.extensions, scopes, [])
        body, *tensors = self._unpack(adopted, None)
        extension = extensions.load(request.target.decode())
        answer_it = partial(extension.on_message, self.sender, body, tensors)
        is_watched = scopes is not None and extensions.observers
        answer = self._run_observed(answer_it) if is_watched else answer_it()
        if isinstance(answer, bytes | tuple):
            self._succeed(answer)
        else:
            require_future(extension.name, answer)
            self._suspend(answer.add_done_callback, self._at_once(self._reply_error))

    def _succeed(self, result: object) -> None:
        try:
            if self._creates is not None:
                self._callee.shared.references.creations.created(self._creates, result)
                result = encode_constant(result)  # all that outlives the reference
            if self.number:
                self._callee.ended_once(self, result, None)
            elif self._creates is not None:
                self._reply_created(result)
            else:
                self._reply(result)
        except BaseException as error:
            self._fail(error)

    def _reply_created(self, constant: object) -> None:
        """Tells that the function of a ``remote()`` ran, and what it made if that is small."""
        assert isinstance(constant, bytes)
        reply = Reply(Status.OK, extensions=self._metadata(()))
        try:
            self._send(reply, constant)
        except _NOBODY_THERE as error:
            self._drop_reply(error)

    def _metadata(self, tensors: tuple[torch.Tensor, ...]) -> Extensions:
        """The metadata from extensions for a reply that carries no value."""
        extensions = self.request.extensions
        if not extensions:
            return ()
        return self._callee.shared.extensions.attach_reply(self.sender, extensions, tensors, None)

    def _reply(self, result: object) -> None:
        if self.orphaned:  # a later life of the caller must not get it
            self._callee.finished(self)
            return
        if self.cancelled and not self.number:  # the caller only wants to hear that it is over
            self._send_quietly(Reply(Status.OK))
            return
        encoded = encode_simple(result) or codec.encode_any(result)
        payload, tensors, references, plain, _ = encoded
        reply, loan = BARE_REPLY, NOTHING_LENT
        slots: tuple[torch.Tensor, ...] = ()
        if tensors or references or not plain or self.request.extensions:
            shared, request, attach = self._callee.shared, self.request, None
            if request.extensions:
                attach = partial(shared.extensions.attach_reply, self.sender, request.extensions)
            extensions, loan, table, slots = packing.pack(
                encoded,
                self.sender,
                shared.references,
                shared.host_moves,
                attach,
                borrow=False,
                # Of gradients, each is its receiver's own.
                lower=pack_tensors if request.operation is _EXTENSION else pack_tied_tensors,
            )
            reply = new_tuple(Reply, (Status.OK, plain, extensions, loan.table, table))
        try:
            self._send(reply, payload, slots)
        except BaseException as error:
            self._callee.shared.references.lending.unsent(loan, str(error))
            if not isinstance(error, _NOBODY_THERE):
                raise
            self._drop_reply(error)

    def _fail(self, error: BaseException) -> None:
        """Reports an error of the user's function to the caller, and in one line here.

        Whoever asked for an object may never look at it, so there the traceback is printed.
        """
        if self.cancelled and issubclass(type(error), _GIVEN_UP):
            self.give_up()
            return
        self.failed = True
        if self._ended_by_shutdown(error):
            pass
        elif self._creates is not None:
            print_traceback(error, self._callee.shared.me)
        else:
            tell_in_a_line(error, self._callee.shared.me, text_of(self.name), self.sender)
        if self._creates is not None or self.number:
            keep(error)
        if self._creates is not None:
            self._callee.shared.references.creations.raised(self._creates, raisable(error))
            if self.number:
                self._callee.ended_once(self, b"", None)
            else:
                self._send_quietly(Reply(Status.OK))
        elif self.number:
            self._callee.ended_once(self, None, error)
        else:
            self._reply_error(error)

    def give_up(self) -> None:
        """Ends a request that nobody waits for any more, and of which nothing runs."""
        error = why_given_up(text_of(self.name), self.request.timeout, self.cancelled)
        if self._creates is not None:
            self._callee.shared.references.creations.raised(self._creates, error)
        if self.number:
            self._callee.ended_once(self, None, error)
        else:
            self._reply_error(error)

    def _ended_by_shutdown(self, error: BaseException) -> bool:
        """True if it says only that this worker closes: the caller is to learn that as a loss."""
        # Of its type: an error's class may answer for its attributes, or raise.
        return issubclass(type(error), AgentClosedError) and self._callee.shared.shutdown.is_closing

    def _reply_error(self, error: BaseException) -> None:
        self.failed = True
        if self._ended_by_shutdown(error):
            self._drop_reply(error)
            return
        told = encode_error(explained(error), self._callee.shared.me)
        self._send_quietly(Reply(Status.ERROR, plain=False), told)

    def _send_quietly(self, reply: Reply, payload: bytes = b"") -> None:
        """Sends what must not fail again; a caller that is gone needs no reply."""
        try:
            self._send(reply, payload)
        except _NOBODY_THERE as error:
            self._drop_reply(error)
        except BaseException as error:
            self._send_in_short(error)

    def _send_in_short(self, failure: BaseException) -> None:
        """Tells a caller that waits at least why its reply cannot be sent, such as for its size."""
        info = self._callee.shared.me
        told = RemoteError(f"the reply of {info} cannot be sent: {repr_of(failure)}")
        try:
            self._send(Reply(Status.ERROR, plain=False), encode_error(told, info))
        except BaseException as error:
            self._drop_reply(error)

    def _drop_reply(self, error: BaseException) -> None:
        """Ends a request whose caller is gone, or who learns from our end what became of it."""
        _logger.debug("no reply to %s by worker %d: %s", text_of(self.method), self.sender, error)
        self._callee.finished(self)

    def _send(
        self,
        reply: Reply,
        payload: bytes = b"",
        slots: tuple[torch.Tensor, ...] = (),
    ) -> None:
        if self.orphaned:
            raise UnknownWorkerError(f"the life of worker {self.sender} that asked is over")
        header = BARE_REPLY_HEADER if reply is BARE_REPLY else reply.encode()
        self.sent = len(header) + len(payload)
        if slots:
            self.sent += tensor_bytes(slots)
            streams.leave_tensors(slots)  # another thread may send, or send again
        frame = new_tuple(Frame, (_REPLY, self.correlation, header, payload, slots))
        if self.request.extensions and traced() is not None:
            # Whoever gets the reply may ask for the records at once.
            self._callee.leaving(self)
        self._callee.shared.transport.send(self.sender, frame)
        self._callee.finished(self)
