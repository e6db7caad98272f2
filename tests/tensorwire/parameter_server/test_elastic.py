"""Clusters whose trainers and servers come while others work, in one process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

import rpc
from rpc.runtime import wait_log
from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import run, train
from tests.tensorwire.parameter_server.dynamic_groups import DynamicGroup, dynamic_group
from tests.waiting import until

IDS = torch.arange(200)
ONES = -torch.ones(200, 2)


@pytest.fixture
def roles(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Says what rpcrun would have told a worker that starts now."""

    def tell(text: str, trainers: int = 1) -> None:
        monkeypatch.setenv("RPC_ROLES", text)
        monkeypatch.setenv("ROLE_WORLD_SIZE", str(trainers))

    return tell


@pytest.fixture
def group() -> Iterator[DynamicGroup]:
    with dynamic_group(HashStore()) as group:
        yield group


def counts(cluster: ps.Cluster) -> ps.Table:
    return cluster.table("counts", 2, ps.SGD(lr=1.0))


def heads(cluster: ps.Cluster) -> list[str]:
    """The servers that head a share, by name."""
    found = cluster.stats()["servers"]
    return sorted(
        name for name, each in found.items() if any(s["head"] for s in each["shards"].values())
    )


class TestTheNumberOfTrainersThatBegin:
    def test_need_not_be_agreed_about(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second one was started when there were two, the first when it was alone."""
        begun = threading.Event()

        def first() -> list[str]:
            monkeypatch.setenv("ROLE_WORLD_SIZE", "1")
            cluster = ps.connect(["ps0"])
            table = counts(cluster)
            table.push(IDS, ONES)
            begun.set()
            until(lambda: len(cluster.stats()["trainers"]) == 2)
            table.push(IDS, ONES)
            cluster.finish()
            return sorted(cluster.stats()["trainers"])

        def second() -> int:
            assert begun.wait(30)
            monkeypatch.setenv("ROLE_WORLD_SIZE", "2")
            cluster = ps.connect(["ps0"])
            cluster.join()
            step = cluster.step
            counts(cluster).push(IDS, ONES)
            cluster.finish()
            return step

        def each(function: Callable[[], object]) -> Callable[[], object]:
            return function

        assert train([each(first), each(second)])[1] == 1

    @pytest.mark.parametrize("trainers", [2, 3])
    def test_is_that_of_whom_was_started_last(
        self, monkeypatch: pytest.MonkeyPatch, trainers: int
    ) -> None:
        monkeypatch.setenv("ROLE_WORLD_SIZE", str(trainers))

        def go() -> tuple[int, Tensor]:
            cluster = ps.connect(["ps0"])
            table = counts(cluster)
            cluster.join()
            number = cluster.number
            table.push(IDS, ONES * (number + 1))
            rows = table.pull(IDS[:1])
            cluster.finish()
            return number, rows

        found = train([go] * trainers)
        assert sorted(number for number, _ in found) == list(range(trainers))
        mean = sum(range(1, trainers + 1)) / trainers
        assert all(rows.tolist() == [[mean, mean]] for _, rows in found)

    def test_is_said_in_the_log_while_they_are_waited_for(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(wait_log, "FIRST", (0.05,))
        told = (
            "join has waited 0 s for the trainers with which cluster 'default' begins "
            "(ps.connect(trainers=2)); server 'ps0' coordinates"
        )
        waits = threading.Event()

        def early() -> None:
            ps.connect(["ps0"], trainers=2).join()

        def late() -> None:
            until(lambda: told in caplog.messages)
            waits.set()
            ps.connect(["ps0"]).join()  # who says nothing agrees

        train([early, late])
        assert waits.is_set()

    def test_must_be_the_same_where_it_is_said(self) -> None:
        def go() -> None:
            ps.connect(["ps0"], trainers=1)

        def other() -> None:
            with pytest.raises(ps.DeclarationError, match="trainers=1, not 3"):
                ps.connect(["ps0"], trainers=3)

        with local_group("ps0", "trainer0", "trainer1") as (_, first, second):
            run([first], [go])
            run([second], [other])


class TestATrainerThatHasFinished:
    @pytest.mark.parametrize("under", [ps.BSP(ps.Reduce.SUM), ps.SSP(0), ps.Async()], ids=str)
    def test_pushes_again_once_it_has_joined_again(self, under: Any) -> None:
        """The other one goes on meanwhile; under BSP it waits for the first one again later."""
        has_gone, has_come, has_pushed = (threading.Event() for _ in range(3))

        def leaves() -> tuple[int, int]:
            cluster = ps.connect(["ps0", "ps1"], consistency=under, trainers=2)
            table = counts(cluster)
            table.push(IDS, ONES)
            cluster.finish()
            with pytest.raises(ps.NotATrainerError, match=r"'trainer0' has finished .* call clu"):
                table.push(IDS, ONES)
            has_gone.set()
            assert has_pushed.wait(60)
            before = cluster.number
            cluster.join()
            has_come.set()
            table.push(IDS, ONES)
            cluster.finish()
            return before, cluster.session.client.session

        def stays() -> list[float]:
            cluster = ps.connect(["ps0", "ps1"], consistency=under, trainers=2)
            table = counts(cluster)
            table.push(IDS, ONES)
            assert has_gone.wait(60)
            table.push(IDS, ONES)
            has_pushed.set()
            assert has_come.wait(60)
            table.push(IDS, ONES)
            cluster.finish()
            until(lambda: table.pull(IDS).min() == 5)
            found: list[float] = table.pull(IDS).unique().tolist()
            return found

        with local_group("ps0", "ps1", "trainer0", "trainer1") as agents:
            told, found = run(agents[2:], [leaves, stays])
        assert told == (-1, 1)
        assert found == [5.0]


class TestARoleOfServers:
    @pytest.mark.parametrize("grow", [False, True])
    def test_takes_in_those_that_come_later(
        self, grow: bool, roles: Callable[[str, int], None], group: DynamicGroup
    ) -> None:
        """At once, or when the program says so; every push counts once."""
        roles("ps=1/4,trainer=1/4", 1)
        group.join("ps:0")
        with as_worker(group.join("trainer:0")):
            cluster = ps.connect("ps", grow=grow)
            until(lambda: heads(cluster) == ["ps:0"])
            table = counts(cluster)
            table.push(IDS, ONES)
            group.join("ps:1")
            if not grow:
                until(lambda: any(each.name == "ps:1" for each in rpc.workers()))
                cluster.resize()
            until(lambda: heads(cluster) == ["ps:0", "ps:1"])
            table.push(IDS, ONES)
            assert table.pull(IDS).unique().tolist() == [2.0]
            cluster.finish()

    def test_has_backups_once_enough_of_them_are_there(
        self, roles: Callable[[str, int], None], group: DynamicGroup
    ) -> None:
        roles("ps=1/2,trainer=1/1", 1)
        group.join("ps:0")
        with as_worker(group.join("trainer:0")):
            with pytest.raises(ValueError, match="backups=2 needs more than 2 servers"):
                ps.connect("ps", backups=2)
            cluster = ps.connect("ps", backups=1, grow=True)
            table = counts(cluster)
            table.push(IDS, ONES)
            newcomer = group.join("ps:1")
            until(lambda: heads(cluster) == ["ps:0", "ps:1"])
            table.push(IDS, ONES)
            until(lambda: all(len(each.chain) == 2 for each in cluster.session.view.shards))
            newcomer.shutdown(graceful=False)
            assert table.pull(IDS).unique().tolist() == [2.0]
            cluster.finish()

    def test_begins_with_those_that_had_been_started_and_those_that_are_there(
        self, roles: Callable[[str, int], None]
    ) -> None:
        roles("ps=2/4,trainer=1/4", 1)

        def go() -> list[str]:
            return [server.name for server in ps.connect("ps").session.view.servers]

        with local_group("ps:0", "ps:1", "ps:2", "trainer:0") as group:
            assert run([group[-1]], [go]) == [["ps:0", "ps:1", "ps:2"]]

    def test_that_there_is_not_is_named(self, roles: Callable[[str, int], None]) -> None:
        def unknown() -> None:
            with pytest.raises(ValueError, match=r"servers='sp' is no role of .* are ps, trainer"):
                ps.connect("sp")

        def nobody() -> None:
            with pytest.raises(ValueError, match=r"servers='ps', such as 'ps:0', in the group"):
                ps.connect("ps")

        def named() -> None:
            with pytest.raises(ValueError, match="grow=True needs a role for servers"):
                ps.connect(["ps0"], grow=True)
            cluster = ps.connect(["ps0"])
            with pytest.raises(ValueError, match="the servers ps0 are not of one role"):
                cluster.resize()

        train([nobody])
        train([named])
        roles("ps=1/1,trainer=1/1", 1)
        train([unknown])


def test_a_resize_waits_for_a_server_that_joins(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, group: DynamicGroup
) -> None:
    monkeypatch.setattr(wait_log, "FIRST", (0.05,))
    caplog.set_level(logging.WARNING)
    group.join("ps0")

    def come() -> None:
        until(lambda: "resize has waited 0 s for server 'ps1'" in caplog.text)
        group.join("ps1")

    with as_worker(group.join("trainer0")):
        cluster = ps.connect(["ps0"])
        counts(cluster).push(IDS, ONES)
        thread = threading.Thread(target=come)
        thread.start()
        try:
            cluster.resize(["ps0", "ps1"])
        finally:
            thread.join()
        assert counts(cluster).pull(IDS).unique().tolist() == [1.0]
        assert heads(cluster) == ["ps0", "ps1"]
        cluster.finish()
