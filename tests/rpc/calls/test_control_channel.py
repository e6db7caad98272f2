"""Control messages to workers that are known, not known yet, or gone."""

from __future__ import annotations

from functools import partial

from rpc.agent import Agent
from rpc.rrefs.rref import RRef
from rpc.testing import MemoryHub, local_group
from rpc.transports.base import Peer
from rpc.worker_info import WorkerInfo
from tests import waiting

SECONDS = 30.0


until = partial(waiting.until, seconds=SECONDS)


def answer() -> int:
    return 42


def owner_of(reference: RRef[int]) -> str:
    return reference.owner_name()


def test_a_reference_may_arrive_before_its_owner_is_known() -> None:
    """Members of a dynamic group learn of each other at different times."""
    hub = MemoryHub()
    with local_group("alice", "bob", hub=hub) as (alice, bob):
        carol = Agent(WorkerInfo("carol", 2), 0, hub.transport())
        her = Peer(carol.info, 0, carol.start())
        try:
            carol.join([her, alice.group.peer(0)])
            for agent in (alice, bob):
                agent.add_peer(her)
            reference = alice.remote("bob", answer)
            asked = alice.rpc_async("carol", owner_of, (reference,))
            until(lambda: carol.references.counts().num_pending_users == 1)
            assert not asked.done()
            carol.add_peer(bob.group.peer(1))
            assert asked.wait() == "bob"
        finally:
            carol.shutdown(graceful=False)
