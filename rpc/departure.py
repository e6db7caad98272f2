"""Leaving the group: the I/O half of ``termination``, for one agent."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from rpc.control import ControlMessage, Leaving, Probe, Quiet, Ready
from rpc.errors import RpcError, RpcTimeoutError
from rpc.executor import in_handler
from rpc.termination import (
    AnswerWhenQuiet,
    Effect,
    Enter,
    Finished,
    Phase,
    Tell,
    Termination,
)

if TYPE_CHECKING:
    from rpc.agent import Agent

_logger = logging.getLogger("rpc")


class Departure:
    """How one agent leaves its group."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._machine = Termination(agent.info.id, {agent.info.id})
        self._todo: deque[Effect] = deque()
        self._answering = False
        self._probed = False
        self._finished = threading.Event()
        self._closing = False
        self._alone = False
        self._changed = threading.Condition()
        self.leaks: list[str] = []
        self.release: Callable[[], None] = agent.references.release_all_users

    def leave_together(self, timeout: float) -> None:
        """Waits until the whole group is done; ``timeout`` in seconds, 0 or ``inf`` for none.

        Raises:
            RpcTimeoutError: names the workers that were still waited for.
        """
        timeout = min(timeout, threading.TIMEOUT_MAX)
        with self._lock:
            self._todo += self._machine.begin()
        self._perform()
        if not self._finished.wait(timeout or None):
            raise RpcTimeoutError(self._timed_out(timeout))

    def refuse_in_handler(self) -> None:
        """Changes nothing.

        Raises:
            RpcError: called from a handler, which leaving in peace would wait for.
        """
        if in_handler() and not self._agent.is_expelled:
            raise RpcError(
                "shutdown(graceful=True) was called in a handler, which it would wait for; "
                "call it in the main program"
            )

    def leave_alone(self, timeout: float) -> None:
        """Waits until this worker is quiet, whatever the others do, and lets go of its references.

        Args:
            timeout: seconds, 0 or ``inf`` for none.

        Raises:
            RpcTimeoutError: calls were still under way.
        """
        timeout = min(timeout, threading.TIMEOUT_MAX)
        deadline = time.monotonic() + timeout if timeout else None
        with self._changed:
            self._alone = True
            while not self._quiet():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise RpcTimeoutError(
                        f"shutdown: calls were still under way after {timeout:.2f} seconds"
                    )
                self._changed.wait(left)
        self.release()

    def _timed_out(self, timeout: float) -> str:
        with self._lock:
            leader = self._machine.leader
            missing = self._machine.missing()
        group = self._agent.group
        if leader != self._agent.info.id:
            name = group.peer(leader).info.name
            return f"shutdown: the leader {name!r} did not answer within {timeout:.2f} seconds"
        names = [group.peer(worker).info.name for worker in missing]
        return f"Followers {names} timed out in _all_gather after {timeout:.2f} seconds"

    def worker_joined(self, worker_id: int) -> None:
        """A worker joined: it has to be waited for too."""
        with self._lock:
            self._todo += self._machine.joined(worker_id)
        self._perform()

    def worker_lost(self, worker_id: int) -> None:
        """A worker is gone: it is not waited for any more."""
        with self._lock:
            self._todo += self._machine.lost(worker_id)
        self._perform()

    def expects_departures(self) -> bool:
        """True when workers that go are nothing to warn of."""
        return self._closing or self._machine.phase > Phase.DRAIN

    def closing(self) -> None:
        """This worker closes, whatever the others do."""
        self._closing = True

    def control_arrived(self, sender: int, message: ControlMessage) -> bool:
        """Handles a message about shutting down; False if it is about something else."""
        if not isinstance(message, Ready | Probe | Quiet | Leaving):
            return False
        with self._lock:
            self._todo += self._machine.receive(sender, message)
        self._perform()
        return True

    def activity_changed(self) -> None:
        """Answers the leader's probe if this worker has become quiet."""
        if self._probed:
            self._answer_if_quiet()
        if self._alone:
            with self._changed:
                self._changed.notify_all()

    def _answer_if_quiet(self) -> None:
        agent = self._agent
        if not self._quiet():
            return
        activity = agent.caller.sent() + agent.callee.handled()
        sent, received = agent.notices.totals()
        with self._lock:
            if not self._probed:
                return
            self._probed = False
            self._todo += self._machine.quiet(activity, sent, received)
        self._perform()

    def _quiet(self) -> bool:
        agent = self._agent
        return (
            agent.caller.quiet()
            and agent.callee.quiet()
            and agent.completions.quiet()
            and agent.references.quiet()
        )

    def _perform(self) -> None:
        """Works off effects, in order, on one thread at a time."""
        while True:
            with self._lock:
                if self._answering or not self._todo:
                    return
                self._answering = True
                effect = self._todo.popleft()
            try:
                self._perform_one(effect)
            finally:
                with self._lock:
                    self._answering = False

    def _perform_one(self, effect: Effect) -> None:
        agent = self._agent
        if isinstance(effect, Tell):
            if effect.to == agent.info.id:
                with self._lock:
                    self._todo += self._machine.receive(effect.to, effect.message)
            else:
                agent.notices.tell(agent.group.life(effect.to), effect.message)
        elif isinstance(effect, AnswerWhenQuiet):
            self._probed = True
            self._answer_if_quiet()
        elif isinstance(effect, Enter):
            self._enter(effect.phase)
        elif isinstance(effect, Finished):
            self._finished.set()

    def _enter(self, phase: Phase) -> None:
        if phase is Phase.RELEASE:
            self.release()
        elif phase is Phase.CLOSE:
            self.leaks = self._agent.references.leaks()
