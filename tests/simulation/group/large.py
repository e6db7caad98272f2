"""Plays one large group without faults, to see what a worker costs when there are many."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.simulation.group import steps
from tests.simulation.group.at_rest import AtRest
from tests.simulation.group.runs import outstanding
from tests.simulation.group.steps import Act, Addressing, RunPhase, Step
from tests.simulation.group.worker import Machines, SimWorker
from tests.simulation.group.world import World

_FRIENDS = (1, 7)


@dataclass(frozen=True, slots=True)
class GroupReport:
    """The cost of a large group.

    Args:
        workers: how many there were.
        sharing: messages it took to make, pass on and fetch references.
        dissolving: messages it took to shut down, the last references included.
        seconds: how long it took to play, on one core for all workers.
    """

    workers: int
    sharing: int
    dissolving: int
    seconds: float

    @property
    def messages_per_worker(self) -> float:
        """Messages that one worker sent, on average."""
        return (self.sharing + self.dissolving) / self.workers

    def __str__(self) -> str:
        return (
            f"{self.workers} workers: {self.sharing / self.workers:.2f} messages each to share, "
            f"{self.dissolving / self.workers:.2f} to dissolve ({self.seconds:.1f} s)"
        )


def simulate_group(workers: int, seed: int = 0) -> GroupReport:
    """Forms a group, has everybody share references, and dissolves it, by the rules.

    Every worker makes a value on the next one, passes a reference to it on to
    two others, who fetch the value and keep the reference; then all shut down.

    Args:
        workers: how many.
        seed: decides the order of messages.

    Raises:
        RuleBrokenError: a rule of :class:`rpc.testing.Rule` did not hold.
    """
    began = time.perf_counter()
    group = _Group(workers, seed)
    group.everybody(lambda w: [steps.Create(w.life, group.near(w, 1), 0.0, True, None)])
    group.everybody(lambda w: [_lend(w, group.near(w, friend)) for friend in _FRIENDS])
    group.everybody(lambda w: [steps.Fetch(w.life, name, 0.0) for name in w.handles])
    AtRest(group.world).check_settled()
    shared = group.world.messages
    group.everybody(lambda w: [steps.Begin(w.life)])
    group.world.shutdowns.check_everybody_left()
    dissolving = group.world.messages - shared
    return GroupReport(workers, shared, dissolving, time.perf_counter() - began)


def _lend(worker: SimWorker, to: int) -> Act:
    lends = tuple(worker.handles)[:1]
    return steps.CallWorker(
        worker.life, to, Addressing.ID, lends, (), 0.0, True, None, waits=False, patient=True
    )


class _Group:
    """A world, and a way to keep all of it busy."""

    def __init__(self, size: int, seed: int) -> None:
        self.world = World(Machines(), size)
        self._size = size
        self._random = random.Random(seed)
        self._number = 0

    def near(self, worker: SimWorker, steps_away: int) -> int:
        """The id of a worker some places further on."""
        return (worker.life.worker + steps_away) % self._size

    def everybody(self, program: Callable[[SimWorker], Iterable[Act]]) -> None:
        """Has every worker do something, and waits until nothing is under way."""
        acts = [act for worker in self.world.living.values() for act in program(worker)]
        self._random.shuffle(acts)
        for act in acts:
            self._do(act)
        while acts := self._under_way():
            for act in acts:
                self._do(act)

    def _do(self, act: Act) -> None:
        self._number += 1
        self.world.apply(Step(self._number, RunPhase.WORK, act))

    def _under_way(self) -> list[Act]:
        """The acts that can happen now, in any order."""
        world = self.world
        acts: list[Act] = [steps.Deliver(name) for name in world.network]
        acts += [steps.Hear(name) for name in world.news]
        for worker in world.living.values():
            for job in worker.jobs.values():
                keeps = tuple(job.handles)
                acts.append(steps.Serve(worker.life, job.name, keeps, (), (), raises=False))
        self._random.shuffle(acts)
        if not acts:
            acts = [steps.Close(w.life) for w in world.living.values() if w.finished]
        return acts if acts else [a for a in [outstanding(world, RunPhase.WORK, False)] if a]
