"""Decisions about where stages and their backups go, and which version is gone back to."""

from __future__ import annotations

import itertools
import random

import pytest

import rpc
from rpc.extend import Life
from tensorwire.pipeline.backups.carrying_out import suspects
from tensorwire.pipeline.backups.places import (
    Copy,
    Found,
    NoCopyError,
    NoPlaceError,
    Seat,
    at_home,
    choose_backups,
    choose_owners,
    newest_common_version,
    safest_version,
    spread,
)

_OWNERS = (("a",), ("b",), ("c",))


def _found(hosts: str, **copies: list[tuple[int, int]]) -> dict[str, Found]:
    """Workers a, b, c, ... on these hosts, with copies of (stage, version)."""
    return {
        name: Found(host, frozenset(Copy(Seat(s), v) for s, v in copies.get(name, [])))
        for name, host in zip("abcdef", hosts, strict=False)
    }


def test_the_loss_of_a_life_that_was_replaced_is_not_waited_for() -> None:
    lives = {"a": Life(1, 2), "b": Life(2, 1)}
    former, present = rpc.WorkerLostError("a", 1, "killed"), rpc.WorkerLostError("b", 1, "killed")
    unknown = rpc.WorkerLostError("c", 1, "killed")
    assert suspects([former], lives) == set()
    assert suspects([former, present, unknown], lives) == {"b", "c"}


def test_a_backup_is_on_the_next_other_machine_or_else_with_the_next_neighbour() -> None:
    two = choose_backups(_OWNERS, _found("xxy"))
    assert two == {Seat(0): "c", Seat(1): "c", Seat(2): "a"}
    one = choose_backups(_OWNERS, _found("xxx"))
    assert one == {Seat(0): "b", Seat(1): "c", Seat(2): "a"}
    assert choose_backups(_OWNERS, _found("xxxy"), ["d"]) == dict.fromkeys(map(Seat, range(3)), "d")
    assert choose_backups((("a",),), _found("x")) == {}


def test_the_newest_version_that_all_have_is_taken_and_by_a_new_driver_one_that_all_have_twice(
) -> None:  # fmt: skip
    seats = [Seat(0), Seat(1)]
    found = _found("xy", a=[(0, 4), (0, 5), (1, 4)], b=[(1, 4), (1, 5), (0, 4)])
    assert newest_common_version(seats, found) == 5
    assert safest_version(seats, found) == 4
    with pytest.raises(NoCopyError, match="copy of stage 1"):
        newest_common_version(seats, _found("x", a=[(0, 4)]))
    with pytest.raises(NoCopyError, match="as old as"):
        newest_common_version(seats, _found("xy", a=[(0, 4)], b=[(1, 3)]))


def test_a_spare_takes_a_lost_stage_or_else_who_has_the_copy() -> None:
    living = {n: f for n, f in _found("xxxx", c=[(1, 2)]).items() if n != "b"}
    assert choose_owners(_OWNERS, living, ["d"], 2) == (("a",), ("d",), ("c",))
    del living["d"]
    assert choose_owners(_OWNERS, living, ["d"], 2) == (("a",), ("c",), ("c",))
    with pytest.raises(NoPlaceError, match="stage 0, replica 1"):
        choose_owners((("a", "b"),), {"a": living["a"]})


def test_stages_are_dealt_out_as_evenly_as_any_cut_could() -> None:
    dice = random.Random(0)
    for _ in range(100):
        costs = [dice.randint(1, 9) for _ in range(dice.randint(3, 7))]
        homes = tuple(("w",) for _ in costs)
        owners = spread(costs, ["a", "b", "c"], homes)
        assert [name for name, _ in itertools.groupby(owner for (owner,) in owners)] == [*"abc"]
        dearest = max(
            sum(c for c, (owner,) in zip(costs, owners, strict=True) if owner == name)
            for name in "abc"
        )
        least = min(
            max(sum(costs[:i]), sum(costs[i:j]), sum(costs[j:]))
            for i, j in itertools.combinations(range(1, len(costs)), 2)
        )
        assert dearest == least


def test_with_a_worker_for_each_stage_all_are_at_home() -> None:
    assert at_home(["c", "d", "a"], _OWNERS) == (("a",), ("d",), ("c",))
    assert at_home(["a", "b"], _OWNERS) is None
    assert spread([1, 1, 1], ["x", "y", "z", "more"], _OWNERS) == (("x",), ("y",), ("z",))
