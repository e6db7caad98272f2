"""The moments at which a wait is told of."""

from rpc.runtime.wait_log import WaitLog


def test_a_wait_is_told_of_seldom_and_more_seldom() -> None:
    log = WaitLog(100.0)
    told = [second for second in range(200) if log.is_due(100.0 + second)]
    assert told == [5, 10, 20, 40, 100, 160]


def test_moments_that_were_missed_count_once() -> None:
    log = WaitLog(0.0, (1.0, 2.0, 3.0), 10.0)
    assert [log.is_due(now) for now in (0.5, 2.5, 2.6, 3.0, 42.0, 42.5, 43.0)] == [
        *(False, True, False),
        *(True, True, False, True),
    ]
    assert log.next_at() == 53.0
