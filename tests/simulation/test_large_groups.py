"""The cost of a worker does not depend on how many others there are."""

from __future__ import annotations

from tests.simulation.group import GroupReport, simulate_group


def check_cost_per_worker(small: GroupReport, large: GroupReport) -> None:
    """A wave costs everybody but its leader the same, so what is below one hundredth is that."""
    assert large.messages_per_worker <= small.messages_per_worker * 1.01
    assert large.sharing / large.workers == small.sharing / small.workers


def test_messages_per_worker_do_not_grow_with_the_group() -> None:
    check_cost_per_worker(simulate_group(40), simulate_group(120))


def test_the_order_of_messages_is_chosen_by_the_seed() -> None:
    reports = [simulate_group(10, seed) for seed in range(5)]
    assert {report.sharing for report in reports} == {130}
