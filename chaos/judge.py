"""Says from what was done and what the workers told whether all went as it should. Pure.

The bound of a wait is the liveness timeout plus ``grace``: what a loaded machine, and an
interpreter that shares one lock among all threads of a worker, may need on top.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from chaos.events import Event, Vitals, What
from chaos.plan import Fault, Kind

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what is allowed.

    Args:
        bound: the liveness timeout in seconds.
        grace: seconds on top of it.
        recovery: seconds from a fault until its victim, started again, is back.
        rss: bytes by which the witness may grow after the first fifth.
        more: segments that it may have more at the end than after the first fifth: a pool
            may have grown.
        descriptors: likewise; some connections come and go.
        threads: likewise; those of handlers come with calls and go when idle.
    """

    bound: float
    grace: float = 5.0
    recovery: float = 40.0
    rss: int = 20 * _MIB
    more: int = 2
    descriptors: int = 2
    threads: int = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The consequences of one fault, in seconds after it; None if one did not happen.

    Args:
        fault: what was done; ``at`` is absolute here.
        error: until the first error at a caller that names the victim.
        lost: until the last survivor was told of the loss.
        back: until the victim had joined again.
        on: until the victim, or whoever uses it, made its next step.
    """

    fault: Fault
    error: float | None
    lost: float | None
    back: float | None
    on: float | None = None

    @property
    def is_resumed(self) -> bool:
        """Returns whether connections broke and were opened again, so that nobody was lost."""
        return self.fault.kind is Kind.CUT and self.lost is None


@dataclass(frozen=True, slots=True)
class Report:
    """The judgement.

    Args:
        outcomes: of each fault.
        steps: training steps made by all.
        growth: bytes by which the witness grew after the first fifth.
        held: by the witness before the first fault after the first fifth, and at the end.
        violations: what should not have been, in words.
    """

    outcomes: list[Outcome]
    steps: int
    growth: int
    held: tuple[Vitals, Vitals]
    violations: list[str]


def judge(
    faults: Sequence[Fault],
    events: Iterable[Event],
    witness: str,
    end: float,
    limits: Limits,
    called: str = "",
) -> Report:
    """Judges a run.

    Args:
        faults: what was done, at absolute times.
        events: what the workers told, in any order.
        witness: the worker that nothing was done to.
        end: when the run ended.
        limits: what is allowed.
        called: the worker that the others call all the time: a call fails when it is hit.
    """
    told: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        told[event.who].append(event)
    outcomes = [_outcome(fault, told, _next_at(fault, faults, end)) for fault in faults]
    growth = _growth(told[witness])
    held = _held(told[witness], [fault.at for fault in faults], end)
    violations = [
        *(problem for o in outcomes for problem in _problems(o, end, limits, called)),
        *_stalls(told[witness], end, limits),
        *_leaks(witness, held, limits),
        *(f"{e.who}: {e.text}" for events in told.values() for e in events if e.what is What.WRONG),
    ]
    if growth > limits.rss:
        violations.append(f"{witness} grew by {growth / _MIB:.1f} MiB after the first fifth")
    steps = sum(event.what is What.STEP for events in told.values() for event in events)
    return Report(outcomes, steps, growth, held, violations)


def _next_at(fault: Fault, faults: Sequence[Fault], end: float) -> float:
    return min((other.at for other in faults if other.at > fault.at), default=end)


def _outcome(fault: Fault, told: dict[str, list[Event]], until: float) -> Outcome:
    def first(events: Iterable[Event], what: Container[What], name: str) -> float | None:
        found = (e.at - fault.at for e in events if e.what in what and e.name == name)
        return next((seconds for seconds in found if seconds >= 0), None)

    others = [
        [e for e in events if fault.at <= e.at < until]
        for who, events in told.items()
        if who != fault.victim
    ]
    errors = [first(events, (What.ERROR, What.FAILED), fault.victim) for events in others]
    losses = [first(events, (What.LOST,), fault.victim) for events in others]
    seen = [seconds for seconds in errors if seconds is not None]
    noticed = [seconds for seconds in losses if seconds is not None]
    back = first(told[fault.victim], (What.JOINED,), "")
    steps = [first([e], (What.STEP,), "") for e in _steps(told, fault.victim)]
    on = [seconds for seconds in steps if seconds is not None]
    lost = max(noticed, default=None)
    resumed = fault.kind is Kind.CUT and lost is None
    return Outcome(
        fault, min(seen, default=None), lost, None if resumed else back, min(on, default=None)
    )


def _steps(told: dict[str, list[Event]], victim: str) -> list[Event]:
    """The victim's steps, or everybody's if it makes none."""
    own = [event for event in told[victim] if event.what is What.STEP]
    return own or [e for events in told.values() for e in events if e.what is What.STEP]


def _problems(outcome: Outcome, end: float, limits: Limits, called: str) -> Iterable[str]:
    fault = outcome.fault
    what = f"{fault.kind.value} of {fault.victim}"
    allowed = limits.bound + limits.grace
    if outcome.is_resumed:
        if outcome.on is None or outcome.on > allowed:
            yield f"{what}: nobody was told of a loss, and nothing went on"
        return
    if outcome.lost is None:
        yield f"{what}: no survivor was told of the loss"
    elif outcome.lost > allowed:
        yield f"{what}: a survivor was told only after {outcome.lost:.1f} s"
    if outcome.error is None and fault.victim == called:
        yield f"{what}: no call to it failed"
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


def _held(events: Sequence[Event], faults: Sequence[float], end: float) -> tuple[Vitals, Vitals]:
    """At two moments when everybody is there: the last ones before a fault, or the end."""
    known = [(e.at, e.vitals) for e in events if e.vitals is not None and e.at <= end]
    if not known:
        return Vitals(0, 0, 0), Vitals(0, 0, 0)
    fifth = known[0][0] + (end - known[0][0]) / 5
    calm = [[v for at, v in known if at < moment] for moment in (*faults, end) if moment >= fifth]
    return calm[0][-1], calm[-1][-1]


def _leaks(witness: str, held: tuple[Vitals, Vitals], limits: Limits) -> Iterable[str]:
    more = (limits.threads, limits.descriptors, limits.more)
    names = ("threads", "descriptors", "segments")
    for what, before, after, allowed in zip(names, *map(_counts, held), more, strict=True):
        if after > before + allowed:
            yield f"{witness} had {before} {what} after the first fifth, then {after}"


def describe(report: Report) -> str:
    """The report as text."""
    lines = [_line(outcome, report.outcomes[0].fault.at) for outcome in report.outcomes]
    lines += [
        f"{'what was done':<14}{'times':>6}{'error at a caller':>26}{'all told':>20}{'back':>9}"
    ]
    for kind in Kind:
        rows = [outcome for outcome in report.outcomes if outcome.fault.kind is kind]
        if rows:
            lines.append(
                f"{kind.value:<14}{len(rows):>6}{_span([r.error for r in rows]):>26}"
                f"{_span([r.lost for r in rows]):>20}{_middle([r.back for r in rows]):>9}"
            )
        resumed = [outcome.on for outcome in rows if outcome.is_resumed]
        if resumed:
            lines.append(f"{len(resumed)} of these went on after {_span(resumed)}, nobody was lost")
    lines.append(f"{report.steps} steps; the witness grew by {report.growth / _MIB:.1f} MiB")
    threads, descriptors, segments = (
        f"{first} -> {last}" for first, last in zip(*map(_counts, report.held), strict=True)
    )
    lines.append(f"its threads {threads}, descriptors {descriptors}, shared memory {segments}")
    lines += [f"VIOLATION: {problem}" for problem in report.violations] or ["nothing was violated"]
    return "\n".join(lines)


def _counts(vitals: Vitals) -> tuple[int, int, int]:
    return vitals.threads, vitals.descriptors, vitals.segments


def _line(outcome: Outcome, start: float) -> str:
    """Returns the line about one fault; ``start`` is the time of the first."""
    fault = outcome.fault
    what = f"{fault.kind.value} of {fault.victim}"
    error, lost, back = map(_seconds, (outcome.error, outcome.lost, outcome.back))
    if outcome.is_resumed:
        return f"+{fault.at - start:6.1f} s {what:<20} went on {_seconds(outcome.on)}"
    return f"+{fault.at - start:6.1f} s {what:<20} error {error}, all told {lost}, back {back}"


def _seconds(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:5.2f} s"


def _span(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.2f} s (≤ {max(known):.2f})"


def _middle(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} s" if known else "-"
