"""Says from what was done and what the workers told whether all went as it should. Pure.

The bound of a wait is the liveness timeout plus ``grace``: what a loaded machine, and an
interpreter that shares one lock among all threads of a worker, may need on top.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chaos.events import Event, What
from chaos.plan import Fault, Kind

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What is allowed.

    Args:
        bound: the liveness timeout in seconds.
        grace: seconds on top of it.
        recovery: seconds from a fault until its victim, started again, is back.
        rss: bytes by which the witness may grow after the first fifth.
    """

    bound: float
    grace: float = 5.0
    recovery: float = 40.0
    rss: int = 20 * _MIB


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault. Seconds after it; None if it did not happen.

    Args:
        fault: what was done; ``at`` is absolute here.
        error: until the first error at a caller that names the victim.
        lost: until the last survivor was told of the loss.
        back: until the victim had joined again.
    """

    fault: Fault
    error: float | None
    lost: float | None
    back: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The judgement.

    Args:
        outcomes: of each fault.
        steps: training steps made by all.
        growth: bytes by which the witness grew after the first fifth.
        violations: what should not have been, in words.
    """

    outcomes: list[Outcome]
    steps: int
    growth: int
    violations: list[str]


def judge(
    faults: Sequence[Fault], events: Iterable[Event], witness: str, end: float, limits: Limits
) -> Report:
    """Judges a run.

    Args:
        faults: what was done, at absolute times.
        events: what the workers told, in any order.
        witness: the worker that nothing was done to.
        end: when the run ended.
        limits: what is allowed.
    """
    told: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        told[event.who].append(event)
    outcomes = [_outcome(fault, told, _next_at(fault, faults, end)) for fault in faults]
    growth = _growth(told[witness])
    violations = [
        *(problem for outcome in outcomes for problem in _problems(outcome, end, limits)),
        *_stalls(told[witness], end, limits),
    ]
    if growth > limits.rss:
        violations.append(f"{witness} grew by {growth / _MIB:.1f} MiB after the first fifth")
    steps = sum(event.what is What.STEP for events in told.values() for event in events)
    return Report(outcomes, steps, growth, violations)


def _next_at(fault: Fault, faults: Sequence[Fault], end: float) -> float:
    return min((other.at for other in faults if other.at > fault.at), default=end)


def _outcome(fault: Fault, told: dict[str, list[Event]], until: float) -> Outcome:
    def first(events: Iterable[Event], what: What, name: str) -> float | None:
        found = (e.at - fault.at for e in events if e.what is what and e.name == name)
        return next((seconds for seconds in found if seconds >= 0), None)

    others = [
        [e for e in events if fault.at <= e.at < until]
        for who, events in told.items()
        if who != fault.victim
    ]
    errors = [first(events, What.ERROR, fault.victim) for events in others]
    losses = [first(events, What.LOST, fault.victim) for events in others]
    seen = [seconds for seconds in errors if seconds is not None]
    noticed = [seconds for seconds in losses if seconds is not None]
    back = first(told[fault.victim], What.JOINED, "")
    return Outcome(fault, min(seen, default=None), max(noticed, default=None), back)


def _problems(outcome: Outcome, end: float, limits: Limits) -> Iterable[str]:
    fault = outcome.fault
    what = f"{fault.kind.value} of {fault.victim}"
    allowed = limits.bound + limits.grace
    if outcome.lost is None:
        yield f"{what}: no survivor was told of the loss"
    elif outcome.lost > allowed:
        yield f"{what}: a survivor was told only after {outcome.lost:.1f} s"
    if outcome.error is not None and outcome.error > allowed:
        yield f"{what}: a call failed only after {outcome.error:.1f} s"
    if fault.at + limits.recovery < end and (
        outcome.back is None or outcome.back > limits.recovery
    ):
        yield f"{what}: it did not come back within {limits.recovery:g} s"


def _stalls(events: Sequence[Event], end: float, limits: Limits) -> Iterable[str]:
    """A survivor steps, or sees an error, all the time."""
    alive = [e.at for e in events if e.what in (What.STEP, What.ERROR, What.JOINED)]
    for before, after in zip(alive, [*alive[1:], end], strict=True):
        if after - before > limits.bound + limits.grace + 5.0:
            yield f"the witness neither stepped nor saw an error for {after - before:.1f} s"


def _growth(events: Sequence[Event]) -> int:
    sizes = [e.vitals.rss for e in events if e.vitals is not None]
    later = sizes[len(sizes) // 5 :]
    return max(later) - later[0] if later else 0


def describe(report: Report) -> str:
    """The report as text."""
    lines = [
        f"{'what was done':<14}{'times':>6}{'error at a caller':>26}{'all told':>20}{'back':>9}"
    ]
    for kind in Kind:
        rows = [outcome for outcome in report.outcomes if outcome.fault.kind is kind]
        if rows:
            lines.append(
                f"{kind.value:<14}{len(rows):>6}{_span([r.error for r in rows]):>26}"
                f"{_span([r.lost for r in rows]):>20}{_middle([r.back for r in rows]):>9}"
            )
    lines.append(f"{report.steps} steps; the witness grew by {report.growth / _MIB:.1f} MiB")
    lines += [f"VIOLATION: {problem}" for problem in report.violations] or ["nothing was violated"]
    return "\n".join(lines)


def _span(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.2f} s (≤ {max(known):.2f})"


def _middle(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} s" if known else "-"
