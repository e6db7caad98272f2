"""The polling time follows from what waits took before; what rarely comes soon costs nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.transports.tensorwire.busy_polling import PRICE, UsualWait

MICROSECOND = 1e-6
LONGEST = 500 * MICROSECOND


def after(*microseconds: float) -> UsualWait:
    usual = UsualWait(LONGEST)
    for each in microseconds:
        usual.ended(each * MICROSECOND)
    return usual


def test_nothing_is_polled_for_before_something_was_learned() -> None:
    assert after().seconds == after(200).seconds == after(200, 200, 200).seconds == 0.0


def test_four_waits_in_a_row_that_ended_in_time_are_enough() -> None:
    assert after(200, 200, 200, 200).seconds == pytest.approx(400 * MICROSECOND)


def test_one_longer_wait_counts_at_once_and_is_forgotten_slowly() -> None:
    assert after(*[100] * 8, 200).seconds == pytest.approx(400 * MICROSECOND)
    assert after(*[100] * 8, 200, 100).seconds == pytest.approx(375 * MICROSECOND)
    assert after(*[100] * 8, 200, *[100] * 100).seconds == pytest.approx(
        200 * MICROSECOND, rel=1e-3
    )


def test_no_polling_time_is_above_the_longest() -> None:
    assert after(*[400] * 8).seconds == LONGEST


def test_long_waits_end_it() -> None:
    assert after(*[200] * 16, *[10_000] * 3).seconds > 0.0
    assert after(*[200] * 16, *[10_000] * 4).seconds == 0.0


def test_a_pause_after_every_third_wait_is_never_polled_for() -> None:
    usual = UsualWait(LONGEST)
    for _ in range(100):
        for microseconds in (200, 200, 200, 10_000):
            assert usual.seconds == 0.0
            usual.ended(microseconds * MICROSECOND)


@given(st.lists(st.booleans(), max_size=200))
def test_for_each_wait_polled_for_in_vain_four_ended_in_time(in_time: list[bool]) -> None:
    usual, in_vain = UsualWait(LONGEST), 0
    for soon in in_time:
        in_vain += bool(usual.seconds) and not soon
        usual.ended(200 * MICROSECOND if soon else 10_000 * MICROSECOND)
    assert PRICE * in_vain <= sum(in_time)
