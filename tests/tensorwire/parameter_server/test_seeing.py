"""A cluster's account of itself."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rpc.testing import as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.bottleneck import Watch, reason
from tensorwire.parameter_server.client.servers import Servers
from tensorwire.parameter_server.declarations.spec import TableSpec, row_bytes
from tensorwire.parameter_server.kernels import torch_kernels
from tensorwire.parameter_server.server.host import host
from tensorwire.parameter_server.storage.table import TableShard
from tests import waiting
from tests.tensorwire.parameter_server.clusters import run, train


def _answers(watch: Watch, slow: float, fast: float) -> list[tuple[str, float, float]]:
    told = [
        watch.answered(name, seconds)
        for _ in range(200)
        for name, seconds in (("ps0", fast), ("ps1", slow))
    ]
    return [each for each in told if each is not None]


def test_a_server_that_answers_much_later_than_the_others_is_told_of_once() -> None:
    watch = Watch()
    assert _answers(watch, slow=0.030, fast=0.010) == [("ps1", 0.030, 0.010)]
    assert _answers(watch, slow=0.030, fast=0.010) == []


def test_small_differences_between_servers_are_no_news() -> None:
    assert _answers(Watch(), slow=0.003, fast=0.001) == []
    assert _answers(Watch(), slow=0.030, fast=0.020) == []
    assert Watch().answered("only", 1.0) is None


def test_the_reason_names_work_or_the_machine() -> None:
    shard = {"seconds": {"pushes": 6.0, "pulls": 1.0}, "tables": {"items": {"rows": 5}}}
    assert reason({"age": 10.0, "shards": {0: shard}}) == (
        "it works 70% of the time, most of it on pushes; it keeps 5 rows"
    )
    assert "its machine or its network is slow" in reason({"age": 100.0, "shards": {0: shard}})


def test_rows_and_pushes_are_in_the_stats_and_in_the_metrics_of_the_server() -> None:
    def go() -> tuple[dict[str, object], str]:
        cluster = ps.connect(["trainer0"])  # a worker that is its own server
        table = cluster.table("items", 4, ps.SGD(lr=0.1), admit=ps.MinCount(2))
        for _ in range(3):
            table.push(torch.arange(7), torch.ones(7, 4))
        return cluster.stats(), ps.metrics()

    ((stats, text),) = train([go])
    (server,) = stats["servers"].values()  # type: ignore[attr-defined]
    assert server["shards"][0]["tables"]["items"]["rows"] == 7
    assert server["shards"][0]["tables"]["items"]["not_admitted"] == 7
    labels = 'cluster="default",server="trainer0",shard="0"'
    assert f"tensorwire_ps_updates_total{{{labels}}} 3" in text
    assert f'tensorwire_ps_rows{{{labels},table="items"}} 7' in text
    assert "# TYPE tensorwire_ps_rows gauge" in text


def test_setting_up_is_no_time_of_pushes() -> None:
    def go() -> tuple[dict[str, object], dict[str, object]]:
        cluster = ps.connect(["ps0"])
        model = nn.Linear(4, 1)
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        before = cluster.stats()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return before, cluster.stats()

    ((before, after),) = train([go])

    def pushes(stats: Any) -> float:
        seconds: dict[str, float] = stats["servers"]["ps0"]["shards"][0]["seconds"]
        assert seconds["set-up"] > 0
        return seconds["pushes"]

    assert before["seconds"] == {"sending": 0.0, "waiting": 0.0}
    assert pushes(before) == 0
    assert pushes(after) > 0


def test_a_trainer_counts_how_stale_its_pulls_are() -> None:
    pulled = threading.Event()

    def go(steps: int) -> dict[int, int]:
        cluster = ps.connect(["ps0"], consistency=ps.SSP(2), trainers=2)
        table = cluster.table("items", 2, ps.SGD(lr=0.1))
        for _ in range(steps):
            table.push(torch.arange(3), torch.ones(3, 2))
        if steps > 2:
            table.pull(torch.arange(3))
            pulled.set()
        assert pulled.wait(60)  # the other one stays two steps behind until then
        cluster.finish()
        told = cluster.stats()
        assert told["seconds"]["sending"] > 0 < told["seconds"]["waiting"]
        staleness: dict[int, int] = told["staleness"]
        return staleness

    assert train([partial(go, 4), partial(go, 2)]) == [{2: 1}, {}]


def test_a_server_without_room_refuses_a_push_whole_and_nobody_waits_for_it() -> None:
    def go() -> tuple[int, float]:
        host().memory = 100_000
        cluster = ps.connect(["trainer0"])
        table = cluster.table("items", 8, ps.SGD(lr=1.0))
        table.push(torch.arange(10), -torch.ones(10, 8))
        with pytest.raises(ps.OutOfMemoryError, match="bytes left"):
            table.push(torch.arange(10_000), -torch.ones(10_000, 8))
        table.push(torch.arange(10), -torch.ones(10, 8))
        return cluster.step, float(table.pull(torch.arange(10)).mean())

    assert train([go]) == [(3, 2.0)]


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("consistency", [ps.BSP(ps.Reduce.SUM), ps.SSP(1), ps.Async()], ids=str)
def test_a_push_for_which_one_server_has_no_room_moves_no_row_of_another(
    consistency: Any, trainers: int
) -> None:
    few, many = torch.arange(20), torch.arange(4000)

    def go(number: int) -> tuple[int, list[float]]:
        cluster = ps.connect(["small", "large"], consistency=consistency, trainers=trainers)
        table = cluster.table("items", 8, ps.SGD(lr=1.0))
        table.push(few, -torch.ones(20, 8))
        for _ in range(2):
            with pytest.raises(ps.OutOfMemoryError, match=r"nothing was taken: server 'small'"):
                table.push(many, -torch.ones(4000, 8))
        table.push(few, -torch.ones(20, 8))
        step = cluster.step
        cluster.finish()
        return step, table.pull(many).unique().tolist()

    names = [f"trainer{number}" for number in range(trainers)]
    with local_group("small", "large", *names) as agents:
        with as_worker(agents[0]):
            host().memory = 50_000
        told = run(agents[2:], [partial(go, number) for number in range(trainers)])
        with as_worker(agents[2]):
            last = ps.connect(["small", "large"], consistency=consistency, trainers=trainers)
            table = last.table("items", 8, ps.SGD(lr=1.0))
            assert table.pull(few).eq(2.0 * trainers).all()
            assert table.pull(many[20:]).eq(0).all()
    assert [step for step, _ in told] == [4] * trainers


def test_a_push_that_is_small_beside_the_room_is_sent_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    ask_heads = Servers.ask_heads

    def counted(self: Servers, wanted: Any) -> Any:
        asked.append(wanted)
        return ask_heads(self, wanted)

    monkeypatch.setattr(Servers, "ask_heads", counted)

    def go() -> None:
        cluster = ps.connect(["ps0", "ps1"])
        table = cluster.table("items", 8, ps.SGD(lr=1.0))
        for _ in range(5):
            table.push(torch.arange(10), torch.ones(10, 8))

    train([go], servers=2)
    assert len(asked) == 1  # of the first push nobody knew anything


@pytest.mark.parametrize(
    "precision", [each for each in ps.Precision if each is not ps.Precision.INT8]
)
@pytest.mark.parametrize("evict", [None, ps.UnusedFor(3)])
@pytest.mark.parametrize("rule", [ps.SGD(lr=1.0), ps.Adam(), ps.RowwiseAdagrad()], ids=repr)
def test_a_trainer_knows_how_large_rows_are(rule: Any, evict: Any, precision: Any) -> None:
    spec = TableSpec("items", 6, rule, ps.Constant(), evict=evict, precision=precision)
    assert row_bytes(spec) == TableShard(spec, torch_kernels).row_bytes


def test_a_backup_remembers_no_rows_for_snapshots_that_its_head_writes(tmp_path: Path) -> None:
    with local_group("ps0", "ps1", "trainer") as agents:

        def go() -> None:
            cluster = ps.connect(["ps0", "ps1"], backups=1)
            table = cluster.table("items", 2, ps.SGD(lr=0.1))
            for number in range(3):
                table.push(torch.arange(100), torch.ones(100, 2))
                cluster.snapshot(tmp_path / str(number)).wait(60)

        run(agents[2:], [go])
        for agent in agents[:2]:
            with as_worker(agent):
                shards = host().node("default").shards.values()
                assert len(shards) == 2
                waiting.until(lambda kept=shards: not any(s.state.frozen for s in kept))
