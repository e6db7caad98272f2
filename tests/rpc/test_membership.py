"""A member of a dynamic group, and what the store that lists them says of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from rpc import rendezvous
from rpc.ids import Life
from rpc.membership import Membership
from rpc.rendezvous import Record
from rpc.transports.base import Peer
from tests.waiting import until

NAMES = ("alice", "bob", "carol")


class Agent:
    """Notes what it is told."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.is_expelled = False
        self.peers: set[Life] = set()
        self.struck: list[Life] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def add_peer(self, peer: Peer) -> None:
        self.peers.add(Life(peer.info.id, peer.incarnation))

    def struck_off(self, life: Life) -> None:
        self.may_go_on.wait(20)
        self.struck.append(life)
        self.peers.discard(life)
        self.is_expelled = self.is_expelled or life == self.life


class Group:
    def __init__(self) -> None:
        self.store = HashStore()
        self.agents = [Agent(Life(rank, 0)) for rank in range(len(NAMES))]
        self.members = []
        for agent, name in zip(self.agents, NAMES, strict=True):
            record = Record(name, agent.life.worker, None, 0, "test", b"")
            self.members.append(Membership(agent, self.store, record))  # type: ignore[arg-type]
        for member in self.members:
            member.join(20)
        until(lambda: all(len(agent.peers) == 3 for agent in self.agents))

    def listed(self) -> set[int]:
        return {record.rank for record in rendezvous.members(self.store)}


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    for agent in made.agents:
        agent.may_go_on.set()
    for member in made.members:
        member.leave()


def test_one_that_is_removed_is_struck_off_everywhere(group: Group) -> None:
    group.members[0].remove(Life(2, 0))
    until(lambda: all(Life(2, 0) in agent.struck for agent in group.agents))
    assert group.listed() == {0, 1}


def test_an_earlier_life_is_not_removed(group: Group) -> None:
    group.members[0].remove(Life(2, 1))
    group.members[0].remove(Life(1, 0))
    until(lambda: group.listed() == {0, 2})


def test_one_that_was_itself_struck_off_removes_nobody(group: Group) -> None:
    bob = group.agents[1]
    bob.may_go_on.clear()  # as if the network held up what the store says
    group.members[0].remove(Life(1, 0))
    until(lambda: group.listed() == {0, 2})
    group.members[1].remove(Life(0, 0))
    group.members[1].remove(Life(2, 0))
    bob.may_go_on.set()
    until(lambda: bob.is_expelled and not group.members[1]._lost)
    assert group.listed() == {0, 2}
