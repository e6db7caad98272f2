"""Workers that watch each other for signs of life, on a virtual clock; carries out faults.

Each has a group, and ``watch`` and ``loss_reports`` as an agent has them, with the
decisions about silence (``liveness``) within. What the network does:

- A worker that is stopped wakes with its messages, timers and connections as they were; its clock
  has gone on meanwhile, or stood. It may stop between a decision and what it sends for it.
- A question reaches the server of a worker, which answers also while the worker's
  interpreter is held, and not while its process is stopped; what waits is answered
  later. Questions and answers wait while one of the two is cut off.
- What a worker says of others needs the receiver's interpreter, but for the note that
  it leaves at the one it declared lost. What one says while it is cut off arrives later
  or is lost; what a lost one says is refused.
- Closed connections are noticed by both ends.

``silence`` checks that all is as it should be. Times are in bounds.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rpc.group.members import Group
from rpc.group.probes import Answer
from rpc.ids import Life
from rpc.protocol.liveness import neighbour
from rpc.transports.base import Peer
from rpc.worker_info import WorkerInfo
from tests.simulation.group.faults import Fault, FaultKind, Plan
from tests.simulation.group.rules import Rule, RuleBrokenError, broken_by, require
from tests.simulation.group.silence import SilenceChecks
from tests.simulation.group.steps import short
from tests.simulation.group.watcher_agent import WatcherAgent, address_of
from tests.simulation.group.worker import Machines, info_of

_DELAY = 0.01
_JITTER = 0.005
_PERIOD = 0.2
_GRAIN = 1e-9
_MOST_EVENTS = 100_000


@dataclass(slots=True, eq=False)
class Watcher:
    """One life of one worker."""

    life: Life
    info: WorkerInfo
    group: Group
    agent: WatcherAgent = field(init=False)
    alive: bool = True
    expelled: bool = False
    frozen_until: float = 0.0
    behind: float = 0.0
    """The time for which its clock has stood."""
    stops_before_sending: Callable[[], None] | None = None
    """Stops it, once, before it sends anything more."""
    held_until: float = 0.0
    cut_at: float = 0.0
    cut_until: float = 0.0
    plugs: int = 0
    """The number of times it lost all its connections."""
    has_expelled: set[Life] = field(default_factory=set)
    owing: set[Life] = field(default_factory=set)
    lines: set[Life] = field(default_factory=set)
    calls: dict[Life, float] = field(default_factory=dict)
    """The time at which the last call to a life will be over."""

    @property
    def asleep_until(self) -> float:
        """The time when its interpreter runs again."""
        return max(self.frozen_until, self.held_until)

    def sees(self, life: Life) -> bool:
        """True if a life is a member that is not lost, as far as this worker knows."""
        peer = self.group.latest(life.worker)
        known = peer is not None and peer.incarnation == life.incarnation
        return known and self.group.lost_error(life.worker) is None

    def view(self) -> set[Life]:
        """Returns the lives that are there, as far as it knows."""
        return {self.group.life(info.id) for info in self.group.living()}


class WatcherGroup:
    """One run.

    Args:
        plan: what happens.
        machines: what decides.
        transcript: where to tell what happens; default nowhere.
    """

    def __init__(self, plan: Plan, machines: Machines, transcript: list[str] | None = None) -> None:
        self.plan = plan
        self.now = 0.0
        self.messages = 0
        self.all: dict[Life, Watcher] = {}
        self.latest: dict[int, Watcher] = {}
        self.listed: set[Life] = set()
        self.machines = machines
        self._transcript = transcript
        self._random = random.Random(plan.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.checks = SilenceChecks(self)
        self._appliers: dict[FaultKind, Callable[[Watcher, Fault], None]] = {
            FaultKind.FREEZE: self._freeze,
            FaultKind.PAUSE: self._pause,
            FaultKind.STOP_BEFORE_SENDING: self._stop_before_sending,
            FaultKind.HOLD: self._hold,
            FaultKind.KILL: self._kill,
            FaultKind.VANISH: self._vanish,
            FaultKind.CUT: self._cut,
            FaultKind.UNPLUG: self._unplug,
            FaultKind.PART: self._part,
            FaultKind.CALL: self._call,
        }
        for worker in range(plan.size):
            self._spawn(Life(worker, 0))
        for watcher in self.all.values():
            for life in self.all:
                self._meet(watcher, life)

    def run(self) -> RuleBrokenError | None:
        """Plays it to its end; returns the rule that was broken, if one was."""
        return broken_by(self._play_all)

    def _play_all(self) -> None:
        for fault in self.plan.faults:
            self.at(fault.at, partial(self._apply, fault))
        self._play(self.plan.end)
        self.checks.check_at_rest()

    def _play(self, end: float) -> None:
        for count in itertools.count():
            if not self._events or self._events[0][0] > end:
                return
            if count > _MOST_EVENTS:
                raise RuleBrokenError(Rule.QUIESCENCE, f"still at work after {count} events")
            self.now, _, act = heapq.heappop(self._events)
            act()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Does something at a time."""
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def time_of(self, watcher: Watcher) -> float:
        """The time by a worker's own clock."""
        return self.now - watcher.behind

    def at_own(self, watcher: Watcher, when: float, act: Callable[[], None]) -> None:
        """Does something when it is that time by a worker's own clock, and the worker is awake."""

        def is_due() -> None:
            if self.time_of(watcher) < when - _GRAIN:  # its clock has stood meanwhile
                self.at_own(watcher, when, act)
            else:
                act()

        self.at(when + watcher.behind, lambda: self.awake(watcher, is_due))

    def say(self, *words: object) -> None:
        """A line of the transcript."""
        if self._transcript is not None:
            self._transcript.append(f"{self.now:7.3f}    {' '.join(map(short, words))}")

    def _soon(self) -> float:
        return self.now + self._random.uniform(0.1, 1.0) * _DELAY

    # --- Who is there

    def _spawn(self, life: Life) -> Watcher:
        watcher = Watcher(life, info_of(life), self.machines.group())
        watcher.agent = WatcherAgent(watcher, self)
        self.all[life] = self.latest[life.worker] = watcher
        self.listed.add(life)
        self.at(self.now + self._random.uniform(0, _JITTER), lambda: self._beat(watcher))
        return watcher

    def _meet(self, watcher: Watcher, life: Life) -> None:
        known = watcher.group.latest(life.worker)
        if watcher.expelled or (known is not None and known.incarnation >= life.incarnation):
            return
        if known is not None and watcher.sees(Life(life.worker, known.incarnation)):
            self.lose(watcher, Life(life.worker, known.incarnation), "it was replaced")
        for over in [each for each in watcher.calls if each.worker == life.worker]:
            del watcher.calls[over]
        watcher.group.add(Peer(info_of(life), life.incarnation, b"", address_of(life)))

    # --- What an agent does

    def awake(self, watcher: Watcher, act: Callable[[], None]) -> None:
        """Does something as soon as a worker's interpreter runs."""
        if watcher.asleep_until > self.now:
            self.at(watcher.asleep_until + _JITTER / 2, lambda: self.awake(watcher, act))
        elif watcher.alive:
            act()

    def _beat(self, watcher: Watcher) -> None:
        self.awake(watcher, lambda: self._look_after(watcher))

    def _look_after(self, watcher: Watcher) -> None:
        due = watcher.agent.beat()
        self.checks.sleeps_until(watcher, due)
        at = due + watcher.behind + self._random.uniform(0, _JITTER)
        self.at(at, lambda: self._beat(watcher))

    def depended_on(self, watcher: Watcher) -> set[Life]:
        """Returns whom a worker should watch: the next one, and those that owe it replies."""
        nearest = neighbour(watcher.life.worker, [info.id for info in watcher.group.living()])
        wanted = {life for life, end in watcher.calls.items() if end > self.now}
        wanted = {life for life in wanted if watcher.sees(life)}
        if nearest is not None:
            wanted.add(watcher.group.life(nearest))
        return wanted

    def ask(self, watcher: Watcher, life: Life, address: str) -> None:
        """See ``Prober.ask``."""
        require(address == address_of(life), Rule.ASKED, watcher.life, life, "at", address)
        if life in self.depended_on(watcher):  # others are asked while somebody's answer is late
            watcher.lines.add(life)
        if life in watcher.owing:
            return
        watcher.owing.add(life)
        self._carry(watcher, life, lambda there: self._asked(there, watcher), to_server=True)

    def _asked(self, server: Watcher, asker: Watcher) -> None:
        answer = Answer(server.life, asker.life in server.has_expelled)
        self._carry(server, asker.life, lambda there: there.agent.answered(answer), to_server=True)

    def lose(self, watcher: Watcher, life: Life, reason: str) -> bool:
        """See ``WorkerLoss._lose``."""
        if watcher.group.lose(life, reason) is None:
            return False
        self.say(watcher.life, "loses", life, reason)
        self.checks.lost(watcher, life)
        return True

    def leave_note(self, watcher: Watcher, life: Life, note: str) -> None:
        """See ``Prober.expel``."""
        leave = partial(self._leave_note, note=note)
        self._carry(watcher, life, leave, to_server=True, is_speech=True)

    @staticmethod
    def _leave_note(there: Watcher, note: str) -> None:
        there.agent.noted(note)

    def tell(self, watcher: Watcher, to: Life, life: Life, reason: str) -> None:
        """See ``ControlChannel.tell``."""

        def arrive(there: Watcher) -> None:
            if there.sees(watcher.life) and not there.expelled:
                there.agent.told_of_loss(life, reason)

        self._carry(watcher, to, arrive, is_speech=True)

    def strike_off(
        self, by: Watcher, life: Life, wanted: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        """All hear what the store says; some time each.

        A worker that is not listed itself changes nothing; but one may stop after it has looked
        whether it is.
        """
        if by.cut_until > self.now:
            self.at(by.cut_until + _DELAY, lambda: self.strike_off(by, life, wanted, done))
        elif by.life in self.listed and wanted():
            self._send(by, lambda: self._strike(by, life, done))

    def was_out_of_touch(self, watcher: Watcher, seconds: float, within: float) -> bool:
        """See ``LossReports``: the store is asked when an answer of others is late."""
        began, ended = watcher.cut_at + _PERIOD, min(watcher.cut_until, self.now)
        return self.plan.dynamic and ended - began >= seconds and ended >= self.now - within

    def _strike(self, by: Watcher, life: Life, done: Callable[[], None]) -> None:
        self.at(self._soon(), lambda: self.awake(by, done))
        if life in self.listed:
            self.listed.discard(life)
            for watcher in list(self.all.values()):
                self.at(self._soon(), partial(self._struck_off, watcher, life))

    def _struck_off(self, watcher: Watcher, life: Life) -> None:
        if watcher.cut_until > self.now:
            self.at(watcher.cut_until + _DELAY, lambda: self._struck_off(watcher, life))
        else:
            self.awake(watcher, lambda: watcher.agent.worker_loss.departed(life, None))

    def expel(self, watcher: Watcher, reason: str) -> None:
        """See ``WorkerLoss.expelled``."""
        if watcher.expelled:
            return
        watcher.expelled = True
        self.say(watcher.life, "learns that it was declared lost")
        before = watcher.view() - {watcher.life}
        error, others = watcher.group.expel(watcher.life.worker, reason)
        self.checks.expelled(watcher, before, error, others)
        watcher.calls.clear()

    # --- The network

    def _carry(
        self,
        source: Watcher,
        to: Life,
        arrive: Callable[[Watcher], None],
        *,
        to_server: bool = False,
        is_speech: bool = False,
    ) -> None:
        """Takes something to a worker: to its server, or to its interpreter."""
        self.messages += 1
        there = self.all[to]
        plugs = (source.plugs, there.plugs)
        leave = partial(self._under_way, source, there, plugs, arrive, to_server, is_speech)
        self._send(source, leave)

    def _send(self, source: Watcher, leave: Callable[[], None]) -> None:
        """Sends now, or when a worker wakes that is stopped just before."""
        if source.stops_before_sending is not None and source.frozen_until <= self.now:
            stop, source.stops_before_sending = source.stops_before_sending, None
            stop()
        if source.frozen_until > self.now:
            wakes = source.frozen_until + _JITTER / 4  # before anything else that it does then
            self.at(wakes, lambda: self._send(source, leave) if source.alive else None)
        else:
            leave()

    def _under_way(
        self,
        source: Watcher,
        there: Watcher,
        plugs: tuple[int, int],
        arrive: Callable[[Watcher], None],
        to_server: bool,
        is_speech: bool,
    ) -> None:

        def try_to_arrive() -> None:
            if not there.alive or (source.plugs, there.plugs) != plugs:
                return
            if is_speech and source.cut_until > self.now:
                return
            cut = max(source.cut_until, there.cut_until)
            blocked = max(cut, there.frozen_until if to_server else there.asleep_until)
            if blocked > self.now:
                self.at(blocked + _DELAY, try_to_arrive)
            else:
                arrive(there)

        self.at(self._soon(), try_to_arrive)

    def _close_connection(self, watcher: Watcher, life: Life) -> None:
        """The end of a connection is noticed."""
        noticed = partial(watcher.agent.connection_closed, life)
        self.at(self._soon(), lambda: self.awake(watcher, noticed))

    def _others(self, watcher: Watcher) -> list[Watcher]:
        return [other for other in self.latest.values() if other is not watcher and other.alive]

    # --- Faults

    def _apply(self, fault: Fault) -> None:
        watcher = self.latest[fault.who]
        if self._transcript is not None:
            self._transcript.append(str(fault))
        if fault.kind is FaultKind.RETURN:
            self._return(watcher)
        elif watcher.alive and not watcher.expelled:
            self._appliers[fault.kind](watcher, fault)

    def _freeze(self, watcher: Watcher, fault: Fault) -> None:
        watcher.frozen_until = self.now + fault.seconds
        self.checks.silent(watcher, watcher.frozen_until, asleep=True)

    def _pause(self, watcher: Watcher, fault: Fault) -> None:
        self._freeze(watcher, fault)

        def wake() -> None:
            watcher.behind += fault.seconds

        self.at(watcher.frozen_until, wake)

    def _stop_before_sending(self, watcher: Watcher, fault: Fault) -> None:
        watcher.stops_before_sending = partial(self._freeze, watcher, fault)

    def _hold(self, watcher: Watcher, fault: Fault) -> None:
        watcher.held_until = self.now + fault.seconds
        self.checks.asleep(watcher, watcher.held_until)

    def _kill(self, watcher: Watcher, fault: Fault) -> None:
        self._vanish(watcher, fault)
        for other in self._others(watcher):
            self._close_connection(other, watcher.life)

    def _vanish(self, watcher: Watcher, fault: Fault) -> None:
        watcher.alive = False
        self.checks.silent(watcher, float("inf"), asleep=True)

    def _cut(self, watcher: Watcher, fault: Fault) -> None:
        watcher.cut_at, watcher.cut_until = self.now, self.now + fault.seconds
        self.checks.silent(watcher, watcher.cut_until, asleep=False)

    def _unplug(self, watcher: Watcher, fault: Fault) -> None:
        watcher.plugs += 1
        self.checks.unplugged(watcher)
        for other in self._others(watcher):
            watcher.owing.discard(other.life)
            other.owing.discard(watcher.life)
            self._close_connection(other, watcher.life)
            self._close_connection(watcher, other.life)

    def _part(self, watcher: Watcher, fault: Fault) -> None:
        other = self.latest[fault.other]
        if other.alive and other.sees(watcher.life) and watcher.sees(other.life):
            self.checks.parted(watcher, other)
            self._close_connection(other, watcher.life)
            self._close_connection(watcher, other.life)

    def _call(self, watcher: Watcher, fault: Fault) -> None:
        to = self.latest[fault.other].life
        if watcher.sees(to) and watcher.asleep_until <= self.now:
            end = max(self.now + fault.seconds, watcher.calls.get(to, 0.0))
            watcher.calls[to] = end
            self.checks.called(watcher, to)

    def _return(self, watcher: Watcher) -> None:
        """A worker that died, or was declared lost, joins again as a new life."""
        if watcher.alive and not watcher.expelled:
            return
        watcher.alive = False
        self.checks.silent(watcher, float("inf"), asleep=True)
        again = self._spawn(Life(watcher.life.worker, watcher.life.incarnation + 1))
        self.listed.discard(watcher.life)
        for life in sorted(self.listed):
            self._meet(again, life)
        for other in self._others(again):
            self.at(self._soon(), partial(self._hear_of, other, again.life))

    def _hear_of(self, watcher: Watcher, life: Life) -> None:
        if watcher.cut_until > self.now:
            self.at(watcher.cut_until + _DELAY, lambda: self._hear_of(watcher, life))
        else:
            self.awake(watcher, lambda: self._meet(watcher, life))
