"""The judge finds violations in what the workers of a run told."""

from __future__ import annotations

from collections.abc import Callable
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


def test_connections_that_are_opened_again_are_no_loss_if_work_goes_on() -> None:
    cut = Fault(100.0, Kind.CUT, "server")
    resumed = without(without(good_run(), What.LOST), What.JOINED)
    assert judge([cut], resumed, "w", END, LIMITS, called="server").violations == [
        "cut off of server: nobody was told of a loss, and nothing went on"
    ]
    at_once = [*resumed, Event(100.4, "w", What.STEP)]
    report = judge([cut], at_once, "w", END, LIMITS, called="server")
    assert report.violations == []
    assert "went on  0.40 s" in describe(report)


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


def test_a_call_to_the_one_that_all_call_must_fail() -> None:
    silent = without(good_run(), What.ERROR)
    assert violations(silent) == []
    assert judge([FAULT], silent, "w", END, LIMITS, called="server").violations == [
        "SIGSTOP of server: no call to it failed"
    ]


def test_calls_beside_the_training_that_fail_count_as_noticed() -> None:
    beside = [replace(e, what=What.FAILED) if e.what is What.ERROR else e for e in good_run()]
    report = judge([FAULT], beside, "w", END, LIMITS, called="server")
    assert report.violations == []
    assert report.outcomes[0].error == 1.5


def test_what_must_not_happen_to_any_worker() -> None:
    assert violations(
        [*good_run(), Event(158.0, "other", What.WRONG, text="3 calls ran twice")]
    ) == ["other: 3 calls ran twice"]


def holding(threads: Callable[[float], int]) -> list[Event]:
    """The good run, with so many threads, descriptors and segments at each time."""
    return [
        replace(e, vitals=Vitals(100 * MIB, threads(e.at), 2 * threads(e.at), 5))
        if e.vitals is not None
        else e
        for e in good_run()
    ]


def test_threads_and_descriptors_that_become_more_and_more() -> None:
    assert violations(holding(lambda at: 10 + int(at) // 10)) == [
        "w had 19 threads after the first fifth, then 25",
        "w had 38 descriptors after the first fifth, then 50",
    ]


def test_what_is_held_for_a_while_after_a_fault_is_no_leak() -> None:
    assert violations(holding(lambda at: 30 if 100 <= at < 120 else 10)) == []


def test_what_a_pool_grew_at_first_is_no_leak() -> None:
    assert violations(holding(lambda at: 3 if at < 30 else 10)) == []


def test_the_report_tells_each_fault_and_what_the_witness_held() -> None:
    text = describe(judge([FAULT], good_run(), "w", END, LIMITS))
    assert "SIGSTOP of server    error  1.50 s, all told  1.90 s, back  4.00 s" in text
    assert "its threads 9 -> 9, descriptors 9 -> 9, shared memory 0 -> 0" in text


def test_events_survive_their_line() -> None:
    for event in good_run():
        assert Event.decode(event.encode()) == event
