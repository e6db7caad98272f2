"""The simulator as tests use it: plays many seeds, and tells a failing one in few lines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from tests.seeded_games import without_pieces
from tests.simulation.group.faults import Fault, Plan, draw_plan
from tests.simulation.group.generator import Scenario
from tests.simulation.group.rules import Rule
from tests.simulation.group.runs import Played, draw, replay
from tests.simulation.group.steps import Step
from tests.simulation.group.watchers import WatcherGroup
from tests.simulation.group.worker import Machines

_MOST_REPLAYS = 2000
_BRIEFLY = (
    (r"GloballyUniqueId\(created_on=(\d+), local_id=(\d+)\)", r"id\1.\2"),
    (r"Life\(worker=(\d+), incarnation=(\d+)\)", r"w\1.\2"),
    (r"worker (\d+) \(incarnation (\d+)\)", r"w\1.\2"),
    (r"Reference\(rref=(id\S+), owner=(w\S+), creation=\d+\)", r"\1 on \2"),
    (r"<\w+\.(\w+): [^>]*>", r"\1"),
)


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The result of many runs.

    Args:
        runs: how many seeds were played.
        steps: what happened in all of them.
        messages: how many were sent.
        seconds: how long it took.
    """

    runs: int = 0
    steps: int = 0
    messages: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.runs / self.seconds if self.seconds else 0.0
        return (
            f"{self.runs} runs, {self.steps} steps, {self.messages} messages: "
            f"every rule held ({self.seconds:.1f} s, {rate:.0f} runs/s)"
        )


class SimulationError(AssertionError):
    """A simulated run broke a rule. Its text has the seed and a shortened transcript.

    Args:
        seed: of the run.
        rule: what did not hold.
        transcript: the shortest run found that breaks the same rule, line by line.
    """

    def __init__(self, seed: int, rule: Rule, transcript: tuple[str, ...]) -> None:
        super().__init__("\n".join((f"seed {seed} breaks a rule: {rule.value}", *transcript)))
        self.seed = seed
        self.rule = rule
        self.transcript = transcript


def simulate(
    seeds: Iterable[int],
    scenario: Scenario | None = None,
    machines: Machines | None = None,
    progress: Callable[[SimulationReport], None] | None = None,
) -> SimulationReport:
    """Plays whole groups of workers, one run for each seed, and holds them to every rule.

    Each run has a network that delays, reorders, duplicates and loses messages
    and comes apart, workers that join, crash and return, calls with deadlines,
    references passed on in every way, and a shutdown at its end. Nothing is
    real but the decisions: no threads, sockets or time. The same seed plays the
    same run, for ever.

    Args:
        seeds: one run for each.
        scenario: what may happen; default everything.
        machines: which decision modules are played; default those of this package.
        progress: called after each run with what was done so far.

    Raises:
        SimulationError: a rule was broken; says which, with the seed and a short
            transcript of a run that breaks it.

    Example::

        from tests.simulation.group import simulate

        def test_a_thousand_runs():
            simulate(range(1000))
    """
    scenario = scenario or Scenario()
    machines = machines or Machines()
    began = time.perf_counter()
    report = SimulationReport()
    for seed in seeds:
        played = draw(seed, scenario, machines)
        if played.broken is not None:
            raise explain(seed, played, machines) from played.broken
        report = SimulationReport(
            report.runs + 1,
            report.steps + len(played.script.steps),
            report.messages + played.messages,
            time.perf_counter() - began,
        )
        if progress is not None:
            progress(report)
    return report


def explain(seed: int, played: Played, machines: Machines) -> SimulationError:
    """The error for a run that broke a rule: shortens it and tells what happens."""
    broken = played.broken
    assert broken is not None

    def still_breaks(steps: tuple[Step, ...]) -> bool:
        again = replay(replace(played.script, steps=steps), machines).broken
        return again is not None and again.rule is broken.rule

    steps = without_pieces(played.script.steps, still_breaks, _MOST_REPLAYS)
    script = replace(played.script, steps=steps)
    transcript: list[str] = [f"{script.size} workers"]
    again = replay(script, machines, transcript).broken or broken
    lines = (*transcript, f"broken: {again.detail}")
    return SimulationError(seed, broken.rule, tuple(map(_brief, lines)))


def simulate_silence(seeds: Iterable[int], machines: Machines | None = None) -> SimulationReport:
    """Plays groups whose workers watch each other for signs of life, one for each seed.

    Workers are stopped and wake, are busy for long, die with and without a trace, are cut
    off and come back, and lose connections. A worker that is silent for longer than the
    bound must be declared lost by all within it, and learn it when it wakes; no other must
    be. The clock is virtual; the same seed plays the same run.

    Args:
        seeds: one run for each.
        machines: which decision modules are played; default those of this package.

    Raises:
        SimulationError: a rule was broken; says which, with the seed and a short
            transcript of a run that breaks it.
    """
    machines = machines or Machines()
    began = time.perf_counter()
    report = SimulationReport()
    for seed in seeds:
        run = WatcherGroup(draw_plan(seed), machines)
        broken = run.run()
        if broken is not None:
            raise _explain_silence(seed, run.plan, broken.rule, machines) from broken
        report = SimulationReport(
            report.runs + 1,
            report.steps + len(run.plan.faults),
            report.messages + run.messages,
            time.perf_counter() - began,
        )
    return report


def _explain_silence(seed: int, plan: Plan, rule: Rule, machines: Machines) -> SimulationError:
    """Leaves out every fault that does not matter, and tells the rest."""

    def still_breaks(faults: tuple[Fault, ...]) -> bool:
        broken = WatcherGroup(replace(plan, faults=faults), machines).run()
        return broken is not None and broken.rule is rule

    plan = replace(plan, faults=without_pieces(plan.faults, still_breaks, _MOST_REPLAYS))
    transcript: list[str] = [f"{plan.size} workers"]
    again = WatcherGroup(plan, machines, transcript).run()
    assert again is not None
    lines = (*transcript, f"broken: {again.detail}")
    return SimulationError(seed, rule, tuple(map(_brief, lines)))


def _brief(line: str) -> str:
    """Shortens the lives and ids in a line."""
    for pattern, short in _BRIEFLY:
        line = re.sub(pattern, short, line)
    return line
