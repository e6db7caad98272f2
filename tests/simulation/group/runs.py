"""Plays one run from its seed, or again from its script; ends it with the checks.

A run works, settles, drops its references, settles, and shuts down. Every step
is written into the script, so that the script alone plays the same run again.
When a script has no more to say, what is left is carried out in the order in
which it came to be: so every part of a script is a script, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulation.group import steps
from tests.simulation.group.at_rest import AtRest
from tests.simulation.group.generator import Generator, Scenario
from tests.simulation.group.rules import Rule, RuleBrokenError, broken_by, require
from tests.simulation.group.steps import Act, RunPhase, Step
from tests.simulation.group.worker import Machines
from tests.simulation.group.world import World

_MOST_STEPS = 20_000
_UNWRITTEN = 1_000_000


@dataclass(frozen=True, slots=True)
class Script:
    """A run as data, which plays it again.

    Args:
        size: workers at the start.
        leaves: everybody shuts down when work is over, whoever still holds what.
        steps: what happens.
    """

    size: int
    leaves: bool
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """The result of a run.

    Args:
        script: what happened.
        broken: the rule that did not hold, if one did not.
        messages: how many were sent.
    """

    script: Script
    broken: RuleBrokenError | None
    messages: int


def draw(seed: int, scenario: Scenario, machines: Machines) -> Played:
    """Plays the run of a seed."""
    generator = Generator(seed, scenario)
    written: list[Step] = []
    world = World(machines, generator.size)
    run = _RunCourse(world, generator.leaves, 0, written)

    def choose(phase: RunPhase) -> Act | None:
        if phase is not RunPhase.WORK:
            wanted = outstanding(world, phase, generator.leaves)
            return None if wanted is None else generator.settling_act(world, phase) or wanted
        return generator.next_act(world)

    def work() -> None:
        for _ in range(generator.length):
            act = choose(RunPhase.WORK)
            if act is not None:
                run.do(RunPhase.WORK, act)

    broken = run.play(work, choose)
    return Played(Script(generator.size, generator.leaves, tuple(written)), broken, world.messages)


def replay(script: Script, machines: Machines, transcript: list[str] | None = None) -> Played:
    """Plays a script."""
    world = World(machines, script.size, transcript)
    run = _RunCourse(world, script.leaves, _UNWRITTEN, [])
    left = {phase: [s for s in script.steps if s.phase is phase][::-1] for phase in RunPhase}

    def choose(phase: RunPhase) -> Act | None:
        while left[phase]:
            run.apply(left[phase].pop())
        return outstanding(world, phase, script.leaves)

    def work() -> None:
        while left[RunPhase.WORK]:
            run.apply(left[RunPhase.WORK].pop())

    broken = run.play(work, choose)
    return Played(script, broken, world.messages)


class _RunCourse:
    """The course that every run takes."""

    def __init__(self, world: World, leaves: bool, first: int, written: list[Step]) -> None:
        self._world = world
        self._leaves = leaves
        self._written = written
        self._number = first
        self._done = 0

    def do(self, phase: RunPhase, act: Act) -> None:
        """Carries out an act and writes it down."""
        self._number += 1
        step = Step(self._number, phase, act)
        self._written.append(step)
        self.apply(step)

    def apply(self, step: Step) -> None:
        """Carries out a step."""
        self._done += 1
        ends = self._done <= _MOST_STEPS
        require(ends, Rule.QUIESCENCE, "still at work after", self._done, "steps")
        self._world.apply(step)

    def play(
        self, work: Callable[[], None], choose: Callable[[RunPhase], Act | None]
    ) -> RuleBrokenError | None:
        """Goes through all phases; returns the rule that was broken, if one was."""

        def all_of_it() -> None:
            work()
            self._end(choose)

        return broken_by(all_of_it)

    def _end(self, choose: Callable[[RunPhase], Act | None]) -> None:
        rest = AtRest(self._world)
        self._settle(RunPhase.SETTLE, choose)
        if self._leaves:
            self._world.shutdowns.check_everybody_left()
            return
        rest.check_settled()
        self._settle(RunPhase.DROP, choose)
        rest.check_settled()
        rest.check_empty()
        if not self._world.cut:
            self._settle(RunPhase.LEAVE, choose)
            self._world.shutdowns.check_everybody_left()

    def _settle(self, phase: RunPhase, choose: Callable[[RunPhase], Act | None]) -> None:
        while (act := choose(phase)) is not None:
            self.do(phase, act)


def outstanding(world: World, phase: RunPhase, leaves: bool) -> Act | None:
    """The oldest thing that still has to happen in a phase; None when it is over."""
    if world.island:
        return steps.Heal()
    return (
        _under_way(world)
        or _unfinished(world)
        or _of_sleepers(world)
        or _demanded(world, phase, leaves)
    )


def _under_way(world: World) -> Act | None:
    for news in world.news.values():
        if world.audible(news):
            return steps.Hear(news.name)
    for packet in world.network.values():
        if world.deliverable(packet):
            return steps.Deliver(packet.name)
    return None


def _of_sleepers(world: World) -> Act | None:
    """Wakes those that are stopped; those that were declared lost let go of all and end."""
    for worker in world.living.values():
        if worker.asleep:
            return steps.Wake(worker.life)
        if worker.is_late:
            return steps.Pulse(worker.life)
        if worker.is_expelled:
            name = next(iter(worker.handles), None)
            return steps.Depart(worker.life) if name is None else steps.Drop(worker.life, name)
    return None


def _unfinished(world: World) -> Act | None:
    for worker in world.living.values():
        if worker.asleep:
            continue
        for job in worker.jobs.values():
            if worker.ready(job):
                return steps.Serve(worker.life, job.name, (), (), (), raises=False)
        for record in worker.records.values():
            if not record.leaves:
                return steps.Fail(worker.life, record.name)
        if worker.finished:
            return steps.Close(worker.life)
    return None


def _demanded(world: World, phase: RunPhase, leaves: bool) -> Act | None:
    """Returns what a phase asks of a program that has not done it."""
    for worker in world.living.values():
        if phase is RunPhase.DROP and worker.handles:
            return steps.Drop(worker.life, next(iter(worker.handles)))
        if (leaves or phase is RunPhase.LEAVE) and not worker.begun:
            return steps.Begin(worker.life)
    return None
