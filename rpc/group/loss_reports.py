"""Telling the group that a worker is lost: when, to whom, and by which means.

What a loss ends here is the agent's business, and happens at once. The others are told
after a moment in which it may turn out that it is this worker which is cut off.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Protocol

from rpc.group.members import Group
from rpc.ids import Life
from rpc.protocol.liveness import Evidence, Suspicion, fingers
from rpc.runtime.clock import Clock
from rpc.runtime.timers import Timers
from rpc.wire.control import ControlMessage, Lost
from rpc.worker_info import WorkerInfo


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

    def strike_off(self, life: Life, reason: str) -> None:
        """Takes a life off the store's list, if this is a dynamic group."""


_TOLD = "declared it lost"


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
        self._lock = threading.Lock()
        self._suspicion = decides(agent.info.id, bound)

    def lost(self, life: Life, reason: str, evidence: Evidence) -> None:
        """A life was declared lost here."""
        agent = self._agent
        if not agent.has_a_say():
            return
        if not agent.watches():
            self._strike_off(life, reason)
            return
        now = agent.clock.now()
        with self._lock:
            delay = self._suspicion.delay(life.worker, evidence, now)
        if delay == 0.0:
            self._report(life, reason)
        else:
            agent.timers.at(now + delay, partial(self._report_later, life, reason))

    def wording(self, reason: str) -> str:
        """The words in which others are told of a worker that this one declares lost."""
        name = self._agent.info.name
        return reason if _TOLD in reason else f"worker {name!r} {_TOLD}: {reason}"

    def _report_later(self, life: Life, reason: str) -> None:
        agent = self._agent
        others = len(agent.group.living()) - 1
        with self._lock:
            cut_off = self._suspicion.is_cut_off(others, agent.clock.now())
        if not cut_off:
            self._report(life, reason)

    def _report(self, life: Life, reason: str) -> None:
        agent = self._agent
        if not self._strike_off(life, reason) or not agent.watches():
            return
        told = self.wording(reason)
        agent.leave_note(life, told)
        message = Lost(life.worker, life.incarnation, told)
        for worker in fingers(agent.info.id, [each.id for each in agent.group.living()]):
            agent.tell(agent.group.life(worker), message)

    def _strike_off(self, life: Life, reason: str) -> bool:
        """Takes a life off the store's list; False if this worker has no say any more."""
        agent = self._agent
        latest = agent.group.latest(life.worker)
        returned = latest is None or latest.incarnation != life.incarnation
        if returned or not agent.has_a_say():
            return False
        agent.strike_off(life, reason)
        return True
