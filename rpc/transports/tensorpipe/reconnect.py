"""Sees to the broken pipes of one worker, until each is replaced or its peer given up.

Owns a thread that runs while something is broken: it lets torch open another pipe,
asks the peer to go on there, and calls again with what the peer lacks, in order.
What is to be done when is ``tensorpipe_ledger``'s to decide; what a peer that was
given up means, the transport's.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rpc.runtime.threads import Thread
from rpc.transports.base import Frame
from rpc.transports.tensorpipe.address import Address
from rpc.transports.tensorpipe.caller import Caller
from rpc.transports.tensorpipe.ledger import Mending, Step
from rpc.transports.tensorpipe.links import Link
from rpc.transports.tensorpipe.torch_agent import (
    PipeBrokenError,
    TorchAgent,
    error_of,
    nobody_listens,
)

if TYPE_CHECKING:
    from torch._C import _distributed_rpc as torch_rpc

_log = logging.getLogger(__name__)


class Hands(Protocol):
    """The transport, which takes answers and loses peers."""

    def came_back(self, link: Link, kind: int, frame: Frame) -> None:
        """A call was taken, but its answer was lost with the pipe."""

    def give_up(self, link: Link, reason: str) -> None:
        """A pipe broke and is not replaced."""

    def mended(self) -> None:
        """A pipe was replaced. Called with the lock held."""


@dataclass(slots=True, eq=False)
class _Case:
    """A broken pipe, and the routes of the attempts to replace it."""

    link: Link
    mending: Mending
    routes: dict[int, torch_rpc.WorkerInfo] = field(default_factory=dict)


class Mender:
    """The mending of one worker's pipes.

    Args:
        name: of the thread.
        lock: guards the links, and this.
        agent: opens pipes.
        caller: calls.
        hands: does the rest.
    """

    def __init__(
        self, name: str, lock: threading.Lock, agent: TorchAgent, caller: Caller, hands: Hands
    ) -> None:
        self._name = name
        self._lock = lock
        self._changed = threading.Condition(lock)
        self._agent = agent
        self._caller = caller
        self._hands = hands
        self._cases: list[_Case] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def broke(self, link: Link, attempt: int, reason: str) -> None:
        """A pipe broke: another is to take its place, or the peer is given up."""
        with self._lock:
            if link.broken or not link.is_whole(attempt):
                return
            mending = None
            if not self._closed and not nobody_listens(reason):
                mending = link.mend(time.monotonic(), reason)
            if mending is not None:
                self._cases.append(_Case(link, mending))
                self._changed.notify_all()
        if mending is not None:
            try:
                self._begin_to_serve()
            except RuntimeError as error:
                reason, mending = f"{reason}, and cannot be opened again: {error}", None
        if mending is None:
            self._hands.give_up(link, f"its connection broke: {reason}")

    def _begin_to_serve(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed or not self._cases:
                return
            thread = Thread(target=self._serve, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def look(self) -> None:
        """Something was heard about an attempt. Needs the lock."""
        self._changed.notify_all()

    def _serve(self) -> None:
        while (order := self._next()) is not None:
            case, step, attempt = order
            try:
                if step is Step.TRY:
                    self._try(case, attempt)
                elif step is Step.GO_ON:
                    self._go_on(case, attempt)
                else:
                    self._give_up(case)
            except Exception as error:
                _log.exception("%s could not go on with %r", self._name, case.link.peer.info)
                self._hands.give_up(case.link, f"its connection broke: {error}")

    def _next(self) -> tuple[_Case, Step, int] | None:
        """Waits for something to do; None if nothing is broken any more."""
        with self._lock:
            while not self._closed:
                self._cases = [each for each in self._cases if each.link.mending is each.mending]
                if not self._cases:
                    break
                now = time.monotonic()
                for case in self._cases:
                    step = case.mending.step(now)
                    if step is not Step.WAIT:
                        return case, step, self._begin(case, step, now)
                self._changed.wait(min(case.mending.patience(now) for case in self._cases))
            self._thread = None
            return None

    def _begin(self, case: _Case, step: Step, now: float) -> int:
        """Needs the lock; returns the number of the attempt that is meant."""
        if step is Step.TRY:
            return case.mending.begin(now)
        if case.mending.agreed is not None:
            return case.mending.agreed[0]
        return case.link.epoch.attempt

    def _try(self, case: _Case, attempt: int) -> None:
        link = case.link
        address = Address.decode(link.peer.address)
        request = self._caller.request_to_resume(attempt, address.life)
        try:
            route = self._agent.reach(link.name, address.url.encode(), link.replies)
            case.routes[attempt] = route
            answer = self._agent.tell(route, request, [])
        except RuntimeError as error:
            self._heard(case, attempt, str(error))
        else:
            answer.add_done_callback(partial(self._answered, case, attempt))

    def _answered(self, case: _Case, attempt: int, answer: Any) -> None:
        self._heard(case, attempt, error_of(answer))

    def _heard(self, case: _Case, attempt: int, problem: str) -> None:
        """An attempt ended. If the peer agreed, or refused, that was told before."""
        with self._lock:
            if not problem:
                if case.mending.is_pending(attempt):
                    case.mending.end("somebody else answers at its address")
            elif nobody_listens(problem):
                case.mending.end("nobody listens at its address any more")
            else:
                case.mending.failed(attempt, time.monotonic(), problem)
            self._changed.notify_all()

    def _go_on(self, case: _Case, attempt: int) -> None:
        link, route = case.link, case.routes[attempt]
        with self._lock:
            if link.mending is not case.mending or case.mending.agreed is None:
                return
            link.begin_pipe(attempt)
            back = link.calls.settle(case.mending.agreed[1])
        try:
            self._caller.open_lifeline(link, route, attempt)
            for kind, frame in back:
                self._hands.came_back(link, kind, frame)
            self._call_again(link, route, attempt)
        except PipeBrokenError as error:
            self.broke(link, attempt, str(error))

    def _call_again(self, link: Link, route: torch_rpc.WorkerInfo, attempt: int) -> None:
        """Makes all calls that wait, also those that come meanwhile; then nobody waits any more."""
        done = 0
        while True:
            with self._lock:
                if link.broken or not link.is_whole(attempt):
                    return
                calls = link.calls.after(done)
                if not calls:
                    link.route = route
                    self._hands.mended()
                    return
            for number, call in calls:
                self._caller.call_again(link, route, attempt, number, call)
            done = calls[-1][0]

    def _give_up(self, case: _Case) -> None:
        reason = f"its connection broke: {case.link.epoch.reason}, and {case.mending.hopeless}"
        self._hands.give_up(case.link, reason)

    def close(self) -> None:
        """Stops, and joins the thread; what is still broken stays so."""
        with self._lock:
            self._closed = True
            self._cases.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
