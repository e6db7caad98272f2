"""Outstanding calls end; every transition is tested as the list it returns."""

from __future__ import annotations

import math
import random
import time

import pytest

from rpc.protocol.calls import CallTable, Ended, Ending, OutstandingCall

TICK = 1 / 64


def table(*calls: tuple[str, int, float]) -> tuple[CallTable[str], list[int]]:
    """A table with calls (name, to, timeout) opened at time 100."""
    made: CallTable[str] = CallTable()
    return made, [made.open(name, to, 100.0, timeout) for name, to, timeout in calls]


# --- One transition at a time


def test_a_reply_from_a_worker_that_was_not_called_ends_nothing() -> None:
    calls: CallTable[str] = CallTable()
    a = calls.open("a", to=1, now=0.0, timeout=1.0)
    assert calls.close(a, sender=2) is None
    calls.expire(2.0)
    assert calls.close(a, sender=2) is None
    assert calls.close(a, sender=1) == Ended(Ending.LATE_REPLY, "a")


def test_ids_are_never_used_twice():
    calls, (first, second) = table(("a", 1, 0), ("b", 1, 0))
    calls.close(first)
    assert len({first, second, calls.open("c", 1, 100.0, 0)}) == 3


def test_a_reply_ends_its_call():
    calls, (a, b) = table(("a", 1, 5), ("b", 1, 5))
    assert calls.close(a) == Ended(Ending.REPLY, "a")
    assert calls.close(a) is None
    assert len(calls) == 1
    assert calls.close(b) == Ended(Ending.REPLY, "b")
    assert calls.next_expiry() is None


def test_a_reply_to_nothing_is_ignored():
    calls, _ = table(("a", 1, 5))
    assert calls.close(77) is None
    assert len(calls) == 1


def test_a_deadline_ends_its_call_and_leaves_a_ghost_until_the_late_reply():
    calls, (a,) = table(("a", 1, 5))
    assert calls.expire(105.0) == []
    assert calls.expire(105.0 + TICK) == [Ended(Ending.DEADLINE, "a")]
    assert calls.expire(200.0) == []
    assert [*calls.outstanding()] == []
    assert len(calls) == 1
    assert calls.close(a) == Ended(Ending.LATE_REPLY, "a")
    assert len(calls) == 0
    assert calls.close(a) is None


def test_deadlines_end_calls_in_their_order():
    calls, _ = table(("late", 1, 9), ("early", 1, 5), ("also early", 1, 5), ("never", 1, 0))
    assert calls.expire(1000.0) == [
        Ended(Ending.DEADLINE, "early"),
        Ended(Ending.DEADLINE, "also early"),
        Ended(Ending.DEADLINE, "late"),
    ]
    assert [row.call for row in calls.outstanding()] == ["never"]


def test_a_call_without_a_timeout_has_no_deadline():
    calls, (a,) = table(("a", 1, 0))
    assert calls.next_expiry() is None
    assert calls.expire(1e12) == []
    assert calls.close(a) == Ended(Ending.REPLY, "a")


def test_a_lost_worker_ends_its_calls_and_ghosts_and_no_others():
    calls, ids = table(("a", 1, 5), ("b", 2, 5), ("c", 1, 0), ("d", 2, 0))
    calls.expire(106.0)
    ids.append(calls.open("e", 1, 106.0, 7))
    assert calls.lose(1) == [
        Ended(Ending.LOST, "c"),
        Ended(Ending.LOST, "e"),
        Ended(Ending.GHOST_LOST, "a"),
    ]
    assert calls.lose(1) == []
    assert calls.next_expiry() is None
    assert [calls.close(i) for i in ids] == [
        None,
        Ended(Ending.LATE_REPLY, "b"),
        None,
        Ended(Ending.REPLY, "d"),
        None,
    ]
    assert len(calls) == 0


def test_a_call_that_was_not_sent_is_forgotten():
    calls, (a, b) = table(("a", 1, 5), ("b", 1, 0))
    assert calls.withdraw(a)
    assert calls.withdraw(b)
    assert not calls.withdraw(a)
    assert len(calls) == 0
    assert calls.next_expiry() is None
    assert calls.expire(1e9) == []


def test_the_first_that_is_wanted_is_found() -> None:
    calls, (_, b, _) = table(("a", 1, 0), ("b", 1, 0), ("bb", 1, 0))
    assert calls.find_first(lambda call: call.startswith("b")) == b
    assert calls.find_first(lambda call: call == "c") is None


def test_a_call_whose_withdrawal_was_cut_short_still_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, (a, _) = table(("a", 1, 5.0), ("b", 1, 5.0))
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_unbucket", raise_recursion_error)
        with pytest.raises(RecursionError):
            calls.withdraw(a)
    assert calls.expire(200.0) == [Ended(Ending.DEADLINE, "a"), Ended(Ending.DEADLINE, "b")]


def raise_recursion_error(*_: object) -> None:
    raise RecursionError


def test_a_call_that_ended_before_it_was_withdrawn_has_ended():
    calls, (a, b) = table(("a", 1, 5), ("b", 2, 0))
    calls.expire(106.0)
    calls.lose(2)
    assert not calls.withdraw(a)
    assert not calls.withdraw(b)
    assert len(calls) == 0  # nothing was sent, so nothing can come back
    assert calls.close(a) is None


def test_outstanding_calls_are_listed_oldest_first():
    calls, (a, b, c) = table(("a", 1, 9), ("b", 2, 5), ("c", 3, 0))
    calls.close(b)
    assert [*calls.outstanding()] == [
        OutstandingCall(a, "a", 1, 100.0),
        OutstandingCall(c, "c", 3, 100.0),
    ]


def test_a_table_is_false_when_nothing_can_be_under_way():
    calls, (a,) = table(("a", 1, 5))
    assert calls
    calls.expire(106.0)
    assert calls
    calls.close(a)
    assert not calls


# --- Time


@pytest.mark.parametrize("timeout", [1e-9, TICK / 2, TICK, 1.0, math.pi, 60.0, 1e8])
@pytest.mark.parametrize("now", [0.0, 0.3, 12345.678, 1e6])
def test_no_call_ends_before_its_deadline_nor_a_tick_after_it(now: float, timeout: float):
    calls: CallTable[str] = CallTable()
    calls.open("a", 1, now, timeout)
    expiry = calls.next_expiry()
    assert expiry is not None
    assert now + timeout <= expiry <= now + timeout + TICK
    assert calls.expire(now + timeout - TICK / 100) == []
    assert calls.expire(math.nextafter(expiry, 0)) == []
    assert calls.expire(expiry) == [Ended(Ending.DEADLINE, "a")]


def test_the_next_expiry_is_that_of_the_call_that_ends_first():
    calls, (a, b) = table(("a", 1, 5), ("b", 1, 3))
    first = calls.next_expiry()
    calls.close(b)
    second = calls.next_expiry()
    assert first is not None
    assert second is not None
    assert 103 <= first <= 103 + TICK
    assert 105 <= second <= 105 + TICK
    calls.close(a)
    assert calls.next_expiry() is None


# --- Anything at all


class Model:
    """The fates that calls must have, kept in the most obvious way."""

    def __init__(self) -> None:
        self.open: dict[int, tuple[int, int, float]] = {}  # call, to, deadline
        self.ghosts: dict[int, tuple[int, int]] = {}
        self.ended: dict[int, Ending] = {}

    def end(self, ended: Ended[int]) -> None:
        if ended.ending in (Ending.REPLY, Ending.DEADLINE, Ending.LOST):
            assert ended.call not in self.ended, "a call ended twice"
            self.ended[ended.call] = ended.ending


def run(seed: int, steps: int = 300) -> None:
    random_ = random.Random(seed)
    calls: CallTable[int] = CallTable()
    model = Model()
    now = random_.uniform(0, 1000)
    opened: list[int] = []
    for number in range(steps):
        now += random_.choice([0.0, 0.001, 0.1, 2.0])
        action = random_.random()
        if action < 0.45:
            to, timeout = random_.randrange(4), random_.choice([0, 0.01, 1, random_.uniform(0, 9)])
            call_id = calls.open(number, to, now, timeout)
            model.open[call_id] = (number, to, now + timeout if timeout else math.inf)
            opened.append(call_id)
        elif action < 0.75 and opened:
            close(calls, model, random_.choice(opened))
        elif action < 0.8 and opened:
            call_id = random_.choice(opened)
            assert calls.withdraw(call_id) == (model.open.pop(call_id, None) is not None)
            model.ghosts.pop(call_id, None)
        elif action < 0.97:
            expire(calls, model, now)
        else:
            lose(calls, model, random_.randrange(4))
        agree(calls, model)


def close(calls: CallTable[int], model: Model, call_id: int) -> None:
    ended = calls.close(call_id)
    if call_id in model.open:
        assert ended == Ended(Ending.REPLY, model.open.pop(call_id)[0])
        model.end(ended)
    elif call_id in model.ghosts:
        assert ended == Ended(Ending.LATE_REPLY, model.ghosts.pop(call_id)[0])
    else:
        assert ended is None


def expire(calls: CallTable[int], model: Model, now: float) -> None:
    ended = calls.expire(now)
    found = {item.call for item in ended}
    must = {call for call, _, deadline in model.open.values() if deadline + TICK <= now}
    may = {call for call, _, deadline in model.open.values() if deadline <= now}
    assert must <= found <= may
    ids = {call: call_id for call_id, (call, _, _) in model.open.items()}
    for item in ended:
        assert item.ending is Ending.DEADLINE
        model.end(item)
        call, to, _ = model.open.pop(ids[item.call])
        model.ghosts[ids[item.call]] = (call, to)


def lose(calls: CallTable[int], model: Model, worker: int) -> None:
    ended = calls.lose(worker)
    lost = [i for i, (_, to, _) in model.open.items() if to == worker]
    gone = [i for i, (_, to) in model.ghosts.items() if to == worker]
    assert ended == [Ended(Ending.LOST, model.open[i][0]) for i in lost] + [
        Ended(Ending.GHOST_LOST, model.ghosts[i][0]) for i in gone
    ]
    for item in ended:
        model.end(item)
    for call_id in lost:
        del model.open[call_id]
    for call_id in gone:
        del model.ghosts[call_id]


def agree(calls: CallTable[int], model: Model) -> None:
    assert len(calls) == len(model.open) + len(model.ghosts)
    assert {row.call_id for row in calls.outstanding()} == set(model.open)
    deadlines = [d for _, _, d in model.open.values() if d < math.inf]
    expiry = calls.next_expiry()
    if not deadlines:
        assert expiry is None
    else:
        assert expiry is not None
        assert min(deadlines) <= expiry <= min(deadlines) + TICK + 1e-9


def test_a_call_is_found_while_it_is_open():
    calls: CallTable[str] = CallTable()
    number = calls.open("call", 1, 0.0, 1.0)
    assert calls.find(number) == "call"
    calls.expire(2.0)
    assert calls.find(number) is None


def test_every_call_ends_exactly_once_whatever_happens():
    for seed in range(60):
        try:
            run(seed)
        except BaseException:
            print(f"reproduce with run({seed})")
            raise


# --- Many


def test_a_call_costs_the_same_however_many_are_open():
    def cost(calls: CallTable[int], count: int = 500) -> float:
        best = math.inf
        for _ in range(5):
            start = time.perf_counter()
            for number in range(count):
                calls.close(calls.open(number, 1, 50.0, 60.0))
            best = min(best, time.perf_counter() - start)
        return best

    crowded: CallTable[int] = CallTable()
    for number in range(100_000):
        crowded.open(number, number % 100, number / 2000, 60.0)
    assert cost(crowded) < 5 * cost(CallTable()) + 0.005
    assert len(crowded.lose(7)) == 1000
    assert len(crowded.expire(1e6)) == 99_000
    assert len(crowded) == 99_000
