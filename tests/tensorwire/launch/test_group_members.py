"""An agent that slept strikes off no later life of a seat than it knows of."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from rpc.extend import KeyValueStore
from rpc.group.member_list import MemberTable
from rpc.group.records import Record
from tensorwire.launch import group_members
from tensorwire.launch.group_members import GroupMembers, note_life
from tests.rpc.stores import signed

_NAME = "ps:0"


class _Job:
    """The store of a job with one seat, and an agent that looks at it."""

    def __init__(self) -> None:
        store = HashStore()
        self.table = MemberTable(signed(store))
        self.lives = KeyValueStore(signed(store), "rpcrun")
        self.agent = GroupMembers(store, b"", "an agent")

    def join(self, life: int) -> None:
        """A life of the seat is noted, and its process joins."""
        note_life(self.lives, _NAME, life)
        self.table.join(Record(_NAME, 0, None, life, "TENSORWIRE", b""))

    def listed(self) -> int | None:
        """The life that is listed."""
        found = self.table.lookup(_NAME)
        return None if found is None else found.incarnation


def test_a_former_life_is_struck_off_as_the_next_begins() -> None:
    job = _Job()
    job.join(1)
    job.agent.begins(_NAME, 2)
    assert job.listed() is None


def test_who_sleeps_after_it_noted_a_life_strikes_off_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = _Job()
    job.join(1)

    def note_and_sleep(lives: KeyValueStore, name: str, life: int) -> None:
        note_life(lives, name, life)
        job.join(3)  # on another machine, as this agent is taken for dead

    monkeypatch.setattr(group_members, "note_life", note_and_sleep)
    job.agent.begins(_NAME, 2)
    assert job.listed() == 3


def test_members_of_a_seat_are_those_of_the_lives_that_were_asked_for() -> None:
    job = _Job()
    assert not job.agent.up_to(_NAME, 1)
    job.join(1)
    assert [each.info.name for each in job.agent.up_to(_NAME, 1)] == [_NAME]
    job.join(2)
    assert not job.agent.up_to(_NAME, 1)
    assert job.agent.up_to(_NAME, 2)
    for member in job.agent.up_to(_NAME, 2):
        job.agent.strike_off(member, "its agent gives no sign of life")
    assert job.listed() is None
