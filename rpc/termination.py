"""Decides when a group that shuts down gracefully is finished. Sans-IO.

Every worker that calls ``shutdown`` reports READY to the leader, the living
worker with the lowest id. Once all are ready the leader runs *waves*: it probes
everyone, and each worker answers as soon as it is quiet (no call outstanding,
no handler running) with three counters: its activity (requests sent and
handled so far) and the reference notices it sent and received. Two successive
waves with equal answers, in which the notices sent and received add up, mean
that nothing ran and nothing was under way in between (F. Mattern, "Algorithms
for distributed termination detection", 1987). The group then enters the next
phase:

    DRAIN    calls, and the calls they caused, run to their end
    RELEASE  every worker deletes the RRefs it uses; their owners hear of it
    CLOSE    everyone may leave; the leader waits for all to say so and goes last

A lost worker is no longer waited for; if it was the leader the next one takes
over, at the furthest phase anyone reports.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rpc.control import Leaving, Probe, Quiet, Ready


class Phase(enum.IntEnum):
    """How far the shutdown of the group has come."""

    DRAIN = 0
    RELEASE = 1
    CLOSE = 2


TerminationMessage = Ready | Probe | Quiet | Leaving


@dataclass(frozen=True, slots=True)
class Tell:
    """Effect: send ``message`` to worker ``to``, which may be this one."""

    to: int
    message: TerminationMessage


@dataclass(frozen=True, slots=True)
class AnswerWhenQuiet:
    """Effect: call :meth:`Termination.quiet` as soon as this worker is quiet."""


@dataclass(frozen=True, slots=True)
class Enter:
    """Effect: this worker is now in ``phase``."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class Finished:
    """Effect: this worker may close its transport."""


Effect = Tell | AnswerWhenQuiet | Enter | Finished


class Termination:
    """One worker's part in a graceful shutdown.

    Args:
        worker_id: this worker.
        members: the ids of all living workers, this one included.
    """

    def __init__(self, worker_id: int, members: set[int]) -> None:
        self._me = worker_id
        self._members = set(members)
        self._phase = Phase.DRAIN
        self._begun = False
        self._ready: dict[int, int] = {}
        self._probe: Probe | None = None
        self._wave = 0
        self._answers: dict[int, Quiet] = {}
        self._previous: dict[int, Quiet] | None = None
        self._left: set[int] = set()
        self._finished = False

    @property
    def leader(self) -> int:
        """The living worker with the lowest id."""
        return min(self._members)

    @property
    def phase(self) -> Phase:
        """How far this worker knows the group to be."""
        return self._phase

    def missing(self) -> list[int]:
        """The workers that the leader still waits for."""
        if self._phase is Phase.CLOSE:
            return sorted(self._members - self._left - {self._me})
        if not self._all_ready():
            return sorted(self._members - set(self._ready))
        return sorted(self._members - set(self._answers))

    def joined(self, worker_id: int) -> None:
        """A worker joined the group, which must now be waited for too."""
        self._members.add(worker_id)

    def begin(self) -> list[Effect]:
        """The user called ``shutdown`` on this worker."""
        self._begun = True
        return [Tell(self.leader, Ready(self._phase))]

    def lost(self, worker_id: int) -> list[Effect]:
        """A worker is gone: it left, or died."""
        if worker_id not in self._members or worker_id == self._me:
            return []
        was_leader = worker_id == self.leader
        self._members.discard(worker_id)
        for known in (self._ready, self._answers):
            known.pop(worker_id, None)
        if was_leader and self._begun:
            if self._phase is Phase.CLOSE:
                return self._finish()
            self._probe = None
            return [Tell(self.leader, Ready(self._phase))]
        if self._me != self.leader:
            return []
        self._previous = None
        return self._lead()

    def receive(self, sender: int, message: TerminationMessage) -> list[Effect]:
        """A message about the shutdown arrived from ``sender``."""
        if isinstance(message, Probe):
            return self._probed(message)
        if isinstance(message, Ready):
            self._ready[sender] = message.phase
            return self._lead()
        if isinstance(message, Leaving):
            self._left.add(sender)
            return self._close_if_last()
        if (message.phase, message.wave) == (self._phase, self._wave):
            self._answers[sender] = message
            return self._lead()
        return []

    def quiet(self, activity: int, notices_sent: int, notices_received: int) -> list[Effect]:
        """This worker is quiet; the counters are its totals towards living workers."""
        probe = self._probe
        if probe is None:
            return []
        self._probe = None
        answer = Quiet(probe.phase, probe.wave, activity, notices_sent, notices_received)
        return [Tell(self.leader, answer)]

    def _probed(self, probe: Probe) -> list[Effect]:
        effects: list[Effect] = []
        if self._me != self.leader and probe.phase > self._phase:
            self._phase = Phase(probe.phase)
            effects.append(Enter(self._phase))
        if probe.phase == Phase.CLOSE:
            if self._me == self.leader:
                return effects
            return [*effects, Tell(self.leader, Leaving(Phase.CLOSE)), *self._finish()]
        self._probe = probe
        return [*effects, AnswerWhenQuiet()]

    def _all_ready(self) -> bool:
        return self._begun and self._members <= set(self._ready)

    def _lead(self) -> list[Effect]:
        """As the leader: starts the next wave or phase when it can."""
        if self._me != self.leader or not self._all_ready() or self._finished:
            return []
        if self._phase is Phase.CLOSE:
            return self._close_if_last()
        furthest = max(self._ready[m] for m in self._members)
        if furthest > self._phase:
            return self._advance(Phase(furthest))
        if self._wave == 0 or self._members <= set(self._answers):
            return self._next_wave()
        return []

    def _next_wave(self) -> list[Effect]:
        answers = {m: self._answers[m] for m in self._members} if self._wave else None
        if answers is not None and self._settled(answers):
            return self._advance(Phase(self._phase + 1))
        self._previous = answers
        return self._start_wave()

    def _settled(self, answers: dict[int, Quiet]) -> bool:
        previous = self._previous
        if previous is None or previous.keys() != answers.keys():
            return False
        balance = sum(a.notices_sent - a.notices_received for a in answers.values())
        same = all(_counters(answers[m]) == _counters(previous[m]) for m in answers)
        return same and balance == 0

    def _advance(self, phase: Phase) -> list[Effect]:
        self._phase = phase
        self._previous = None
        effects: list[Effect] = [Enter(phase), *self._start_wave()]
        if phase is Phase.CLOSE:
            effects += self._close_if_last()
        return effects

    def _start_wave(self) -> list[Effect]:
        self._wave += 1
        self._answers = {}
        probe = Probe(self._phase, self._wave)
        return [Tell(member, probe) for member in sorted(self._members)]

    def _close_if_last(self) -> list[Effect]:
        closing = self._phase is Phase.CLOSE and self._me == self.leader
        if closing and self._members - self._left == {self._me}:
            return self._finish()
        return []

    def _finish(self) -> list[Effect]:
        if self._finished:
            return []
        self._finished = True
        return [Finished()]


def _counters(answer: Quiet) -> tuple[int, int, int]:
    return answer.activity, answer.notices_sent, answer.notices_received
