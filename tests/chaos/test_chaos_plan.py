"""A plan of faults hits every victim with every kind."""

from itertools import pairwise

from chaos.plan import Kind, plan

VICTIMS = ["server", "trainer1", "trainer2"]


def test_the_same_seed_makes_the_same_plan() -> None:
    assert plan(7, 300, VICTIMS, 5) == plan(7, 300, VICTIMS, 5)
    assert plan(7, 300, VICTIMS, 5) != plan(8, 300, VICTIMS, 5)


def test_everything_is_done_to_everybody_before_anything_is_done_again() -> None:
    faults = plan(1, 300, VICTIMS, 5)[:9]
    assert {(fault.kind, fault.victim) for fault in faults} == {
        (kind, victim) for kind in Kind for victim in VICTIMS
    }


def test_there_is_a_pause_between_two_faults_and_at_the_end() -> None:
    times = [fault.at for fault in plan(1, 300, VICTIMS, 5)]
    assert all(later - earlier >= 5 for earlier, later in pairwise(times))
    assert times[-1] <= 295
