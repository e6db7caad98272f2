"""Telling the group that a worker is lost: when, to whom, and by which means.

What a loss ends here is the agent's business, and happens at once. The others are told
after a moment in which it may turn out that it is this worker which is cut off, and, of what
this worker found out by itself, once the store has taken the life off its list: of two that
declare each other lost the store hears one first, and the other has no say any more.

If a network parts and comes back just then, workers on both sides have declared lost some of
the other side, and not each the one that declared it lost. A worker that reached less than
half of the group then waits, so that the others speak first, and asks again: if the one that
it lost lives, it takes itself for lost. Of two halves, the one with the store counts for more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rpc.group.members import Group
from rpc.ids import Life
from rpc.protocol.liveness import Evidence, Suspicion, fingers
from rpc.runtime.clock import Clock
from rpc.runtime.timers import Timers
from rpc.wire.control import ControlMessage, Lost
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")


class ReportingWorker(Protocol):
    """The worker that reports losses, as far as the reports use it."""

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

    def has_a_say(self) -> bool:
        """False if it was declared lost itself, or the group is leaving together."""

    def watches(self) -> bool:
        """True if it asks others for signs of life, and can leave notes for the lost."""

    def tell(self, to: Life, message: ControlMessage) -> None:
        """Sends a control message at once."""

    def leave_note(self, life: Life, reason: str) -> None:
        """Leaves a note for a worker that was declared lost, in case it lives."""

    def reached_few(self) -> bool:
        """True if it was cut off from most of the group when it lately lost somebody."""

    def doubt(self, life: Life, until: float) -> None:
        """Asks a worker that was lost if it lives; if it does, takes this worker for lost."""

    def strike_off(
        self, life: Life, reason: str, wanted: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        """Takes a life off the store's list, if this is a dynamic group.

        Args:
            life: which.
            reason: why.
            wanted: asked, on any thread, right before: the store may have been out of reach.
            done: called once the list has it no more, on any thread; not if the store does not
                answer, or does not list this worker any more. At once in a static group.
        """


_TOLD = "declared it lost"
_DOUBT_BOUNDS = 2.0
"""Bounds of silence to wait for a worker in doubt. One that was refused by who declared it lost
waits less, so it speaks first.
"""


class LossReports:
    """The reports of losses that one agent makes to the others.

    Args:
        agent: the worker.
        bound: its liveness timeout in seconds, 0 if it watches nobody.
        decides: makes what decides.
    """

    def __init__(
        self, agent: ReportingWorker, bound: float, decides: type[Suspicion] = Suspicion
    ) -> None:
        self._agent = agent
        self._bound = bound
        self._lock = threading.Lock()
        self._suspicion = decides(agent.info.id, bound)
        self._untold: dict[Life, str] = {}
        """Reasons for losses that others are told once these are struck off; see ``_lock``."""
        self._unstruck: set[Life] = set()
        """Lives that this worker found lost and strikes off; see ``_lock``."""

    def lost(self, life: Life, reason: str, evidence: Evidence) -> None:
        """Reports a life that was declared lost here."""
        agent = self._agent
        if not agent.has_a_say():
            return
        if not agent.watches():
            self._report(life, reason)
            return
        now = agent.clock.now()
        with self._lock:
            delay = self._suspicion.delay(life.worker, evidence, now)
        if delay == 0.0:
            self._pass_on(life, reason)
            return
        if not self._has_a_say():  # nor had it one when it noticed the first of them
            with self._lock:
                self._untold.clear()
                self._unstruck.clear()
        agent.timers.at(now + delay, partial(self._report_later, life, reason))

    def wording(self, reason: str) -> str:
        """The words in which others are told of a worker that this one declares lost."""
        name = self._agent.info.name
        return reason if _TOLD in reason else f"worker {name!r} {_TOLD}: {reason}"

    def _report_later(self, life: Life, reason: str) -> None:
        if not self._has_a_say():
            return
        agent = self._agent
        if not agent.reached_few():
            self._report(life, reason)
            return
        _logger.warning(
            "%r lost %s, but did not reach most of the group then: it tells the others in %.0f s, "
            "if it is still a member",
            agent.info.name, life, self._bound * _DOUBT_BOUNDS,
        )  # fmt: skip
        until = agent.clock.now() + self._bound * _DOUBT_BOUNDS
        agent.doubt(life, until)
        agent.timers.at(until, partial(self._report_after_doubt, life, reason))

    def _report_after_doubt(self, life: Life, reason: str) -> None:
        if self._has_a_say():
            self._report(life, reason)

    def _has_a_say(self) -> bool:
        """False if it is this worker which is cut off."""
        agent = self._agent
        others = len(agent.group.living()) - 1
        with self._lock:
            return not self._suspicion.is_cut_off(others, agent.clock.now())

    def _report(self, life: Life, reason: str) -> None:
        """Strikes a life off the list, and tells the others when that is done."""
        agent = self._agent
        if not self._is_of_concern(life):
            return
        if not agent.watches():
            agent.strike_off(life, reason, _always, _nothing)
            return
        with self._lock:
            self._untold[life] = reason
            self._unstruck.add(life)
        wanted, done = partial(self._is_unstruck, life), partial(self._struck_off, life)
        agent.strike_off(life, reason, wanted, done)
        agent.timers.at(agent.clock.now() + self._bound, partial(self._not_struck_off, life))

    def _is_unstruck(self, life: Life) -> bool:
        with self._lock:
            return life in self._unstruck

    def _struck_off(self, life: Life) -> None:
        agent = self._agent
        with self._lock:
            self._unstruck.discard(life)
        agent.timers.at(agent.clock.now(), partial(self._tell_if_untold, life))

    def _not_struck_off(self, life: Life) -> None:
        """Tells the others without the store, which has had its time, if this worker may."""
        if self._has_a_say():
            self._tell_if_untold(life)

    def _tell_if_untold(self, life: Life) -> None:
        with self._lock:
            reason = self._untold.pop(life, None)
        if reason is not None and self._is_of_concern(life):
            self._tell(life, reason)

    def _pass_on(self, life: Life, reason: str) -> None:
        """Passes on what another worker said, which knew from the list or has waited enough."""
        if self._is_of_concern(life):
            self._agent.strike_off(life, reason, _always, _nothing)
            self._tell(life, reason)

    def _tell(self, life: Life, reason: str) -> None:
        agent = self._agent
        told = self.wording(reason)
        agent.leave_note(life, told)
        message = Lost(life.worker, life.incarnation, told)
        for worker in fingers(agent.info.id, [each.id for each in agent.group.living()]):
            agent.tell(agent.group.life(worker), message)

    def _is_of_concern(self, life: Life) -> bool:
        """False for a life that has a successor, and if this worker has no say any more."""
        agent = self._agent
        latest = agent.group.latest(life.worker)
        returned = latest is None or latest.incarnation != life.incarnation
        return not returned and agent.has_a_say()


def _always() -> bool:
    """Wants a life struck off whatever this worker has lost: it was told, or tells nobody."""
    return True


def _nothing() -> None:
    """Tells nobody."""
