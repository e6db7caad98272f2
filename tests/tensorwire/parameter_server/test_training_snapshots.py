"""Snapshots of whole clusters, and servers that come and go, while trainers push."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpc import extend
from rpc.testing import MemoryHub, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.server import writing
from tests import waiting
from tests.tensorwire.parameter_server.clusters import run, server_names, train
from tests.tensorwire.parameter_server.training import (
    IDS,
    batches_of,
    shards_of,
)


def test_a_snapshot_is_restored_into_another_number_of_servers(tmp_path: Path) -> None:
    def save() -> Tensor:
        cluster = ps.connect(server_names(2))
        table = cluster.table("items", 8, ps.Adam(lr=0.1), init=ps.Uniform(0.1, seed=3))
        for ids, grad in batches_of(0):
            table.push(ids, grad)
        cluster.snapshot(tmp_path / "one", extra={"epoch": 3}).wait(30)
        for ids, grad in batches_of(1):
            table.push(ids, grad)
        return table.pull(torch.arange(IDS))

    def restore(servers: int) -> Tensor:
        cluster = ps.connect(server_names(servers), restore=tmp_path / "one")
        table = cluster.table("items", 8, ps.Adam(lr=0.1), init=ps.Uniform(0.1, seed=3))
        for ids, grad in batches_of(1):
            table.push(ids, grad)
        assert cluster.step == 24
        return table.pull(torch.arange(IDS))

    (rows,) = train([save], servers=2)
    for servers in (1, 3, 5):
        (again,) = train([restore], servers, servers=servers)
        assert torch.equal(rows, again)


def test_dense_parameters_are_restored_onto_more_servers_than_they_have_pieces(
    tmp_path: Path,
) -> None:
    def go(servers: int, restore: Path | None) -> Tensor:
        cluster = ps.connect(server_names(servers), restore=restore)
        model = nn.Linear(2, 1)
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.Adam)
        if restore is None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            cluster.snapshot(tmp_path / "one").wait(30)
        assert optimizer.state_dict()["state"][0]["step"] == 1
        return model.weight.detach().clone()

    (saved,) = train([lambda: go(1, None)], servers=1)
    (restored,) = train([lambda: go(4, tmp_path / "one")], servers=4)
    assert torch.equal(saved, restored)


@pytest.mark.kills
def test_snapshots_under_pushes_are_of_one_point_in_all_of_them(
    tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, Any], None]
) -> None:
    snapshots = request.config.getoption("--kills")
    done = threading.Event()

    def connected() -> tuple[ps.Cluster, ps.Table, ps.Table]:
        cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=4)
        counts = cluster.table("counts", 2, ps.SGD(lr=1.0))
        return cluster, counts, cluster.table("moments", 2, ps.Adam(lr=0.1))

    def push() -> None:
        cluster, *tables = connected()
        ids = torch.arange(3000)
        while not done.is_set():
            cluster.push(dict.fromkeys(tables, (ids, -torch.ones(3000, 2))))
        cluster.finish()

    def save() -> None:
        cluster = connected()[0]
        try:
            waiting.until(lambda: any(shard["updates"] for shard in shards_of(cluster)))
            for number in range(snapshots):
                folder = tmp_path / str(number)
                cut = sum(cluster.snapshot(folder).wait(60).counts.values())
                ids, rows = ps.read(folder, "counts")
                assert len(ids) == (3000 if cut else 0)
                assert bool((rows == cut).all())
                for column in ("weight", "state.mean", "state.square"):
                    others, values = ps.read(folder, "moments", column)
                    assert torch.equal(others, ids)
                    assert len(values.unique()) <= 1  # so every row has had as many updates
        finally:
            done.set()

    train([*[push] * 4, save], servers=2)
    record_property("times", snapshots)


def test_admission_and_eviction_go_on_at_a_backup_and_after_a_snapshot(tmp_path: Path) -> None:
    hub = MemoryHub()

    def go(begin: int, cut: bool, **how: Any) -> tuple[Tensor, int]:
        cluster = ps.connect(**how)
        rule, init = ps.Adam(lr=0.1), ps.Uniform(0.1, seed=3)
        admit, evict = ps.MinCount(3), ps.UnusedFor(steps=4)
        table = cluster.table("items", 8, rule, init=init, admit=admit, evict=evict)
        for step, (ids, grad) in enumerate(batches_of(0, steps=24)[begin:], begin):
            if step == 12 and "restore" not in how:
                cluster.snapshot(tmp_path / f"{cut}").wait(30)
            if step == 13 and cut:
                hub.cut(0)
            table.push(ids, grad)
        rows = table.pull(torch.arange(IDS))
        heads = [shard for shard in shards_of(cluster) if shard["head"]]
        return rows, sum(head["tables"]["items"]["rows"] for head in heads)

    two, three = server_names(2), server_names(3)
    (whole,) = train([lambda: go(0, False, servers=two, backups=1)], servers=2)
    with local_group(*two, "trainer0", hub=hub) as agents:
        (orphaned,) = run(agents[2:], [lambda: go(0, True, servers=two, backups=1)])
    restored = {"servers": three, "restore": tmp_path / "False"}
    (again,) = train([lambda: go(12, False, **restored)], servers=3)
    for rows, count in (orphaned, again):
        assert torch.equal(rows, whole[0])
        assert count == whole[1]
    assert 0 < whole[1] < IDS


def test_a_snapshot_is_taken_by_whoever_coordinates_after_the_first_was_lost(
    tmp_path: Path,
) -> None:
    hub = MemoryHub()

    def go() -> None:
        cluster = ps.connect(server_names(2), backups=1)
        cluster.table("items", 8, ps.SGD(lr=0.1))
        coordinator = extend.worker().life_of(server_names(2)[0])
        hub.cut(0)
        waiting.until(lambda: not extend.is_living(coordinator))
        assert cluster.snapshot(tmp_path / "one").wait(30).counts == {}

    with local_group(*server_names(2), "observer", hub=hub) as agents:
        run(agents[2:], [go])


def _held(write: Callable[..., None], shard: int) -> tuple[Callable[..., None], threading.Event]:
    """Returns ``write``, but this shard's part is written only when it may be."""
    may = threading.Event()

    def held(folder: str, number: int, *rest: Any) -> None:
        if number == shard:
            assert may.wait(30)
        write(folder, number, *rest)

    return held, may


def test_a_snapshot_is_taken_again_if_a_shard_goes_before_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, may = _held(writing.write, 2)
    monkeypatch.setattr(writing, "write", write)

    def go() -> None:
        cluster = ps.connect(server_names(3))
        table = cluster.table("counts", 2, ps.SGD(lr=1.0))
        table.push(torch.arange(IDS), -torch.ones(IDS, 2))
        saving = cluster.snapshot(tmp_path / "one")
        cluster.resize(server_names(2))
        assert not saving.done()
        table.push(torch.arange(IDS), -torch.ones(IDS, 2))
        may.set()
        count = saving.wait(30).counts[0]
        ids, rows = ps.read(tmp_path / "one", "counts")
        assert ids.tolist() == list(range(IDS))
        assert bool((rows == count).all())

    train([go], servers=3)


def test_a_snapshot_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "write", full)

    def go() -> None:
        cluster = ps.connect(server_names(1))
        cluster.table("items", 8, ps.SGD(lr=0.1))
        with pytest.raises(ps.SnapshotError, match=r"shard 0 could not write.* No space left"):
            cluster.snapshot(tmp_path / "one").wait(30)

    train([go])


def test_servers_come_and_go_while_trainers_push() -> None:
    def go(resizes: bool) -> Callable[..., Tensor]:
        def run() -> Tensor:
            cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=4)
            table = cluster.table("counts", 2, ps.SGD(lr=1.0))
            ids = torch.arange(400)
            for step in range(30):
                table.push(ids, -torch.ones(400, 2))
                if resizes and step in (8, 20):
                    cluster.resize(server_names(3 if step == 8 else 2))
            cluster.finish()
            return table.pull(ids)

        return run

    def last() -> Tensor:
        rows = go(resizes=True)()
        cluster = ps.connect(server_names(2), consistency=ps.Async(), trainers=4)
        table = cluster.table("counts", 2, ps.SGD(lr=1.0))
        while cluster.stats()["trainers"]:
            pass
        rows = table.pull(torch.arange(400))
        assert [len(s["shards"]) for s in cluster.stats()["servers"].values()] == [1, 1]
        return rows

    rows, *_ = train([last, *[go(resizes=False)] * 3], servers=2, spare=1)
    assert bool((rows == 120).all())
