"""Servers that leave at the same moment wait for nothing that they had asked each other."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rpc
from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.decisions.records import Run
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.server.host import Host, host
from tensorwire.parameter_server.server.shard import ShardServer
from tests.tensorwire.parameter_server.clusters import run, server_names
from tests.waiting import until


def train() -> None:
    cluster = ps.connect(server_names(3))
    cluster.table("items", 8, ps.SGD(lr=0.1)).push(torch.arange(30), torch.ones(30, 8))


def ask_for_a_vote(asking: Host, of: str, on: str) -> None:
    """Asks a server if another one is lost, which lives, so that it never votes."""
    node = asking.node("default")
    assert node.view is not None
    poll = messages.Poll(node.view.encode(), frozenset({Server(on, 0)}))
    with node.acting():
        node.peers.call(Server(of, 0), poll, lambda answer: None)


def test_servers_that_ask_each_other_for_votes_leave_at_once() -> None:
    with local_group(*server_names(3), "trainer0") as agents:
        run(agents[3:], [train])
        hosts: list[Host] = []
        for agent in agents[:3]:
            with as_worker(agent):
                hosts.append(host())
        for asking, of, on in ((0, "ps1", "ps2"), (1, "ps2", "ps0"), (2, "ps0", "ps1")):
            with as_worker(agents[asking]):
                ask_for_a_vote(hosts[asking], of, on)
        until(lambda: all(agent.callee.serving() for agent in agents[:3]))
        leaving = [threading.Thread(target=agent.states.leave) for agent in agents[:3]]
        for each in leaving:
            each.start()
        for each in leaving:
            each.join()
        until(lambda: all(agent.is_quiet() for agent in agents[:3]))


def test_a_server_that_leaves_asks_nobody_any_more_and_turns_everybody_away() -> None:
    with local_group(*server_names(3), "trainer0") as agents:
        run(agents[3:], [train])
        with as_worker(agents[0]):
            leaving = host()
        agents[0].states.leave()
        with as_worker(agents[0]):
            ask_for_a_vote(leaving, "ps1", "ps2")
        until(agents[0].is_quiet)
        answers: list[object] = []
        with as_worker(agents[1]):
            node = host().node("default")
            with node.acting():
                node.peers.call(Server("ps0", 0), messages.LatestView(), answers.append)
        until(lambda: bool(answers))
        assert "NotHead" in repr(answers[0])


def test_a_shard_at_work_while_its_worker_shuts_down_does_not_log_that_it_is_broken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica: Any = SimpleNamespace(shard=0)
    state: Any = SimpleNamespace(run=lambda what: None)

    def changed(shard: ShardServer, what: object) -> None:
        raise rpc.AgentClosedError("this worker shut down")

    shard = ShardServer(replica, state, changed, lambda shard, effect: None)
    what: Any = object()
    shard.lane.put([Run(what)])
    shard.lane.run()
    assert shard.broken == "this worker shut down"
    assert caplog.text == ""
