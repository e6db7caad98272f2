"""The backward passes that one worker takes part in, started here or elsewhere.

Finds or makes the driver of a pass, moves its requests over the worker, and
forgets passes that are over: each request of a root says which is its oldest
pass that is not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from autograd_dist.contexts import ContextTable, DistAutogradContext
from autograd_dist.errors import UnknownContextError
from autograd_dist.failure import Failure
from autograd_dist.grad_fields import GradFields
from autograd_dist.home import Home
from autograd_dist.local_engine import LocalPass
from autograd_dist.pass_driver import PassDriver, Payload
from autograd_dist.passes import Ack, Gradients, Participant, PassId, Request, Returned
from autograd_dist.profiled import PASS, in_span, profiler_enabled
from autograd_dist.sequels import Sequels
from autograd_dist.wire import (
    EXTENSION_NAME,
    AckMessage,
    PassMessage,
    encode_ack,
    encode_request,
    gather,
    spread,
)
from rpc.errors import AgentClosedError, CallCancelledError
from rpc.extend import is_cancelled, new_tuple, when_cancelled

if TYPE_CHECKING:
    from rpc import Future
    from rpc.extend import Answer, Worker


Token = dict[str, "Answer | Future[Answer]"]
"""The place of the answer to a request, or of the future that waits for it; first come."""

_ANSWER = "answer"
Driver = PassDriver[Token]


class _OfContext:
    """The passes of one context."""

    __slots__ = ("drivers", "oldest", "started")

    def __init__(self) -> None:
        self.drivers: dict[PassId, Driver] = {}
        self.oldest: dict[int, int] = {}
        self.started: set[int] = set()

    def end_before(self, root: int, oldest: int) -> list[Driver]:
        """Notes the oldest pass of a root that is not over; removes and returns older ones."""
        oldest = self.oldest[root] = max(oldest, self.oldest.get(root, 0))
        if not self.drivers:
            return []
        over = [p for p in self.drivers if p.root == root and p.number < oldest]
        return [self.drivers.pop(pass_id) for pass_id in over]


_GIVEN_UP = Failure("a backward pass was run in a handler that its caller gave up")

_NO_PASSES = _OfContext()
"""The passes of a context of which none is known; to look at only."""


class BackwardPasses:
    """The passes of one worker.

    Args:
        worker: sends.
        contexts: of this worker.
        grad_fields: of this worker.

    Attributes:
        sequels: what this worker does when its gradients of a pass are complete.
    """

    def __init__(
        self,
        worker: Worker,
        contexts: ContextTable,
        grad_fields: GradFields,
    ) -> None:
        self._worker = worker
        self._me = worker.info.id
        self._contexts = contexts
        self._grad_fields = grad_fields
        self.sequels = Sequels()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._passes: dict[int, _OfContext] = {}
        self._closed = False

    def run(
        self,
        context_id: int,
        roots: Sequence[torch.Tensor],
        retain_graph: bool,
        sequel: bytes = b"",
    ) -> int:
        """Runs a pass from roots here, to its end; returns how many workers ran the sequel.

        Raises:
            BackwardError: it failed, here or on another worker; a
                ``WorkerLostInBackwardError`` if a worker was lost.
            BaseException: what code here raised, if that is no ``Exception``.
            CallCancelledError: the caller of the handler that this is called in gave it up.
            UnknownContextError: there is no such context here.
        """
        context = self._contexts.get(context_id) or self._contexts.find(context_id)
        pass_id: PassId = new_tuple(PassId, (context_id, self._me, next(self._numbers)))
        home: Home[Failure | None] = Home(self._worker)
        driver = self._make_driver(context, pass_id, retain_graph, home.close, sequel)
        driver.home = home
        forget = when_cancelled(lambda: driver.failed(_GIVEN_UP))
        try:
            self._begin(driver)
            if profiler_enabled():
                error = in_span(PASS, _to_the_end, driver, home, roots)
            else:
                driver.start(roots)
                error = home.work()
        finally:
            forget()
            self._end(driver)
        if error is not None:
            raise _as_raised(error, driver.take_cause())
        return driver.stepped if sequel else 0

    def request_arrived(
        self, sender: int, message: PassMessage, tensors: Sequence[torch.Tensor]
    ) -> Future[Answer] | Answer:
        """Takes a request of a pass; the result is its acknowledgement.

        Args:
            sender: who asks.
            message: what.
            tensors: its gradients, if it has any.

        Raises:
            AgentClosedError: this worker let go of the context, which is not over.
        """
        driver = self._driver_for(message)
        if driver is None:
            if self._closed:
                raise AgentClosedError("this worker shut down")
            return encode_ack(Ack())
        gradients = None
        if isinstance(message.request, Gradients):
            gradients = spread(message.present, tensors)
        token: Token = {}
        driver.received(token, message.request, gradients, sender)
        if _ANSWER in token:
            return token[_ANSWER]
        return token.setdefault(_ANSWER, self._worker.future("an acknowledgement of gradients"))

    def close(self) -> None:
        """Refuses, from now on, requests of contexts that are dropped, as they may not be over."""
        self._closed = True

    def drop(self, context_id: int, error: Exception) -> None:
        """Ends the passes of a context that is over."""
        with self._lock:
            passes = self._passes.pop(context_id, _NO_PASSES)
        for driver in passes.drivers.values():
            driver.drop(error)

    def root_lost(self, worker_id: int) -> None:
        """Forgets the passes that a lost worker started."""
        with self._lock:
            lost = [
                passes.drivers.pop(pass_id)
                for passes in self._passes.values()
                for pass_id in list(passes.drivers)
                if pass_id.root == worker_id
            ]
        for driver in lost:
            driver.abandon()

    def running(self) -> int:
        """Passes started here that are not over."""
        with self._lock:
            return sum(len(passes.started) for passes in self._passes.values())

    # --- What drivers ask (``pass_driver.Wire``)

    def send(self, driver: Driver, to: int, request: Request, payload: Payload | None) -> None:
        """Sends a request of a pass; its reply is the acknowledgement."""
        try:
            present, tensors = gather(payload or [])
            pass_id = driver.pass_id
            with self._lock:
                passes = self._passes.get(pass_id.context_id, _NO_PASSES)
                # The oldest pass of the root that is not over, as far as is known here.
                if pass_id.root == self._me:
                    oldest = min(passes.started, default=pass_id.number)
                else:
                    oldest = passes.oldest.get(pass_id.root, 0)
            message = encode_request(
                pass_id, oldest, request, driver.retain_graph, present, driver.sequel
            )
            for gradient in tensors:
                if not gradient.is_cpu:
                    tensors = sendable(tensors, self._worker.device_map(to))
                    break
            home = driver.home
            self._worker.ask(
                to,
                EXTENSION_NAME,
                message,
                tensors,
                partial(self._answered, driver),
                awaited=home is not None and home.thread == threading.get_ident(),
            )
        except BaseException as error:  # whoever waits for the pass need not be on this thread
            driver.raised(error, f"gradients for worker {to} cannot be sent: ")

    def acknowledge(self, token: Token, ack: Ack, returned: Returned | None) -> None:
        """Replies to a request of a pass; if that cannot be done, with why."""
        answer: Answer
        try:
            if returned is None:
                answer = encode_ack(ack)
            else:
                present, tensors = gather(returned.payload)
                answer = encode_ack(ack, returned.message_id, present), *tensors
        except BaseException as error:  # as above
            why = Failure.of(self._me, error, "gradients cannot be acknowledged: ")
            answer = encode_ack(Ack(error=why))
        awaited = token.setdefault(_ANSWER, answer)
        if awaited is not answer and not isinstance(awaited, bytes | tuple):
            awaited.set_result(answer)

    def later(self, work: Callable[[], None]) -> None:
        """Does what takes long where it keeps nothing from being delivered."""
        self._worker.run_soon(work)

    def _answered(self, driver: Driver, answer: Answer, error: Exception | None) -> None:
        try:
            if error is not None:
                raise error
            body, *tensors = (answer,) if isinstance(answer, bytes) else answer
            (ack, message_id, present), returned = AckMessage.decode(body), None
            if present is not None:
                returned = Returned(message_id, spread(present, tensors))
        except Exception as error:
            driver.failed(Failure.of(self._me, error))
        else:
            driver.acknowledged(ack, returned)

    # --- Bookkeeping

    def _make_driver(
        self,
        context: DistAutogradContext,
        pass_id: PassId,
        retain_graph: bool,
        finished: Callable[[Failure | None], None],
        sequel: bytes = b"",
    ) -> Driver:
        participant: Participant[Payload, Token] = Participant(
            self._me, pass_id.root, context.workers
        )

        make_local = partial(
            LocalPass,
            context.context_id,
            context.sends(),
            context.leaves,
            grad_fields=self._grad_fields,
            retain_graph=retain_graph,
        )
        return PassDriver(
            pass_id,
            self._me,
            participant,
            make_local,
            self,
            finished,
            retain_graph=retain_graph,
            sequel=sequel,
            run_sequel=partial(self.sequels.run, context=context),
        )

    def _begin(self, driver: Driver) -> None:
        pass_id = driver.pass_id
        with self._lock:
            # Within the lock, so that a release that comes now finds the pass.
            if self._contexts.get(pass_id.context_id) is None:
                raise UnknownContextError(pass_id.context_id)
            passes = self._passes.get(pass_id.context_id)
            if passes is None:
                passes = self._passes[pass_id.context_id] = _OfContext()
            passes.drivers[pass_id] = driver
            passes.started.add(pass_id.number)

    def _end(self, driver: Driver) -> None:
        pass_id = driver.pass_id
        with self._lock:
            passes = self._passes.get(pass_id.context_id)
            if passes is not None:
                passes.drivers.pop(pass_id, None)
                passes.started.discard(pass_id.number)
        driver.abandon()

    def _driver_for(self, message: PassMessage) -> Driver | None:
        """The driver of the pass a request belongs to; None if the pass is over."""
        pass_id = message.pass_id
        with self._lock:
            # Within the lock, so that a release that comes now finds what is made here.
            context_id = pass_id.context_id
            context = self._contexts.get(context_id) or self._contexts.join(context_id)
            if context is None:
                return None
            passes = self._passes.get(context_id)
            if passes is None:
                passes = self._passes[context_id] = _OfContext()
            over = passes.end_before(pass_id.root, message.oldest)
            driver = passes.drivers.get(pass_id)
            is_over = pass_id.root == self._me or passes.oldest[pass_id.root] > pass_id.number
            if driver is None and not is_over:
                driver = self._make_driver(
                    context, pass_id, message.retain_graph, _never_called, message.sequel
                )
                passes.drivers[pass_id] = driver
        for finished in over:
            finished.abandon()
        return driver


def _to_the_end(
    driver: Driver, home: Home[Failure | None], roots: Sequence[torch.Tensor]
) -> Failure | None:
    driver.start(roots)
    return home.work()


def sendable(
    gradients: Sequence[torch.Tensor], device_map: Mapping[torch.device, torch.device]
) -> list[torch.Tensor]:
    """Gradients as they can be sent: by way of host memory where no map says how.

    A tensor that came by the sender's map has a gradient that goes the other way, for which
    this worker need not have a map. At the other end each is moved to the device of its tensor.

    Args:
        gradients: on any devices.
        device_map: of this worker, for the receiver.
    """
    return [each if each.is_cpu or each.device in device_map else each.cpu() for each in gradients]


def _as_raised(failure: Failure, cause: BaseException | None) -> BaseException:
    """The error for the caller of a pass that failed: SystemExit and the like as they are."""
    if cause is not None and not isinstance(cause, Exception):
        return cause
    if is_cancelled():
        return CallCancelledError(_GIVEN_UP.text)
    error = failure.as_error()
    error.__cause__ = cause
    return error


def _never_called(error: Failure | None) -> None:
    """Raises: only a pass's root is told that it finished."""
