"""Tells user code who joined the group, left it, was lost or returned.

Owns the callbacks and the order of events: each callback gets all events that
happen after it was added, one after the other, never on a thread of the transport.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rpc.wire.callables import require_callable
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")


class MembershipChange(enum.Enum):
    """The things that can happen to a worker, as the others see it."""

    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """Something happened to a worker.

    Args:
        change: what.
        worker: to whom.
        incarnation: to which life of it.
        reason: why it left or was lost; empty otherwise.
    """

    change: MembershipChange
    worker: WorkerInfo
    incarnation: int
    reason: str = ""


Callback = Callable[[MembershipEvent], object]


@dataclass(frozen=True, slots=True, eq=False)
class _Subscription:
    """One of perhaps several of a callback."""

    callback: Callback


class MembershipEvents:
    """The callbacks of one worker.

    Args:
        submit: runs a task soon, on a thread that it may block.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        self._lock = threading.Lock()
        self._subscriptions: list[_Subscription] = []
        self._queue: deque[tuple[MembershipEvent, list[_Subscription]]] = deque()
        self._running = False

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Adds a callback; what it raises is logged. Returns what removes it again."""
        require_callable("callback", callback)
        subscription = _Subscription(callback)
        with self._lock:
            self._subscriptions = [*self._subscriptions, subscription]

        def unsubscribe() -> None:
            with self._lock:
                others = [each for each in self._subscriptions if each is not subscription]
                self._subscriptions = others

        return unsubscribe

    def announce(self, event: MembershipEvent) -> None:
        """Calls the callbacks with an event."""
        with self._lock:
            if not self._subscriptions:
                return
            self._queue.append((event, self._subscriptions))
            if self._running:
                return
            self._running = True
        self._submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._running = False
                    return
                event, subscriptions = self._queue.popleft()
            for subscription in subscriptions:
                try:
                    subscription.callback(event)
                except BaseException:  # such as SystemExit, which ends nothing here
                    _logger.exception("a callback of on_membership failed for %s", event)
