"""Leaving the group: the I/O half of ``termination``, for one agent."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rpc.errors import RpcError, RpcTimeoutError
from rpc.protocol.termination import (
    AnswerWhenQuiet,
    Effect,
    Enter,
    Finished,
    Phase,
    Tell,
    Termination,
)
from rpc.runtime.executor import is_replaced_while_waiting
from rpc.wire.control import ControlMessage, Leaving, Probe, Quiet, Ready

if TYPE_CHECKING:
    from rpc.agent import Agent

_logger = logging.getLogger("rpc")
_MOST_NAMED = 3
_SECONDS_OF_SILENCE = 10.0
_SECONDS_BEFORE_TRYING_AGAIN = 0.5


class Departure:
    """How one agent leaves its group."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._machine = Termination(agent.info.id, {agent.info.id})
        self._todo: deque[Effect] = deque()
        self._answering = False
        self._probed = False
        self._will_speak = False
        self._asked_by: int | None = None
        self._finished = threading.Event()
        self._closing = False
        self._closed = False
        self._alone = False
        self._changed = threading.Condition()
        self.leaks: list[str] = []
        self.release: Callable[[], None] = agent.references.release_all_users

    def leave_together(self, timeout: float) -> None:
        """Waits until the whole group is done; ``timeout`` in seconds, 0 or ``inf`` for none.

        Returns, too, when another thread has closed this worker meanwhile.

        Raises:
            RpcTimeoutError: names the calls that were still under way here, or else the workers
                that were still waited for, as far as this one knows them.
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
        timeout = min(timeout, threading.TIMEOUT_MAX)
        deadline = time.monotonic() + timeout if timeout else None
        with self._changed:
            self._alone = True
            while not (self._closed or self._quiet()):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise RpcTimeoutError(self._still_under_way(timeout))
                self._changed.wait(left)
            if self._closed:  # what is current by now may be another session's
                return
        self.release()

    def _timed_out(self, timeout: float) -> str:
        with self._lock:
            leader = self._machine.leader
            missing = self._machine.missing()
            was_asked = self._asked_by == leader
        group, me = self._agent.group, self._agent.info.id
        if not self._quiet() and (leader != me or missing == [me]):
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
        """Says what the whole group waits for if that is still here, and will again."""
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
        """What keeps this worker from being quiet, to be put at the end of a sentence."""
        named = self._what_is_under_way()
        rest = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return ": " + ", ".join(named[:_MOST_NAMED]) + rest if named else ""

    def _what_is_under_way(self) -> list[str]:
        """The same one by one; like calls are named once."""
        agent = self._agent

        def name(worker: int) -> str:
            return repr(agent.group.peer(worker).info.name)

        served, made = agent.callee.serving(), agent.caller.outstanding()
        calls = [f"{row['call']} called by {name(row['from'])}" for row in served]
        calls += [f"{row['call']} called on {name(row['to'])}" for row in made]
        others = (
            (agent.caller, "calls that were given up and not answered"),
            (agent.references, "notices of references"),
            (agent.completions, "callbacks of futures"),
        )
        # The first of them only: what asks may itself run where callbacks do.
        return list(dict.fromkeys(calls)) or [w for part, w in others if not part.quiet()][:1]

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

    @property
    def is_closing(self) -> bool:
        """Whether this worker closes by now."""
        return self._closing

    def closing(self) -> None:
        """This worker closes, whatever the others do."""
        self._closing = True

    def closed(self) -> None:
        """This worker has closed: whoever still waits to leave it in peace need not any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._finished.set()

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
        leaks = agent.references.report.leaks()
        activity = agent.caller.sent() + agent.callee.handled()
        sent, received = agent.notices.totals()
        with self._lock:
            if not self._probed:
                return
            self._probed = False
            # Those of the last answer count: until this worker closes, others leave, and with
            # them what they hold.
            self.leaks = leaks
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
        """Works off effects, in order, on one thread at a time; each stays until it is done."""
        while True:
            with self._lock:
                if self._answering or not self._todo:
                    return
                self._answering = True
                effect = self._todo[0]
            try:
                self._perform_one(effect)
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

    def _perform_one(self, effect: Effect) -> None:
        agent = self._agent
        if isinstance(effect, Tell):
            if effect.to == agent.info.id:
                with self._lock:
                    self._todo += self._machine.receive(effect.to, effect.message)
            else:
                agent.notices.tell(agent.group.life(effect.to), effect.message)
        elif isinstance(effect, AnswerWhenQuiet):
            with self._lock:
                self._asked_by = self._machine.leader
            self._probed = True
            self._answer_if_quiet()
            if self._probed and not self._will_speak:
                self._will_speak = True
                self._speak_in(_SECONDS_OF_SILENCE)
        elif isinstance(effect, Enter):
            if effect.phase is Phase.RELEASE:
                self.release()
        elif isinstance(effect, Finished):
            self._finished.set()
