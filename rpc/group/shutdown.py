"""Leaving the group: the I/O half of ``termination``, for one agent."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rpc.errors import RpcError, RpcTimeoutError
from rpc.group.members import Group
from rpc.ids import Life
from rpc.protocol.termination import (
    AnswerWhenQuiet,
    Effect,
    Enter,
    Finished,
    Phase,
    Tell,
    Termination,
)
from rpc.runtime.clock import Clock
from rpc.runtime.executor import is_replaced_while_waiting
from rpc.runtime.timers import Timers
from rpc.runtime.wait_log import WaitLog
from rpc.wire.control import ControlMessage, Leaving, Probe, Quiet, Ready
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")
_MOST_NAMED = 3
_SECONDS_OF_SILENCE = 5.0
_SECONDS_BEFORE_TRYING_AGAIN = 0.5


class LeavingWorker(Protocol):
    """The worker that leaves, as far as its shutdown uses it."""

    is_expelled: bool
    """True if the others declared it lost."""

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""

    @property
    def group(self) -> Group:
        """The workers that it knows."""

    @property
    def clock(self) -> Clock:
        """Its time."""

    @property
    def timers(self) -> Timers:
        """Runs what is due later."""

    def tell(self, to: Life, message: ControlMessage) -> None:
        """Sends a control message at once."""

    def work(self) -> Work:
        """Counts what it has made, served and sent so far."""

    def is_quiet(self) -> bool:
        """True if nothing is under way: no call, no callback, no news of references."""

    def under_way(self) -> list[str]:
        """Names what keeps it from being quiet, one by one."""

    def leaks(self) -> list[str]:
        """Its values that others still use."""

    def release_references(self) -> None:
        """Makes its references unusable and tells the owners."""


@dataclass(frozen=True, slots=True)
class Work:
    """Counters by which a group finds out that nothing is under way in it.

    Args:
        activity: calls made and served.
        sent: control messages sent that count, by worker.
        received: those that were received and dealt with.
    """

    activity: int
    sent: dict[int, int]
    received: dict[int, int]


class GroupShutdown:
    """The shutdown by which one agent leaves its group.

    Args:
        agent: the worker.
        decides: makes what decides.

    Attributes:
        machine: what decides.
    """

    def __init__(self, agent: LeavingWorker, decides: type[Termination] = Termination) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self.machine = decides(agent.info.id, {agent.info.id})
        self._todo: deque[Effect] = deque()
        self._answering = False
        self._probed = False
        self.awaits_quiet = False
        """True if somebody waits until nothing is under way here, to be told of every end."""
        self._will_speak = False
        self._asked_by: int | None = None
        self._finished = threading.Event()
        self._closing = False
        self._closed = False
        self._alone = False
        self._changed = threading.Condition()
        self.leaks: list[str] = []
        self.release: Callable[[], None] = agent.release_references

    def leave_together(self, timeout: float) -> None:
        """Waits until the whole group is done; ``timeout`` in seconds, 0 or ``inf`` for none.

        Returns, too, when another thread has closed this worker meanwhile.

        Raises:
            RpcTimeoutError: names the calls that were still under way here, or else the workers
                that were still waited for, as far as this one knows them.
        """
        timeout = min(timeout, threading.TIMEOUT_MAX)
        self.begin()
        if not self._finished.wait(timeout or None):
            raise RpcTimeoutError(self._timed_out(timeout))

    def begin(self) -> None:
        """Notes that the program is ready to leave with the whole group."""
        with self._lock:
            self._todo += self.machine.begin()
        self._perform()

    def refuse_in_handler(self) -> None:
        """Raises in a handler, which leaving in peace would wait for; else does nothing.

        Raises:
            RpcError: called from a handler, which leaving in peace would wait for.
        """
        if is_replaced_while_waiting() and not self._agent.is_expelled:
            raise RpcError(
                "shutdown(graceful=True) was called in a handler, which it would wait for; "
                "call it in the main program"
            )

    def leave_alone(self, timeout: float) -> None:
        """Waits until this worker is quiet, whatever the others do, and lets go of its references.

        Returns, too, when another thread has closed this worker meanwhile.

        Args:
            timeout: seconds, 0 or ``inf`` for none.

        Raises:
            RpcTimeoutError: calls were still under way; names them.
        """
        log = WaitLog(time.monotonic())
        deadline = log.began + (timeout or math.inf)
        self._alone = self.awaits_quiet = True
        while not self._is_quiet_before(min(log.next_at(), deadline)):
            now = time.monotonic()
            if now >= deadline:
                raise RpcTimeoutError(self._still_under_way(timeout))
            if log.is_due(now):
                _logger.warning(
                    "shutdown of %r has waited %.0f s for calls under way%s",
                    self._agent.info.name, now - log.began, self._under_way(),
                )  # fmt: skip
        if not self._closed:  # else what is current by now may be another session's
            self.release()

    def _is_quiet_before(self, end: float) -> bool:
        """Waits until this worker is quiet, or was closed; False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or self._agent.is_quiet(), max(end - time.monotonic(), 0.0)
            )

    def _timed_out(self, timeout: float) -> str:
        with self._lock:
            leader = self.machine.leader
            missing = self.machine.missing()
            was_asked = self._asked_by == leader
        group, me = self._agent.group, self._agent.info.id
        if not self._agent.is_quiet() and (leader != me or missing == [me]):
            return self._still_under_way(timeout)
        if leader == me:
            names = [group.peer(worker).info.name for worker in missing]
            return f"Followers {names} timed out in _all_gather after {timeout:.2f} seconds"
        name = group.peer(leader).info.name
        if was_asked:
            return (
                f"shutdown: the group was not done after {timeout:.2f} seconds; this worker was, "
                f"and the leader {name!r} still had to hear so from others"
            )
        return (
            f"shutdown: the leader {name!r} did not answer within {timeout:.2f} seconds; "
            "it does when every worker has called shutdown"
        )

    def _still_under_way(self, timeout: float) -> str:
        what = self._under_way()
        return f"shutdown: calls were still under way here after {timeout:.2f} seconds{what}"

    def _speak_in(self, seconds: float) -> None:
        agent = self._agent
        agent.timers.at(agent.clock.now() + seconds, partial(self._speak_up, seconds))

    def _speak_up(self, seconds: float) -> None:
        """Logs, again and again, what of this worker the whole group waits for."""
        with self._lock:
            speaks = self._will_speak = self._probed and not self._closing
        if speaks:
            _logger.warning(
                "shutdown: every worker has called it and waits for calls under way on %r%s",
                self._agent.info.name,
                self._under_way(),
            )
            self._speak_in(2 * seconds)

    def _under_way(self) -> str:
        """Names what keeps this worker from being quiet, to be put at the end of a sentence."""
        named = self._agent.under_way()
        rest = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return ": " + ", ".join(named[:_MOST_NAMED]) + rest if named else ""

    def worker_joined(self, worker_id: int) -> None:
        """Has the shutdown wait for a worker that joined, too."""
        with self._lock:
            self._todo += self.machine.joined(worker_id)
        self._perform()

    def worker_lost(self, worker_id: int) -> None:
        """Has the shutdown wait no more for a worker that is gone."""
        with self._lock:
            self._todo += self.machine.lost(worker_id)
        self._perform()

    def expects_departures(self) -> bool:
        """True when workers that go are nothing to warn of."""
        return self._closing or self.machine.phase > Phase.DRAIN

    @property
    def is_closing(self) -> bool:
        """True if this worker closes by now."""
        return self._closing

    def closing(self) -> None:
        """Notes that this worker closes, whatever the others do."""
        self._closing = True

    def closed(self) -> None:
        """Notes that this worker has closed; nobody need wait to leave it in peace any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._finished.set()

    def control_arrived(self, sender: int, message: ControlMessage) -> bool:
        """Handles a message about shutting down; False if it is about something else."""
        if not isinstance(message, Ready | Probe | Quiet | Leaving):
            return False
        with self._lock:
            self._todo += self.machine.receive(sender, message)
        self._perform()
        return True

    def activity_changed(self) -> None:
        """Answers the leader's probe if this worker has become quiet."""
        if self._probed:
            self.answer_if_quiet()
        if self._alone:
            with self._changed:
                self._changed.notify_all()

    def answer_if_quiet(self) -> None:
        """Answers the leader's question if nothing is under way here."""
        agent = self._agent
        if not agent.is_quiet():
            return
        leaks, work = agent.leaks(), agent.work()
        with self._lock:
            if not self._probed:
                return
            self._probed, self.awaits_quiet = False, self._alone
            # Those of the last answer count: until this worker closes, others leave, and with
            # them what they hold.
            self.leaks = leaks
            self._todo += self.machine.quiet(work.activity, work.sent, work.received)
        self._perform()

    def _perform(self) -> None:
        """Works off effects, in order, on one thread at a time; each stays until it is done."""
        while True:
            with self._lock:
                if self._answering or not self._todo:
                    return
                self._answering = True
                effect = self._todo[0]
            try:
                self.carry_out(effect)
                self._todo.popleft()
            except Exception:  # such as no memory: without this step the others would wait for ever
                _logger.exception(
                    "%r could not take a step of leaving the group, and will try again",
                    self._agent.info.name,
                )
                self._try_again()
                return
            finally:
                with self._lock:
                    self._answering = False

    def _try_again(self) -> None:
        agent = self._agent
        agent.timers.at(agent.clock.now() + _SECONDS_BEFORE_TRYING_AGAIN, self._perform)

    def carry_out(self, effect: Effect) -> None:
        """Does one thing that was decided."""
        agent = self._agent
        if isinstance(effect, Tell):
            if effect.to == agent.info.id:
                with self._lock:
                    self._todo += self.machine.receive(effect.to, effect.message)
            else:
                agent.tell(agent.group.life(effect.to), effect.message)
        elif isinstance(effect, AnswerWhenQuiet):
            with self._lock:
                self._asked_by = self.machine.leader
            self._probed = self.awaits_quiet = True
            self.answer_if_quiet()
            if self._probed and not self._will_speak:
                self._will_speak = True
                self._speak_in(_SECONDS_OF_SILENCE)
        elif isinstance(effect, Enter):
            if effect.phase is Phase.RELEASE:
                self.release()
        elif isinstance(effect, Finished):
            self._finished.set()
