"""The serving side of a worker: runs what other workers ask for and replies.

Owns nothing that outlives a request. Handlers run on the handler executor,
FETCH and extension messages on the system executor, so that a slow user
function never holds up the framework's own traffic. A handler may be a plain
function, one marked with ``functions.async_execution`` or an ``async def``.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from rpc import deadlines, packing
from rpc.messages import Operation, Reply, Request, Status
from rpc.reference_keeper import Adopted
from rpc.remote_errors import encode_error
from rpc.rref import call_method
from rpc.transports.base import Frame, FrameKind

if TYPE_CHECKING:
    from rpc.agent import Agent

_ASYNC_MARK = "_wrapped_async_rpc_function"


class Callee:
    """Serves requests for one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._serving: dict[int, tuple[str, int, float]] = {}
        self._next = 0
        self._handled = 0

    def request_arrived(self, sender: int, frame: Frame) -> None:
        """Starts serving a request; called on the transport's thread."""
        request = Request.decode(frame.header)
        service = _Service(self._agent, self, sender, frame.correlation, request)
        with self._lock:
            self._next += 1
            service.token = self._next
            self._serving[service.token] = (request.operation.name, sender, self._agent.clock.now())
        user_code = request.operation in (Operation.CALL, Operation.CREATE)
        executor = self._agent.executor if user_code else self._agent.system_executor
        agent = self._agent

        def task() -> None:
            service.run(frame)

        if agent.transport.runs_handlers:
            executor.run_here(task)
        else:
            executor.submit(task)

    def finished(self, token: int) -> None:
        """The reply to a request was sent, or need not be."""
        with self._lock:
            self._serving.pop(token, None)
            self._handled += 1
        self._agent.activity_changed()

    def quiet(self) -> bool:
        """True if no request is being served."""
        with self._lock:
            return not self._serving

    def handled(self) -> int:
        """Requests served so far."""
        return self._handled

    def serving(self) -> list[dict[str, Any]]:
        """A dump of the requests being served."""
        now = self._agent.clock.now()
        with self._lock:
            rows = list(self._serving.values())
        return [{"operation": op, "from": sender, "age": now - since} for op, sender, since in rows]


class _Service:
    """One request, from its arrival to its reply."""

    __slots__ = ("_agent", "_callee", "_correlation", "_request", "_sender", "token")

    def __init__(
        self, agent: Agent, callee: Callee, sender: int, correlation: int, request: Request
    ) -> None:
        self._agent = agent
        self._callee = callee
        self._sender = sender
        self._correlation = correlation
        self._request = request
        self.token = 0

    def run(self, frame: Frame) -> None:
        """Adopts the references, and goes on when the owners have confirmed them."""
        request = self._request
        if request.operation is Operation.CREATE:
            self._agent.references.creation_arrived(self._sender, request.target)
        adopted = self._agent.references.adopt(request.references)
        if adopted.pending:
            context = contextvars.copy_context()
            executor = self._agent.executor
            adopted.when_confirmed(
                lambda: executor.submit(lambda: context.run(self._serve, frame, adopted))
            )
        else:
            self._serve(frame, adopted)

    def _serve(self, frame: Frame, adopted: Adopted) -> None:
        with ExitStack() as scopes:
            try:
                if self._request.operation is Operation.FETCH:
                    self._fetch(adopted, scopes)
                elif self._request.operation is Operation.EXTENSION:
                    self._extension(frame, adopted)
                else:
                    self._call(frame, adopted, scopes)
            except BaseException as error:
                self._fail(error)

    def _call(self, frame: Frame, adopted: Adopted, scopes: ExitStack) -> None:
        request = self._request
        if request.timeout:
            deadlines.inherit(self._agent.clock.now() + request.timeout)
        func, args, kwargs = packing.unpack(
            frame.payload,
            request.tensor_table,
            frame.tensors,
            adopted,
            self._agent.extensions.on_request(self._sender, request.extensions, scopes)
            if request.extensions
            else None,
        )
        del adopted, frame
        if func is call_method:
            func, args, kwargs = call_method(*args, **kwargs)
        result = func(*args, **kwargs)
        if hasattr(func, _ASYNC_MARK):
            self._finish_with_future(result)
        elif inspect.iscoroutine(result):
            self._agent.event_loop.run(result, self._succeed, self._fail)
        else:
            self._succeed(result)

    def _finish_with_future(self, future: object) -> None:
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {type(future).__name__}"
            )
        context = contextvars.copy_context()
        executor = self._agent.executor

        def completed(done: Any) -> None:
            executor.submit(lambda: context.run(self._settle, done.value, self._fail))

        future.add_done_callback(completed)

    def _settle(self, value: Callable[[], object], fail: Callable[[BaseException], None]) -> None:
        try:
            result = value()
        except BaseException as error:
            fail(error)
        else:
            self._succeed(result)

    def _fetch(self, adopted: Adopted, scopes: ExitStack) -> None:
        request = self._request
        if request.extensions:
            self._agent.extensions.on_request(self._sender, request.extensions, scopes)([])
        rref = adopted.handles[0]
        self._agent.references.require_usable(rref._holding)
        slot = rref._holding.value
        assert slot is not None
        context = contextvars.copy_context()
        executor = self._agent.system_executor
        if slot.done():
            self._settle(slot.value, self._reply_error)
        else:
            slot.when_done(
                lambda done: executor.submit(
                    lambda: context.run(self._settle, done.value, self._reply_error)
                )
            )

    def _extension(self, frame: Frame, adopted: Adopted) -> None:
        request = self._request
        body, tensors = packing.unpack(
            frame.payload, request.tensor_table, frame.tensors, adopted, None
        )
        extension = self._agent.extensions.load(request.target.decode())
        answer = extension.on_message(self._sender, body, list(tensors))
        if isinstance(answer, bytes):
            self._succeed(answer)
        else:
            executor = self._agent.system_executor
            answer.add_done_callback(
                lambda done: executor.submit(lambda: self._settle(done.value, self._reply_error))
            )

    def _succeed(self, result: object) -> None:
        try:
            if self._request.operation is Operation.CREATE:
                self._agent.references.created(self._request.target, result)
                self._send(Reply(Status.OK))
            else:
                self._reply(result)
        except BaseException as error:
            self._fail(error)

    def _reply(self, result: object) -> None:
        agent = self._agent
        attach = None
        if self._request.extensions:
            attach = agent.extensions.attach_reply(self._sender, self._request.extensions)
        packed = packing.pack(result, self._sender, agent.references, attach, borrow=False)
        reply = Reply(
            Status.OK, packed.plain, packed.extensions, packed.loan.table, packed.tensor_table
        )
        try:
            self._send(reply, packed.payload, packed.slots)
        except BaseException as error:
            agent.references.unsent(packed.loan, str(error))
            raise

    def _fail(self, error: BaseException) -> None:
        """Reports an error of the user's function: here, and to the caller."""
        _print_traceback(error)
        if self._request.operation is Operation.CREATE:
            self._agent.references.creation_raised(self._request.target, error)
            self._send_quietly(Reply(Status.OK))
        else:
            self._reply_error(error)

    def _reply_error(self, error: BaseException) -> None:
        self._send_quietly(Reply(Status.ERROR), encode_error(error, self._agent.info))

    def _send_quietly(self, reply: Reply, payload: bytes = b"") -> None:
        """Sends what must not fail again; a caller that is gone needs no reply."""
        try:
            self._send(reply, payload)
        except RuntimeError:
            self._callee.finished(self.token)

    def _send(
        self,
        reply: Reply,
        payload: bytes = b"",
        slots: tuple[torch.Tensor, ...] = (),
    ) -> None:
        frame = Frame(FrameKind.REPLY, self._correlation, reply.encode(), payload, slots)
        self._agent.transport.send(self._sender, frame)
        self._callee.finished(self.token)


def _print_traceback(error: BaseException) -> None:
    traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
