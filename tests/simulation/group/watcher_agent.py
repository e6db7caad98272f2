"""Stands in for the agent in a simulated group, for all that looks after other workers.

One object is the agent, its clock, threads, timers, store and prober, for one life of one
worker. It hands everything on to the run and shows it to the checks. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from rpc.group.loss_reports import LossReports
from rpc.group.probes import Answer
from rpc.group.watch import Watch
from rpc.group.worker_loss import WorkerLoss
from rpc.ids import Life
from rpc.protocol.liveness import Effect, Evidence, Liveness, Silent
from rpc.wire.control import Lost
from tests.simulation.group.rules import Rule, require

if TYPE_CHECKING:
    from tests.simulation.group.watchers import Watcher, WatcherGroup


_GRAIN = 1e-9


def address_of(life: Life) -> str:
    """Returns the address of the server of a life."""
    return f"{life.worker} {life.incarnation}"


class _Witnessed:
    """A worker's ``Liveness``, whose every tick is shown to the checks."""

    def __init__(self, liveness: Liveness, agent: WatcherAgent) -> None:
        self._liveness = liveness
        self._agent = agent
        self.due = liveness.due
        self.answered = liveness.answered

    @property
    def is_late(self) -> bool:
        return self._liveness.is_late

    def tick(self, now: float, watched: Set[Life]) -> Sequence[Effect]:
        effects = self._liveness.tick(now, watched)
        self._agent.ticked(watched, effects)
        return effects


class _WitnessedLoss(WorkerLoss):
    """A worker's ``WorkerLoss``, which hands what it decides on to the run."""

    def __init__(self, agent: Any, watcher: Watcher, run: WatcherGroup) -> None:
        super().__init__(agent)
        self._watcher = watcher
        self._run = run

    def lost(self, life: Life, reason: str) -> bool:
        return self._run.lose(self._watcher, life, reason)

    def expelled(self, reason: str) -> None:
        self._run.expel(self._watcher, reason)


class WatcherAgent:
    """One agent, as far as it watches others.

    Args:
        watcher: the worker.
        run: its group.
    """

    def __init__(self, watcher: Watcher, run: WatcherGroup) -> None:
        self._watcher = watcher
        self._run = run
        self._answers: list[Answer] = []
        self._note: str | None = None
        self._tasks: deque[Callable[[], None]] = deque()
        self.life = watcher.life
        self.info = watcher.info
        self.group = watcher.group
        self.clock = self.timers = self
        self._due = 0.0
        agent = prober = cast("Any", self)
        self.watch = Watch(agent, 1.0, prober, self._witnessed)
        self.loss_reports = LossReports(agent, 1.0, run.machines.suspicion)
        self.worker_loss = _WitnessedLoss(agent, watcher, run)

    def _witnessed(self, bound: float) -> Any:
        return _Witnessed(self._run.machines.liveness(bound), self)

    def ticked(self, watched: Set[Life], effects: Sequence[Effect]) -> None:
        """The worker looked after those whom it watches."""
        now = self.now()
        require(
            now >= self._due - 1e-9, Rule.ASKED, self.life, "looks at", now, "not at", self._due
        )
        expected = self._run.depended_on(self._watcher)
        require(watched == expected, Rule.ASKED, self.life, "watches", watched, "not", expected)
        self._run.checks.ticked(self._watcher, watched, effects)
        for effect in effects:
            if isinstance(effect, Silent):
                self._run.say(self.life, effect)
                self.forget(effect.life)

    def beat(self) -> float:
        """Looks after everybody; returns when to come back."""
        self._due = self.watch.beat(self.now())
        self._work()
        return self._due

    # --- The agent

    @property
    def is_expelled(self) -> bool:
        return self._watcher.expelled

    def destinations(self) -> set[int]:
        """See ``Caller.destinations``: also itself, and some that are lost by now."""
        now = self._run.now
        called = {life.worker for life, end in self._watcher.calls.items() if end > now}
        return called | {self.info.id}

    def expects_departures(self) -> bool:
        return False

    def has_a_say(self) -> bool:
        return not self.is_expelled

    def watches(self) -> bool:
        return True

    def why_expelled(self) -> str | None:
        return self.watch.verdict()

    def look_at_store(self) -> None:
        """The run knows whether it would answer."""

    def was_out_of_touch(self, seconds: float, within: float) -> bool:
        return self._run.was_out_of_touch(self._watcher, seconds, within)

    def reached_few(self) -> bool:
        return self.watch.reached_few(self.now())

    def doubt(self, life: Life, until: float) -> None:
        self.watch.doubt(life, until)

    def leave_note(self, life: Life, reason: str) -> None:
        self.watch.tell_lost(life, reason)

    def declare_lost(self, life: Life, reason: str, evidence: Evidence) -> None:
        self._tasks.append(partial(self.worker_loss.declare, life, reason, evidence))

    def take_as_expelled(self, reason: str) -> None:
        self._tasks.append(partial(self.worker_loss.expelled, reason))

    def give_up(self, reason: str) -> None:
        if self._run.plan.dynamic:
            self._run.strike_off(self._watcher, self.life, lambda: True, lambda: None)
        else:
            self.take_as_expelled(reason)

    def now(self) -> float:
        return self._run.time_of(self._watcher)

    def hurry(self) -> None:
        self._run.at(self._run.now, lambda: self._run.awake(self._watcher, self._beat_now))

    def _beat_now(self) -> None:
        self.beat()

    def _work(self) -> None:
        while self._tasks:
            self._tasks.popleft()()

    def at(self, when: float, task: Callable[[], None]) -> None:
        self._run.at_own(self._watcher, when, task)

    # --- What it tells the others

    def _reports(self, life: Life) -> None:
        has_a_say = not self._watcher.expelled
        require(has_a_say, Rule.NOT_REPORTED, self.life, "still reports", life)
        self._run.checks.reported(self._watcher, life)

    def strike_off(
        self, life: Life, reason: str, wanted: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        self._check_wording(self.loss_reports.wording(reason))
        if not self._run.plan.dynamic:
            done()
            return
        self._reports(life)
        self._run.strike_off(self._watcher, life, wanted, done)

    def tell(self, to: Life, message: Lost) -> None:
        life = Life(message.worker, message.incarnation)
        self._reports(life)
        self._run.tell(self._watcher, to, life, message.reason)

    # --- The prober

    def ask(self, life: Life, address: str) -> None:
        self._run.ask(self._watcher, life, address)

    def forget(self, life: Life) -> None:
        self._watcher.owing.discard(life)
        self._watcher.lines.discard(life)

    def collect(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def answered(self, answer: Answer) -> None:
        """Takes what another's server said."""
        self._watcher.owing.discard(answer.life)
        self._answers.append(answer)

    def expel(self, address: str, reason: str) -> None:
        life = Life(*map(int, address.split()))
        self._run.say(self.life, "reports", life)
        self._run.checks.reported(self._watcher, life)
        self._watcher.has_expelled.add(life)
        self.forget(life)
        self._run.leave_note(self._watcher, life, reason)

    def verdict(self) -> str | None:
        return self._note

    def noted(self, note: str) -> None:
        """Somebody leaves a note in this worker's server."""
        self._check_wording(note)
        self._note = note

    def _check_wording(self, reason: str) -> None:
        once = reason.count("declared it lost") == 1
        require(once, Rule.FENCED, self.life, "is told", reason)

    # --- What happens to it

    def connection_closed(self, life: Life) -> None:
        """The transport cannot reach a worker any more."""
        self.worker_loss.reported(life, "its connection was closed")

    def told_of_loss(self, life: Life, reason: str) -> None:
        """Another worker says that a life is over."""
        self._check_wording(reason)
        self.worker_loss.told(life, reason)
