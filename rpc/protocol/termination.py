"""Decides when a group that shuts down gracefully is finished. Sans-IO.

Every worker that calls ``shutdown`` reports READY to the leader, the living
worker with the lowest id. Once all are ready the leader runs *waves*: it probes
everyone, and each worker answers as soon as it is quiet (no call outstanding,
no handler running) with three counters: its activity (requests sent and
handled so far) and the reference messages it exchanged with the workers that
the leader named. Two successive waves with equal answers, in which the messages
sent and received add up, mean that nothing ran and nothing was under way in
between (F. Mattern, "Algorithms for distributed termination detection", 1987).
The group then enters the next phase:

    DRAIN    calls, and the calls they caused, run to their end
    RELEASE  every worker deletes the RRefs it uses; their owners hear of it
    CLOSE    everyone may leave; the leader waits for all to say so and goes last

A lost worker is no longer waited for; if it was the leader the next one takes
over, at the furthest phase anyone reports. Only work that a lost worker caused
may be cut short. A worker that joins is waited for too, unless the group is
closing already.

Messages may overtake each other. Every question therefore has its own number;
an answer counts if it is to the last question, and only the leader's questions
are answered.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rpc.errors import FrameError
from rpc.wire.control import Leaving, Probe, Quiet, Ready


class Phase(enum.IntEnum):
    """The phases of the shutdown of a group."""

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
        self._gone: set[int] = set()
        self._phase = Phase.DRAIN
        self._begun = False
        self._finished = False
        self._probe: Probe | None = None  # the question this worker has not answered yet
        # From here on, what a leader knows:
        self._ready: dict[int, Phase] = {}
        self._question = 0
        self._asked: dict[int, int] = {}  # this wave's, by worker
        self._answers: dict[int, Quiet] = {}
        self._previous: dict[int, Quiet] | None = None
        self._left: set[int] = set()

    @property
    def leader(self) -> int:
        """The living worker with the lowest id."""
        return min(self._members)

    @property
    def phase(self) -> Phase:
        """The phase that this worker knows the group to be in."""
        return self._phase

    def missing(self) -> list[int]:
        """The workers that the leader still waits for."""
        if self._phase is Phase.CLOSE:
            return sorted(self._members - self._left - {self._me})
        if not self._all_ready():
            return sorted(self._members - set(self._ready))
        return sorted(self._members - set(self._answers))

    # --- Events

    def begin(self) -> list[Effect]:
        """Takes note that the user called ``shutdown`` on this worker."""
        self._begun = True
        return self._report()

    def joined(self, worker_id: int) -> list[Effect]:
        """Adds a worker that joined the group, or came back, and must now be waited for too."""
        if self._phase is Phase.CLOSE:
            return []
        self._gone.discard(worker_id)
        if worker_id in self._members:
            self._forget(worker_id)
        leader = self.leader
        self._members.add(worker_id)
        return self._group_changed(leader)

    def lost(self, worker_id: int) -> list[Effect]:
        """Removes a worker that left or died."""
        if worker_id not in self._members or worker_id == self._me:
            return []
        leader = self.leader
        self._forget(worker_id)
        self._gone.add(worker_id)
        self._members.discard(worker_id)
        return self._group_changed(leader)

    def receive(self, sender: int, message: TerminationMessage) -> list[Effect]:
        """Takes a message about the shutdown from ``sender``.

        Raises:
            FrameError: it speaks of a phase that does not exist.
        """
        if sender in self._gone:
            return []
        if isinstance(message, Probe):
            return self._probed(sender, message)
        if isinstance(message, Ready):
            return self._reported(sender, _phase(message.phase))
        if isinstance(message, Leaving):
            self._left.add(sender)
            return self._close_if_last()
        return self._answered(sender, message)

    def quiet(
        self, activity: int, sent: Mapping[int, int], received: Mapping[int, int]
    ) -> list[Effect]:
        """Takes note that this worker is quiet.

        Args:
            activity: how many requests it sent and handled so far.
            sent: the number of messages it sent, by receiver.
            received: the number of messages it received, by sender.
        """
        probe = self._probe
        if probe is None:
            return []
        self._probe = None
        totals = (sum(counts.get(m, 0) for m in probe.members) for counts in (sent, received))
        return [Tell(self.leader, Quiet(probe.phase, probe.wave, activity, *totals))]

    # --- As a member

    def _report(self) -> list[Effect]:
        return [Tell(self.leader, Ready(self._phase))]

    def _forget(self, worker_id: int) -> None:
        self._left.discard(worker_id)
        for known in (self._ready, self._answers, self._asked):
            known.pop(worker_id, None)

    def _group_changed(self, leader: int) -> list[Effect]:
        """Goes on with whoever leads now; before, it was ``leader``."""
        self._previous = None
        if not self._begun:
            return []
        if leader != self.leader:
            self._probe = None
            return self._finish() if self._phase is Phase.CLOSE else self._report()
        return self._lead()

    def _probed(self, sender: int, probe: Probe) -> list[Effect]:
        phase = _phase(probe.phase)
        if sender != self.leader and phase is not Phase.CLOSE:
            return []
        effects: list[Effect] = []
        if phase > self._phase:
            self._phase = phase
            effects.append(Enter(phase))
        if phase is Phase.CLOSE:
            if sender == self._me:
                return effects
            return [*effects, Tell(sender, Leaving(Phase.CLOSE)), *self._finish()]
        if self._probe is None or probe.wave > self._probe.wave:
            self._probe = probe
        return [*effects, AnswerWhenQuiet()]

    # --- As the leader

    def _reported(self, sender: int, phase: Phase) -> list[Effect]:
        """Notes that a worker is ready; if it was before, it has forgotten what it was asked."""
        self._ready[sender] = phase
        self._answers.pop(sender, None)
        self._asked.pop(sender, None)
        return self._lead()

    def _answered(self, sender: int, answer: Quiet) -> list[Effect]:
        if (answer.phase, answer.wave) != (self._phase, self._asked.get(sender)):
            return []
        self._answers[sender] = answer
        return self._lead()

    def _all_ready(self) -> bool:
        return self._begun and self._members <= self._ready.keys()

    def _lead(self) -> list[Effect]:
        """Starts, completes or ends a wave when that can be, if this worker leads."""
        if self._me != self.leader or not self._all_ready() or self._finished:
            return []
        if self._phase is Phase.CLOSE:
            return self._close_if_last()
        furthest = max(self._ready[m] for m in self._members)
        if furthest > self._phase:
            return self._advance(furthest)
        if self._members <= self._answers.keys():
            return self._end_wave()
        return self._ask()

    def _ask(self) -> list[Effect]:
        """Asks whoever was not asked in this wave."""
        unasked = sorted(self._members - self._asked.keys())
        if unasked:
            self._question += 1
        self._asked.update(dict.fromkeys(unasked, self._question))
        probe = Probe(self._phase, self._question, tuple(sorted(self._members)))
        return [Tell(member, probe) for member in unasked]

    def _end_wave(self) -> list[Effect]:
        answers = self._answers
        if self._settled(answers):
            return self._advance(Phase(self._phase + 1))
        return self._start_wave(answers)

    def _settled(self, answers: dict[int, Quiet]) -> bool:
        previous = self._previous
        if previous is None:
            return False
        balance = sum(a.notices_sent - a.notices_received for a in answers.values())
        same = all(_counters(answers[m]) == _counters(previous[m]) for m in answers)
        return same and balance == 0

    def _advance(self, phase: Phase) -> list[Effect]:
        self._phase = phase
        effects: list[Effect] = [Enter(phase), *self._start_wave(None)]
        if phase is Phase.CLOSE:
            effects += self._close_if_last()
        return effects

    def _start_wave(self, previous: dict[int, Quiet] | None) -> list[Effect]:
        self._previous = previous
        self._answers = {}
        self._asked = {}
        return self._ask()

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


def _phase(number: int) -> Phase:
    try:
        return Phase(number)
    except ValueError:
        raise FrameError(f"a shutdown has no phase {number}") from None


def _counters(answer: Quiet) -> tuple[int, int, int]:
    return answer.activity, answer.notices_sent, answer.notices_received
