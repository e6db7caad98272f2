"""A newcomer does not act on what the store says of a cluster before a server has confirmed it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from rpc import extend
from rpc.agent import Agent
from rpc.testing import MemoryHub, as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.decisions.lives import Latest
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.messaging.calling import latest_life
from tensorwire.parameter_server.messaging.confirming import confirmed, known_view
from tensorwire.parameter_server.server.host import host
from tests.tensorwire.parameter_server.clusters import server_names
from tests.tensorwire.parameter_server.dynamic_groups import DynamicGroup, dynamic_group
from tests.waiting import until

SERVERS = server_names(2)
_VIEW = "view/default"


class Store(HashStore):
    """A store that somebody else can change: it knows how each key was called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def compare_set(self, key: str, expected: bytes, wanted: bytes) -> bytes:  # type: ignore[override]
        self.names.add(key)
        return super().compare_set(key, expected, wanted)  # type: ignore[arg-type, return-value]

    @property
    def view(self) -> str:
        return next(name for name in self.names if name.endswith(_VIEW))


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def group(store: Store) -> Iterator[DynamicGroup]:
    """A dynamic group in this process, in whose store a stranger may write."""
    with dynamic_group(store) as group:
        yield group


def _train(group: DynamicGroup, store: Store) -> tuple[Agent, ps.Cluster, bytes]:
    """A cluster whose view has changed, and its view as the store had it before."""
    for name in SERVERS:
        group.join(name)
    agent = group.join("trainer0")
    with as_worker(agent):
        cluster = ps.connect(SERVERS, backups=1)
        old = store.get(store.view)
        cluster.table("items", 2, ps.SGD(lr=1.0)).push(torch.arange(4), torch.ones(4, 2))
    return agent, cluster, old


def test_a_trainer_that_comes_does_not_believe_an_old_view(
    group: DynamicGroup, store: Store
) -> None:
    _, cluster, old = _train(group, store)
    newcomer = group.join("trainer1")
    store.set(store.view, old)  # type: ignore[arg-type]
    with as_worker(newcomer):
        found = ps.connect(SERVERS, backups=1).session.view
    assert found.number >= cluster.session.view.number > 0


def test_a_trainer_that_comes_makes_no_second_cluster_when_the_view_was_deleted(
    group: DynamicGroup,
    store: Store,
) -> None:
    _, cluster, _ = _train(group, store)
    newcomer = group.join("trainer1")
    store.set(store.view, b"")  # type: ignore[arg-type]
    with as_worker(newcomer):
        found = ps.connect(SERVERS, backups=1)
        assert found.session.view.number >= cluster.session.view.number > 0
        assert found.table("items", 2, ps.SGD(lr=1.0)).pull(torch.arange(2)).sum() == -4


def test_a_server_that_comes_back_does_not_believe_an_old_view(
    group: DynamicGroup, store: Store
) -> None:
    _, cluster, old = _train(group, store)
    group.agents[1].shutdown(graceful=False)
    until(lambda: "ps1" not in {each.name for each in cluster.session.view.servers})
    before = cluster.session.view.number
    store.set(store.view, old)  # type: ignore[arg-type]
    group.agents[1] = back = group.join("ps1")
    with as_worker(back):
        host().announce()
        seen = host().node("default").view
    assert seen is not None
    assert seen.number >= before > 0


def test_a_server_that_comes_back_does_not_wait_for_one_that_was_lost_before(
    group: DynamicGroup, store: Store
) -> None:
    """It is the only one left: if it asked on, the cluster would stand still for ever."""
    _, cluster, _ = _train(group, store)
    group.agents[0].shutdown(graceful=False)
    until(lambda: "ps0" not in {each.name for each in cluster.session.view.servers})
    group.agents[1].shutdown(graceful=False)
    group.agents[1] = back = group.join("ps1")
    with as_worker(back):
        assert latest_life(extend.worker(), "ps0") == Latest(1, False, proven=True)
        confirmed(extend.worker(), "default", cluster.session.view, 30)
        host().announce()
    until(lambda: "all servers of shard 0, 1 were lost" in cluster.session.view.broken)


def test_whoever_has_just_come_itself_confirms_nothing() -> None:
    with local_group(*SERVERS, "trainer") as agents, as_worker(agents[-1]):
        lives = [Server(name, 0) for name in SERVERS]
        assert known_view(extend.worker(), "default", lives, 30) is None


def test_servers_that_do_not_answer_are_named() -> None:
    hub = MemoryHub()
    with local_group(*SERVERS, "trainer", hub=hub) as agents, as_worker(agents[-1]):
        hub.freeze(0)
        with pytest.raises(TimeoutError, match=r"not confirmed within 0\.1 s: servers ps0/0 do"):
            known_view(extend.worker(), "default", [Server("ps0", 0)], 0.1)
