"""What counts as a violation, from what the workers of a run told."""

from __future__ import annotations

from dataclasses import replace

from chaos.events import Event, Vitals, What
from chaos.judge import Limits, describe, judge
from chaos.plan import Fault, Kind

MIB = 1 << 20
FAULT = Fault(100.0, Kind.STOP, "server")
LIMITS = Limits(bound=2.0, grace=1.0, recovery=20.0, rss=20 * MIB)
END = 160.0


def good_run() -> list[Event]:
    """The witness steps all the time, except between a fault and its victim's return."""
    witness = [Event(0.5 * i, "w", What.STEP) for i in range(320) if not 100 <= 0.5 * i <= 104]
    memory = [Event(1.0 * i, "w", What.VITALS, vitals=Vitals(100 * MIB, 9, 9)) for i in range(160)]
    return [
        *witness,
        *memory,
        Event(101.5, "w", What.ERROR, "server", "WorkerLostError: …"),
        Event(101.6, "w", What.LOST, "server"),
        Event(101.9, "other", What.LOST, "server"),
        Event(104.0, "server", What.JOINED),
    ]


def violations(events: list[Event], faults: tuple[Fault, ...] = (FAULT,)) -> list[str]:
    return judge(faults, events, "w", END, LIMITS).violations


def without(events: list[Event], what: What) -> list[Event]:
    return [event for event in events if event.what is not what]


def moved(events: list[Event], what: What, seconds: float) -> list[Event]:
    return [replace(e, at=e.at + seconds) if e.what is what else e for e in events]


def test_a_run_in_which_all_went_well() -> None:
    report = judge([FAULT], good_run(), "w", END, LIMITS)
    assert report.violations == []
    (outcome,) = report.outcomes
    assert (outcome.error, outcome.back) == (1.5, 4.0)
    assert outcome.lost is not None
    assert round(outcome.lost, 6) == 1.9
    assert report.steps == 311
    text = describe(report)
    assert "1.50 s" in text
    assert "nothing was violated" in text


def test_a_loss_that_nobody_was_told_of() -> None:
    assert violations(without(good_run(), What.LOST)) == [
        "SIGSTOP of server: no survivor was told of the loss"
    ]


def test_a_loss_and_an_error_that_came_late() -> None:
    late = moved(moved(good_run(), What.LOST, 9), What.ERROR, 2)
    assert violations(late) == [
        "SIGSTOP of server: a survivor was told only after 10.9 s",
        "SIGSTOP of server: a call failed only after 3.5 s",
    ]


def test_a_victim_that_does_not_come_back() -> None:
    assert violations(without(good_run(), What.JOINED)) == [
        "SIGSTOP of server: it did not come back within 20 s"
    ]


def test_what_follows_the_next_fault_belongs_to_that() -> None:
    second = Fault(101.7, Kind.KILL, "other")
    assert "kill -9 of other: no survivor was told of the loss" in violations(
        good_run(), (FAULT, second)
    )


def test_a_survivor_that_hangs() -> None:
    events = [e for e in good_run() if not (e.what is What.STEP and 120 < e.at < 140)]
    assert violations(events) == ["the witness neither stepped nor saw an error for 20.0 s"]


def test_a_survivor_that_grows() -> None:
    def grown(event: Event) -> Event:
        if event.vitals is None or event.at < 80:
            return event
        return replace(event, vitals=replace(event.vitals, rss=130 * MIB))

    assert violations([grown(e) for e in good_run()]) == [
        "w grew by 30.0 MiB after the first fifth"
    ]


def test_growth_at_the_start_is_allowed() -> None:
    def small(event: Event) -> Event:
        if event.vitals is None or event.at > 20:
            return event
        return replace(event, vitals=replace(event.vitals, rss=10 * MIB))

    assert violations([small(e) for e in good_run()]) == []


def test_events_survive_their_line() -> None:
    for event in good_run():
        assert Event.decode(event.encode()) == event
