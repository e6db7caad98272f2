"""Makes up what happens next in a run, from a seed; every seed exaggerates something else."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rpc.ids import Life
from rpc.protocol.reference_terms import UserHandle
from rpc.wire.control import (
    Accepted,
    Delete,
    Leaving,
    Passage,
    Passed,
    Probe,
    Quiet,
    Ready,
    Register,
)
from tests.simulation.group import steps
from tests.simulation.group.packets import Batch, Job, Packet, SimReply, SimRequest
from tests.simulation.group.steps import Act, Addressing, Name, RunPhase
from tests.simulation.group.worker import SimWorker
from tests.simulation.group.world import World

_T = TypeVar("_T")
_TIMEOUTS = (0.0, 0.0, 0.004, 0.1, 1.0, 30.0)
_PASSES = (0.001, 1 / 64, 0.11, 0.5, 40.0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The limits of what may happen in a run.

    Args:
        workers: at least and at most so many at the start.
        steps: at least and at most so many before everything is left to settle.
        crashes: processes die, and return in a new life.
        joins: new workers come.
        cuts: links between living workers break for good.
        partitions: for a while nothing passes between two parts of the group.
        duplicates: replies and control messages come twice.
        timeouts: calls have deadlines, and time passes.
        unsent: some requests cannot be sent.
        leave_while_working: some programs shut down while others go on.
        sleepers: processes are stopped for a while, also between a decision and what they send
            for it; the others may take them for lost meanwhile.
    """

    workers: tuple[int, int] = (2, 4)
    steps: tuple[int, int] = (20, 160)
    crashes: bool = True
    joins: bool = True
    cuts: bool = True
    partitions: bool = True
    duplicates: bool = True
    timeouts: bool = True
    unsent: bool = True
    leave_while_working: bool = True
    sleepers: bool = True


def _is_between(passed: Passed) -> bool:
    """True if whoever passed a reference on has it from somebody else."""
    return passed.fork.life != passed.reference.rref.life


class Generator:
    """Draws a run.

    Args:
        seed: decides everything.
        scenario: within these limits.
    """

    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.random = random.Random(seed)
        self.scenario = scenario
        draw = self.random
        self.size = draw.randint(*scenario.workers)
        self.length = draw.randint(*scenario.steps)
        self.leaves = scenario.leave_while_working and draw.random() < 0.4
        if draw.random() < 0.4:  # a short run has the rare things of its end as often
            self.length = min(self.length, draw.randint(3, 25))
        self._choose_faults()
        self.stops = random.Random(f"sleepers {seed}").choice(
            (0, 0, 1, 4) if scenario.sleepers else (0,)
        )
        if self.malice:  # who is struck must have something from somebody else
            self.length = max(self.length, scenario.steps[1] // 2)
        self._plot: Iterator[Act] = iter(())
        self._is_lurking = False
        self._choose_habits()

    def _sometimes(self, allowed: bool, *rates: float) -> float:
        return self.random.choice(rates) if allowed else 0.0

    def _choose_faults(self) -> None:
        scenario = self.scenario
        self.crashes = self._sometimes(scenario.crashes, 0, 0, 0.5, 2)
        self.cuts = self._sometimes(scenario.cuts and not self.leaves, 0, 0, 0, 1)
        self.joins = self._sometimes(scenario.joins, 0, 0, 1)
        self.malice = self._sometimes(self.crashes > 0, 0, 0.03, 0.1)
        self.partitions = self._sometimes(scenario.partitions, 0, 0, 2)
        self.duplicates = self._sometimes(scenario.duplicates, 0, 4)
        self.unsent = self._sometimes(scenario.unsent, 0, 0.1)
        self.timeouts = self._sometimes(scenario.timeouts, 0, 0.3, 0.8)
        self.stray = self._sometimes(scenario.duplicates, 0, 1)

    def _choose_habits(self) -> None:
        draw = self.random
        usual: tuple[tuple[Callable[[SimWorker], Act | None], float], ...] = (
            (self._create, 12),
            (self._keep, 4),
            (self._call, 40),
            (self._fetch, 8),
            (self._serve, 40),
            (self._drop, 12),
            (self._try, draw.choice((0, 0, 20))),
            (self._cancel, draw.choice((0, 0, 6))),
        )
        self._actions = [act for act, _ in usual]
        self._weights = [weight * draw.choice((0.2, 1, 1, 3)) for _, weight in usual]
        faults: tuple[tuple[Callable[[World], Act | None], float], ...] = (
            (self._pass, 3 if self.timeouts else 0),
            (self._crash, self.crashes),
            (self._return, 4 if self.crashes else 0),
            (self._join, self.joins),
            (self._stop, self.stops),
            (self._declare, self.stops),
            (self._wake, self.stops / 2),
            (self._depart, self.stops / 4),
            (self._cut, self.cuts),
            (self._lose, self.cuts),
            (self._divide, self.partitions),
            (self._duplicate, self.duplicates),
            (self._stray, self.stray),
            (self._fail, 6 if self.unsent else 0),
            (self._begin, 3 if self.leaves else 0),
            (self._end, 3 if self.leaves else 0),
            (self._release, draw.choice((0, 0, 0, 0.5))),
        )
        chosen = [(act, weight) for act, weight in faults if weight]
        self._faults = [act for act, _ in chosen]
        self._fault_weights = [weight for _, weight in chosen]
        self._fault_rate = min(0.3, sum(self._fault_weights) / 100)
        self._delivery_rate = draw.choice((0.2, 0.5, 0.7))
        self._slow_kinds: tuple[type, ...] = draw.choice(
            (
                (),
                (SimRequest,),
                (Register,),
                (Register, SimRequest),
                (Register, SimReply),
                (Delete,),
                (SimReply,),
                (Accepted, SimReply),
                (Probe,),
                (Ready, Quiet, Leaving),
            )
        )
        links = [(source, to) for source in range(4) for to in range(4)]
        self._slow_links = frozenset(draw.sample(links, draw.choice((0, 1, 2, 4))))
        self._slow_news = draw.choice((0.0, 0.9))
        self._keep_rate = 0.95 if self.malice else draw.choice((0.4, 0.9))
        self._drop_after_sharing = draw.choice((0, 0.6, 1))
        self._patience = draw.choice((0.2, 0.9))
        late = draw.choice((0, 20, 60)) if self.scenario.crashes else 0
        self._late_faults = late if self.scenario.joins else 0
        if self.stops and not self._late_faults and draw.random() < 0.5:
            self._late_faults = 20
        self._nesting = draw.choice((0.0, 0.0, 0.3))

    # --- Choices

    def next_act(self, world: World) -> Act | None:
        """Draws what happens next while programs work."""
        if not world.living:
            return None
        draw = self.random.random
        planned = next(self._plot, None)
        if planned is not None:
            return planned
        if self._is_lurking or draw() < self.malice:
            blow = self._strike(world)
            self._is_lurking = blow is None
            if blow is not None:
                return blow
        if draw() < self._fault_rate:
            fault = self.random.choices(self._faults, self._fault_weights)[0]
            return fault(world)
        if (world.network or world.news) and draw() < self._delivery_rate:
            return self._something_under_way(world)
        action = self.random.choices(self._actions, self._weights)[0]
        return action(self._pick(world.living.values()))

    def settling_act(self, world: World, phase: RunPhase) -> Act | None:
        """Something that still has to happen while everything comes to rest."""
        if not world.living:
            return None
        if self._late_faults and (self.leaves or phase is RunPhase.LEAVE):
            self._late_faults -= 1
            return self._late_fault(world)
        if self.random.random() < 0.2:
            demanded = self._demanded(world, phase)
            if demanded is not None:
                return demanded
        jobs = [(w, job) for w in world.living.values() for job in w.jobs.values() if w.ready(job)]
        if jobs and self.random.random() < 0.3:
            return self._serve_job(*self.random.choice(jobs))
        return self._something_under_way(world, patient=False)

    def _late_fault(self, world: World) -> Act | None:
        """Something that happens while everybody shuts down."""
        if self.random.random() < 0.8:
            return self._something_under_way(world, patient=False)
        faults = [self._crash, self._crash, self._return, self._join] if self.crashes else []
        if self.stops:
            faults += [self._stop, self._stop, self._declare, self._declare, self._wake]
        return self.random.choice(faults or [self._wake])(world)

    def _demanded(self, world: World, phase: RunPhase) -> Act | None:
        worker = self._pick(world.living.values())
        if phase is RunPhase.DROP:
            return steps.Release(worker.life) if self.random.random() < 0.1 else self._drop(worker)
        return steps.Begin(worker.life) if phase is RunPhase.LEAVE or self.leaves else None

    def _pick(self, things: Iterable[_T]) -> _T:
        return self.random.choice(list(things))

    def _something_under_way(self, world: World, *, patient: bool = True) -> Act | None:
        packets, news = list(world.network), list(world.news)
        slow = self._slow_news if patient else 0.5
        if news and (not packets or self.random.random() >= slow):
            heard = world.news[self._pick(news)]
            if world.audible(heard):
                return steps.Hear(heard.name)
        if not patient:
            packets = [name for name in packets if world.deliverable(world.network[name])]
            if not packets:
                audible = [item for item in world.news.values() if world.audible(item)]
                return steps.Hear(self._pick(audible).name) if audible else None
        for _ in range(5):
            if not packets:
                return None
            packet = world.network[self.random.choice(packets)]
            if not self._is_slow(packet):
                break
        return steps.Deliver(packet.name)

    def _is_slow(self, packet: Packet) -> bool:
        """Any packet may be next; slow ones seldom are."""
        if (packet.source.worker, packet.to.worker) in self._slow_links:
            return True
        bodies: tuple[object, ...] = (packet.body,)
        if isinstance(packet.body, Batch):
            bodies = packet.body.messages
        return any(isinstance(body, self._slow_kinds) for body in bodies)

    # --- Programs

    def _job_of(self, worker: SimWorker) -> Job | None:
        """Draws the handler that acts, if one does."""
        if worker.jobs and (worker.begun or self.random.random() < self._nesting):
            return self._pick(worker.jobs.values())
        return None

    def _member(self, worker: SimWorker) -> int:
        others = [worker_id for worker_id in worker.view if worker_id != worker.life.worker]
        return self.random.choice([*others * 5, worker.life.worker])

    def _timeout(self) -> float:
        return self.random.choice(_TIMEOUTS) if self.random.random() < self.timeouts else 0.0

    def _leaves(self) -> bool:
        return self.random.random() >= self.unsent

    def _create(self, worker: SimWorker) -> Act | None:
        job = self._job_of(worker)
        name = job.name if job is not None else None
        to = self._member(worker)
        return steps.Create(worker.life, to, self._timeout(), self._leaves(), name)

    def _keep(self, worker: SimWorker) -> Act | None:
        return steps.Keep(worker.life)

    def _call(self, worker: SimWorker) -> Act | None:
        job = self._job_of(worker)
        lends = self._some_handles(worker)
        if job is not None and self.random.random() < 0.3:
            to = job.sender.worker
        elif self.random.random() < 0.03:
            to = self.random.randrange(self.size + 2)
        else:
            to = self._member(worker)
        return steps.CallWorker(
            worker.life,
            to,
            self.random.choice(tuple(Addressing)),
            lends,
            self._of(lends, self._drop_after_sharing),
            self._timeout(),
            self._leaves(),
            job.name if job is not None else None,
            self.random.random() < 0.5,
            self.random.random() < self._patience,
        )

    def _some_handles(self, worker: SimWorker) -> tuple[Name, ...]:
        count = self.random.choice((0, 1, 1, 2))
        users = [
            name
            for name, handle in worker.handles.items()
            if isinstance(handle, UserHandle) and worker.references.failure(handle) is None
        ]
        if self.malice and self.random.random() < 0.7:
            given = [n for n in users if worker.handles[n].reference.rref.life != worker.life]
            users = given or users
        if self.random.random() < 0.1:
            users = list(worker.handles)  # those that failed, too
        candidates = users if users and self.random.random() < 0.7 else list(worker.handles)
        recent = candidates[-self.random.choice((1, 100)) :]
        return tuple(self.random.sample(recent, min(count, len(recent))))

    def _of(self, names: tuple[Name, ...], rate: float) -> tuple[Name, ...]:
        return tuple(name for name in names if self.random.random() < rate)

    def _try(self, worker: SimWorker) -> Act | None:
        timeout = self._timeout()
        still_open = [number for number, is_open in worker.tries.items() if is_open]
        if still_open and self.random.random() < 0.6:
            number = self.random.choice(still_open)
            return steps.Try(worker.life, self._member(worker), timeout, number)
        return steps.Try(worker.life, self._member(worker), timeout, None)

    def _cancel(self, worker: SimWorker) -> Act | None:
        waiting = [record.name for record in worker.records.values() if record.leaves]
        return steps.CancelCall(worker.life, self.random.choice(waiting)) if waiting else None

    def _fetch(self, worker: SimWorker) -> Act | None:
        users = [name for name, h in worker.handles.items() if isinstance(h, UserHandle)]
        if not users:
            return None
        return steps.Fetch(worker.life, self.random.choice(users), self._timeout())

    def _drop(self, worker: SimWorker) -> Act | None:
        if not worker.handles:
            return None
        return steps.Drop(worker.life, self._pick(worker.handles))

    def _serve(self, worker: SimWorker) -> Act | None:
        ready = [job for job in worker.jobs.values() if worker.ready(job)]
        return self._serve_job(worker, self.random.choice(ready)) if ready else None

    def _serve_job(self, worker: SimWorker, job: Job) -> Act:
        keeps = self._of(tuple(job.handles), self._keep_rate)
        returns = self._some_handles(worker)
        drops = self._of(returns, self._drop_after_sharing)
        if keeps and self.random.random() < 0.3:
            returns += keeps[:1]
        return steps.Serve(worker.life, job.name, keeps, returns, drops, self.random.random() < 0.1)

    # --- Faults

    def _strike(self, world: World) -> Act | None:
        """Kills whom it hurts most: the parent of a fork that has yet to register.

        Best one that neither made nor owns the value, and may be all that keeps it alive.
        """
        flying = [
            (packet, passed)
            for packet in world.network.values()
            for passed in packet.references()
            if passed.passage is Passage.CHILD
        ]
        if not flying:
            return None
        between = [each for each in flying if _is_between(each[1])]
        if not between and self.random.random() < 0.97:
            return None
        packet, passed = self.random.choice(between or flying)
        self._plot = self._plot_against(world, packet, passed)
        return steps.Crash(passed.fork.life)

    @staticmethod
    def _plot_against(world: World, packet: Packet, passed: Passed) -> Iterator[Act]:
        """The others let go of the value, too, and the owner hears of all that first."""
        owner, child = passed.reference.owner, packet.source
        if packet.to != owner:
            child = packet.to
            yield steps.Deliver(packet.name)
        for worker in list(world.living.values()):
            for name, handle in list(worker.handles.items()):
                if handle.reference == passed.reference and worker.life != child:
                    yield steps.Drop(worker.life, name)
        for news in list(world.news.values()):
            if (news.listener, news.about) == (owner, passed.fork.life):
                yield steps.Hear(news.name)
        for other in list(world.network.values()):
            if other.to == owner and other.source != child:
                yield steps.Deliver(other.name)

    def _crash(self, world: World) -> Act | None:
        return steps.Crash(self._pick(world.living))

    def _stop(self, world: World) -> Act | None:
        sends = self.random.choice((None, 0, 0, 1, 2))
        return steps.Stop(self._pick(world.living), sends, self.random.random() < 0.5)

    def _declare(self, world: World) -> Act | None:
        return self._of_a_sleeper(world, steps.Declare)

    def _wake(self, world: World) -> Act | None:
        return self._of_a_sleeper(world, steps.Wake)

    def _of_a_sleeper(self, world: World, act: Callable[[Life], Act]) -> Act | None:
        asleep = [worker.life for worker in world.living.values() if worker.asleep]
        return act(self.random.choice(asleep)) if asleep else None

    def _depart(self, world: World) -> Act | None:
        leaving = [w.life for w in world.living.values() if w.is_expelled and not w.handles]
        return steps.Depart(self.random.choice(leaving)) if leaving else None

    def _return(self, world: World) -> Act | None:
        there = world.living.keys() - world.expelled
        dead = [worker for worker, life in world.latest.items() if life not in there]
        return steps.Start(self.random.choice(dead)) if dead else None

    def _join(self, world: World) -> Act | None:
        return steps.Start(len(world.latest)) if len(world.latest) < self.size + 2 else None

    def _two(self, world: World) -> tuple[Life, Life] | None:
        living = list(world.living)
        if len(living) < 2:
            return None
        one, other = self.random.sample(living, 2)
        return one, other

    def _cut(self, world: World) -> Act | None:
        pair = self._two(world)
        return steps.Cut(*pair) if pair else None

    def _lose(self, world: World) -> Act | None:
        dead = [p.name for p in world.network.values() if p.source not in world.living]
        if dead:
            return steps.Lose(self.random.choice(dead))
        return steps.Lose(self._pick(world.network)) if world.network else None

    def _divide(self, world: World) -> Act | None:
        if world.island:
            return steps.Heal()
        ids = sorted(life.worker for life in world.living)
        return steps.Partition(frozenset(self.random.sample(ids, len(ids) // 2)))

    def _duplicate(self, world: World) -> Act | None:
        return steps.Duplicate(self._pick(world.network)) if world.network else None

    def _stray(self, world: World) -> Act | None:
        replies = [p.name for p in world.network.values() if isinstance(p.body, SimReply)]
        if not replies:
            return None
        return steps.Stray(self.random.choice(replies), self._pick(world.living))

    def _fail(self, world: World) -> Act | None:
        failing = [
            (worker.life, record.name)
            for worker in world.living.values()
            for record in worker.records.values()
            if not record.leaves
        ]
        return steps.Fail(*self.random.choice(failing)) if failing else None

    def _pass(self, world: World) -> Act | None:
        return steps.Pass(self.random.choice(_PASSES))

    def _begin(self, world: World) -> Act | None:
        return steps.Begin(self._pick(world.living))

    def _end(self, world: World) -> Act | None:
        finished = [worker.life for worker in world.living.values() if worker.finished]
        return steps.Close(self.random.choice(finished)) if finished else None

    def _release(self, world: World) -> Act | None:
        return steps.Release(self._pick(world.living))
