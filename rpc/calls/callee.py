"""The serving side of a worker: which requests it serves, and where each of them runs.

Owns nothing that outlives a request, but the outcomes of those that may come again.
Handlers run on the handler executor, FETCH and extension messages on the system executor,
so that a slow user function never holds up the framework's own traffic. How one request
is served is ``service``'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from functools import partial
from typing import Any

from rpc.calls.call_parts import CallParts
from rpc.calls.outcome import Outcome
from rpc.calls.service import Service
from rpc.errors import FrameError
from rpc.ids import Life
from rpc.observe import tracing
from rpc.observe.metrics import MOST_UNCOUNTED, Book, CallMetrics, ErrorKind
from rpc.observe.names import UNDECODED, text_of
from rpc.protocol.cancellation import EarlyCancellations
from rpc.protocol.retry import IdempotencyTable, RequestId, Verdict
from rpc.runtime.event_loop import EventLoop
from rpc.runtime.executor import Executor
from rpc.transports.base import Frame
from rpc.wire import codec
from rpc.wire.messages import FUNCTION_LENGTH_AT, REQUEST_FIXED_BYTES, Operation, Request

_logger = logging.getLogger("rpc")

_LENGTH_AT = FUNCTION_LENGTH_AT
_MOST_HEADERS = 4096
_CALL = Operation.CALL
_USER_CODE = (Operation.CALL, Operation.METHOD, Operation.CREATE)
_SECONDS_TO_LET_GO = 5.0


class Callee:
    """Serves requests for one worker.

    Args:
        shared: with the other parts of the worker's calls.
        executor: runs user code.
        system_executor: runs everything else.
        event_loop: runs ``async def`` handlers.

    Attributes:
        names: in which module, as what, to find the functions that were called by name.
        waking: the lock of who is to be woken when a request is cancelled; of all requests,
            as few handlers wait for anything that can be.
    """

    def __init__(
        self,
        shared: CallParts,
        executor: Executor,
        system_executor: Executor,
        event_loop: EventLoop,
    ) -> None:
        self.shared = shared
        self.executor = executor
        self.event_loop = event_loop
        self._early = shared.early
        self.names: dict[bytes, tuple[str, str]] = {}
        self.waking = threading.Lock()
        self._system_executor = system_executor
        self._living = shared.group.living_now
        self._now = shared.clock.now
        self._lock = threading.Lock()
        self._serving: dict[Service, float] = {}
        self._book = Book()
        self._cancelled_early = EarlyCancellations()
        self._once: IdempotencyTable[Service, Outcome] = IdempotencyTable()
        self._headers: dict[bytes, Request] = {}
        self._lets_go = False
        self._handled = 0

    def take_request(
        self, sender: Life, frame: Frame, in_batch: bool = False, was_kept: bool = False
    ) -> None:
        """Starts serving a request; called on the transport's thread.

        Args:
            sender: the caller.
            frame: the request.
            in_batch: see ``transports.base.Receiver``.
            was_kept: it came while the group was being made known, and waits no more.
        """
        early = self._early
        if (
            early.held is not None
            and not was_kept
            and early.keep(partial(self.take_request, sender, frame, in_batch=True, was_kept=True))
        ):
            return
        header = frame[2]
        try:
            end = REQUEST_FIXED_BYTES + header[_LENGTH_AT] + (header[_LENGTH_AT + 1] << 8)
            request, table = self._headers.get(header[:end]), header[end:]
            if request is None:
                request, table = self._decode(header, end)
        except (FrameError, IndexError) as error:
            _logger.error("dropped a message from %s: %s", sender, error)
            return
        service = Service(self, sender, request, table, frame)
        now = self._now()
        if request.timeout:
            service.deadline = now + request.timeout
        with self._lock:
            known = self._living.get(sender[0]) == sender
            if known:  # else it would not be found by ``worker_lost``, if that came
                self._serving[service] = now
                cancelled = self._cancelled_early
                if cancelled.noted and cancelled.take(sender.worker, frame.correlation):
                    service.cancelled = True
        if not known:
            self.shared.refused(sender)
            return
        executor = self.executor if request.operation in _USER_CODE else self._system_executor
        inline = 0 if in_batch else self.shared.transport.inline_handlers
        task = service.run
        if request.operation is _CALL and not request.references:  # nothing is to be adopted
            task = partial(service.serve, self.shared.references.lending.nothing_adopted)
        executor.run_here(task, inline)

    def _decode(self, header: bytes, end: int) -> tuple[Request, bytes]:
        """Reads a header whose beginning, up to ``end``, was not met before; and its table.

        Raises:
            FrameError: it is none.
        """
        request = Request.decode(header)
        if request.target or request.extensions or request.references:
            return request, request.tensor_table
        if len(self._headers) >= _MOST_HEADERS:
            self._headers.clear()
        self._headers[header[:end]] = request._replace(tensor_table=b"")
        return request, request.tensor_table

    def find(self, function: bytes) -> Any:
        """The function of a name, imported if need be.

        Raises:
            DecodeError: there is none on this worker.
        """
        module, _, attribute = function.decode("utf-8", "replace").partition("\0")
        found = codec.find(function)
        if len(self.names) >= _MOST_HEADERS:
            self.names.clear()
        self.names[function] = (module, attribute)
        return found

    def cancel(self, caller: Life, correlations: Collection[int]) -> None:
        """Cancels requests whose replies nobody waits for any more."""
        sender = caller.worker
        with self._lock:
            if self._living.get(sender) != caller:  # a later life counts its requests anew
                return
            named = [s for s in self._serving if s.is_one_of(sender, correlations)]
            missing = {*correlations} - {service.correlation for service in named}
            self._cancelled_early.note(sender, missing)
            numbers = {service.number for service in named} - {0}
            if numbers:  # another attempt at one of them may be the one that runs
                like = [s for s in self._serving if s.sender == sender and s.number in numbers]
                named = [*{*named, *like}]
        for service in named:
            service.cancel()

    def worker_lost(self, sender: int) -> None:
        """Cancels what is served for a worker that is gone."""
        with self._lock:
            self._cancelled_early.worker_lost(sender)
            let_go = self._once.worker_lost(sender)
            theirs = [service for service in self._serving if service.sender == sender]
            for service in theirs:  # nobody has to wait for them, not even a shutdown
                del self._serving[service]
        self._release(let_go)
        for service in theirs:
            service.orphaned = True
            service.cancel()

    def admit(self, service: Service, request: RequestId) -> bool:
        """True if a request that may come more than once is to be run now.

        Its outcome is for all attempts at it, so it has as long as the last of them.
        """
        let_go: list[Outcome] = []
        with self._lock:
            now = self._now()
            service.number = request.number
            verdict, outcome, since = Verdict.OVER, None, self._serving.get(service)
            if since is not None:  # else its caller is gone: a later life counts anew
                service.deadline = since + request.seconds if request.seconds else 0.0
                verdict, outcome, let_go = self._once.arrived(service.sender, request, service, now)
        self._release(let_go)
        if outcome is not None:
            service.answer(outcome)
        elif verdict is Verdict.OVER:
            service.give_up()
        return verdict is Verdict.RUN

    def ended_once(self, service: Service, result: object, error: BaseException | None) -> None:
        """Answers all arrivals of a request that may come more than once, as it ran."""
        outcome = Outcome(service.method, result, error)
        with self._lock:
            waiters = self._once.ended(service.sender, service.number, service, outcome)
            is_first, self._lets_go = not self._lets_go, True
        if is_first:
            self._let_go_in_time()
        for waiter in waiters or [service]:
            if waiter is service:
                waiter.answer(outcome)
            else:
                tracing.apart(waiter.answer, outcome)

    def _let_go_in_time(self) -> None:
        """Frees the outcomes of repeatable requests that are over; comes back for the others."""
        now = self._now()
        with self._lock:
            let_go = self._once.expire(now)
            self._lets_go = len(self._once) > 0
        self._release(let_go)
        if self._lets_go:
            self.shared.timers.at(now + _SECONDS_TO_LET_GO, self._let_go_in_time)

    def _release(self, outcomes: list[Outcome]) -> None:
        """Drops outcomes on a thread where their destructors may make calls."""
        if not all(outcome.runs_no_code() for outcome in outcomes):
            self.shared.completions.submit(outcomes.clear)

    def finished(self, service: Service) -> None:
        """Notes that the reply to a request was sent, or need not be."""
        service.deadline = 0.0  # what it left running does nothing on the caller's behalf
        now, name = self._now(), service.method
        if name is UNDECODED:
            name = service.name
        with self._lock:
            since = self._serving.pop(service, now)
            self._handled += 1
            series = self._book[name, service.sender]
            series.over.append((now - since, service.sent, service.received))
            if len(series.over) >= MOST_UNCOUNTED:
                series.count()
            if service.failed:
                series.failed(ErrorKind.REMOTE)
        if service.request.extensions:
            tracing.served(since, now, service.failed)
        if self.shared.shutdown.awaits_quiet:
            self.shared.shutdown.activity_changed()

    def leaving(self, service: Service) -> None:
        """Completes the record of a traced request, whose reply is about to be sent."""
        now = self._now()
        with self._lock:
            since = self._serving.get(service, now)
        tracing.served(since, now, service.failed)

    def quiet(self) -> bool:
        """True if no request is being served."""
        with self._lock:
            return not self._serving

    def handled(self) -> int:
        """Requests served so far."""
        return self._handled

    def kept_outcomes(self) -> int:
        """Outcomes of requests with a number that are kept for further attempts."""
        with self._lock:
            return len(self._once)

    def metrics(self) -> tuple[CallMetrics, ...]:
        """The requests served, by method and peer."""
        peer = self.shared.group.peer
        with self._lock:
            rows = [(self._book[s.name, s.sender], 0) for s in self._serving]
            return self._book.read(rows, lambda i: peer(i).info.name)

    def serving(self) -> list[dict[str, Any]]:
        """A dump of the requests being served."""
        now = self._now()
        with self._lock:
            rows = list(self._serving.items())
        return [
            {
                "operation": s.request.operation.name,
                "call": text_of(s.name),
                "from": s.sender,
                "age": now - since,
                "cancelled": s.cancelled,
            }
            for s, since in rows
        ]
