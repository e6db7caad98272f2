"""Clusters begin with what a snapshot has, go back to whole ones only, and share one snapshot."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rpc.testing import MemoryHub, as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.checkpoint import CheckpointError, NoCheckpointError, NotSavedError
from tensorwire.parameter_server.decisions import tasks
from tests.tensorwire.checkpoint.folders import flip, rewrite
from tests.tensorwire.parameter_server.clusters import train

_IDS = torch.arange(30)


def _items(cluster: ps.Cluster, **options: Any) -> ps.Table:
    return cluster.table("items", **{"dim": 4, "optimizer": ps.SGD(lr=1.0), **options})


def _save(folder: Path, **options: Any) -> None:
    def save() -> None:
        cluster = ps.connect(["ps0", "ps1"])
        _items(cluster, **options).push(_IDS, torch.ones(30, 4))
        cluster.table("others", 2, ps.Adam(lr=0.1)).push(_IDS, torch.ones(30, 2))
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, 7.0)
        ps.Optimizer(cluster, model, dense=torch.optim.Adam, name="net")
        cluster.snapshot(folder, extra={"epoch": 2}).wait()

    train([save], servers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshots") / "1"
    _save(path)
    return path


def test_what_nobody_has_declared_is_there_without_its_folder(folder: Path, tmp_path: Path) -> None:
    """In the next snapshot, after a resize, and at a backup that has taken over."""
    begun = shutil.copytree(folder, tmp_path / "1")
    hub = MemoryHub()
    with local_group("ps0", "ps1", "ps2", "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster = ps.connect(["ps0", "ps1"], restore=begun, backups=1)
        _items(cluster).push(_IDS, torch.ones(30, 4))
        shutil.rmtree(begun)
        cluster.resize(["ps2", "ps1"])
        cluster.snapshot(tmp_path / "2").wait()
        hub.cut(agents[2].info.id)
        others = cluster.table("others", 2, ps.Adam(lr=0.1))
        wanted = ps.read(folder, "others")[1]
        assert torch.equal(others.pull(_IDS), wanted)
        assert torch.equal(_items(cluster).pull(_IDS), torch.full((30, 4), -2.0))
        model = nn.Linear(3, 2)
        ps.Optimizer(cluster, model, dense=torch.optim.Adam, name="net")
        assert model.weight.eq(7).all()
    ids, rows = ps.read(tmp_path / "2", "others")
    assert torch.equal(ids, _IDS)
    assert torch.equal(rows, wanted)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"dim": 5}, r"dim=4 was saved, dim=5 is declared"),
        ({"precision": ps.Precision.BFLOAT16}, r"precision=FLOAT32 was saved.*strict=False"),
        ({"optimizer": ps.Adagrad()}, r"optimizer=SGD .* was saved, Adagrad .* is declared"),
        ({"optimizer": ps.FTRL()}, r"optimizer=SGD was saved, FTRL is declared"),
        ({"init": ps.Uniform(0.5)}, r"init=Constant\(value=0.0\) was saved"),
        ({"evict": ps.UnusedFor(3)}, r"evict=None was saved, 3 is declared"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_a_table_that_was_saved_otherwise_is_one_error_and_harms_nobody(
    folder: Path, options: dict[str, Any], wanted: str
) -> None:
    def go() -> float:
        cluster = ps.connect(["ps0"], restore=folder)
        with pytest.raises(ps.RestoreError, match=f"table 'items' of the snapshot .*{wanted}"):
            _items(cluster, **options)
        return _items(cluster).pull(_IDS).mean().item()

    assert train([go]) == [-1.0]


def test_a_conversion_is_made_if_one_says_so_and_is_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def go() -> float:
        cluster = ps.connect(["ps0"], restore=folder, strict=False)
        half = _items(cluster, precision=ps.Precision.BFLOAT16, optimizer=ps.Adam(lr=0.1))
        half.push(_IDS, torch.ones(30, 4))
        with pytest.raises(ps.RestoreError, match="shapes"):
            ps.Optimizer(cluster, nn.Linear(2, 3), dense=torch.optim.Adam, name="net")
        ps.Optimizer(cluster, nn.Linear(3, 2), dense=torch.optim.SGD, name="net")
        return half.pull(_IDS).mean().item()

    assert train([go])[0] == pytest.approx(-1.1, abs=0.01)
    told = [record.getMessage() for record in caplog.records if "is converted" in record.message]
    assert len(told) == 3
    assert "rows are rounded" in "".join(told)


def test_the_dense_parameters_of_two_models_are_not_each_other_s(folder: Path) -> None:
    def go() -> list[str]:
        cluster = ps.connect(["ps0"], restore=folder, strict=False)
        refused = []
        for model in (nn.Linear(1, 8, bias=False), nn.Linear(2, 2), nn.Linear(4, 2)):
            with pytest.raises(ps.RestoreError) as error:
                ps.Optimizer(cluster, model, dense=torch.optim.Adam, name="net")
            refused.append(str(error.value))
        with pytest.raises(ps.RestoreError, match="dense parameters were saved, a table is"):
            cluster.table("net", 2, ps.SGD(lr=0.1))
        return refused

    assert all("shapes ((2, 3), (2,)) were saved" in each for each in train([go])[0])


def test_restore_is_honoured_or_refused(folder: Path, tmp_path: Path) -> None:
    began = threading.Event()
    other = shutil.copytree(folder, tmp_path / "other")

    def first() -> None:
        cluster = ps.connect(["ps0"], restore=folder)
        began.set()
        cluster.snapshot(tmp_path / "later").wait()
        later.set()

    later = threading.Event()

    def second() -> None:
        assert began.wait(60)
        with pytest.raises(ps.DeclarationError, match=r"restore='.*1', not '.*other'"):
            ps.connect(["ps0"], restore=other)
        with pytest.raises(ps.DeclarationError, match=r"strict=True, not False"):
            ps.connect(["ps0"], restore=folder, strict=False)
        assert later.wait(60)
        ps.connect(["ps0"], restore=tmp_path / "later")  # as one who starts again does
        ps.connect(["ps0"], restore=folder)

    train([first, second])

    def without() -> None:
        ps.connect(["ps0"])
        with pytest.raises(ps.DeclarationError, match=r"restore=None, not "):
            ps.connect(["ps0"], restore=folder)

    train([without])


def _other_column(folder: Path) -> None:
    rewrite(folder, lambda d: _part(d)["meta"]["tables"]["others"]["about"]["state"].pop("mean"))


def _same_rows_twice(folder: Path) -> None:
    def twice(document: Any) -> None:
        part = _part(document)
        about = part["meta"]["tables"]["items"]
        for name, entry in list(part["tensors"].items()):
            if name.startswith("table/items/0/"):
                part["tensors"][name.replace("/0/", "/1/")] = entry
        about["pieces"] += 1

    rewrite(folder, twice)


def _swapped(shard0: Any, shard1: Any) -> Any:
    return {"shard0": shard1, "shard1": shard0}


def _part(document: Any) -> Any:
    return next(part for part in document["parts"].values() if part["meta"]["tables"])


def _flipped(folder: Path) -> None:
    flip(max(folder.glob("shard0*"), key=os.path.getsize), -1)


@pytest.mark.parametrize(
    "damage",
    [
        _flipped,
        _other_column,
        _same_rows_twice,
        lambda folder: rewrite(folder, lambda d: d["parts"].pop("shard1")),
        lambda folder: rewrite(folder, lambda d: d["meta"].update(time="1")),
        lambda folder: rewrite(folder, lambda d: d["meta"].pop("parameter_server")),
        lambda folder: rewrite(folder, lambda d: _part(d)["meta"].update(shard=7)),
        lambda folder: rewrite(folder, lambda d: d.update(parts=_swapped(**d["parts"]))),
    ],
)
def test_a_damaged_snapshot_is_refused_before_there_is_a_cluster(
    folder: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "1")
    damage(copy)

    def go() -> None:
        with pytest.raises(CheckpointError):
            ps.connect(["ps0"], restore=copy)
        assert _items(ps.connect(["ps0"], restore=folder)).pull(_IDS).mean().item() == -1

    train([go])


def test_reading_names_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotSavedError, match="there is no table 'x'"):
        ps.read(folder, "x")
    with pytest.raises(NotSavedError, match=r"have .* not 'state.x'"):
        ps.read(folder, "items", "state.x")
    with pytest.raises(NoCheckpointError):
        ps.read(tmp_path / "none", "items")


def _push_on(items: ps.Table) -> None:
    for _ in range(3):
        items.push(_IDS, torch.ones(30, 4))


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for servers that do not come back."""
    monkeypatch.setattr(tasks, "PATIENCE", 0.1)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("damaged", [1, 2])
def test_a_roll_back_takes_the_newest_snapshot_that_is_whole(tmp_path: Path, damaged: int) -> None:
    hub = MemoryHub()
    with local_group("ps0", "ps1", "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster = ps.connect(["ps0", "ps1"])
        items = _items(cluster)
        for step in (1, 2, 3):
            items.push(_IDS, torch.ones(30, 4))
            cluster.snapshot(tmp_path / str(step)).wait()
        shutil.rmtree(tmp_path / "3")
        if damaged > 1:
            _flipped(tmp_path / "2")
        items.push(_IDS, torch.ones(30, 4))
        hub.cut(agents[0].info.id)
        with pytest.raises(ps.RolledBack) as told:
            _push_on(items)
        whole = 3 - damaged
        assert (told.value.step, told.value.snapshot) == (whole, str(tmp_path / str(whole)))
        items.push(_IDS, torch.ones(30, 4))
        assert items.pull(_IDS).mean().item() == -whole - 1
        cluster.snapshot(tmp_path / "2", overwrite=True).wait()
        assert ps.read(tmp_path / "2", "items")[1].mean().item() == -whole - 1


def test_without_a_whole_snapshot_all_are_told_why(tmp_path: Path) -> None:
    hub = MemoryHub()
    with local_group("ps0", "ps1", "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster = ps.connect(["ps0", "ps1"])
        items = _items(cluster)
        items.push(_IDS, torch.ones(30, 4))
        cluster.snapshot(tmp_path / "1").wait()
        shutil.rmtree(tmp_path / "1")
        hub.cut(agents[0].info.id)
        with pytest.raises(ps.ServerLostError, match=r"no snapshot is whole: .*there is no check"):
            _push_on(items)


@pytest.mark.parametrize("consistency", [ps.BSP(), ps.Async()], ids=str)
def test_a_snapshot_that_all_trainers_ask_for_is_one(tmp_path: Path, consistency: Any) -> None:
    def go() -> list[Any]:
        cluster = ps.connect(["ps0", "ps1"], trainers=3, consistency=consistency)
        items, found = _items(cluster), []
        for _ in range(4):
            items.push(_IDS, torch.ones(30, 4))
            found.append(cluster.snapshot(tmp_path / str(cluster.step)).wait(60))
        with pytest.raises(ps.SnapshotError, match="exists"):
            cluster.snapshot(found[0].folder).wait(60)
        cluster.finish()
        return found

    first, *rest = train([go] * 3, servers=2)
    assert all(each == first for each in rest)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["1", "2", "3", "4"]


def test_two_snapshots_that_differ_are_not_one(tmp_path: Path) -> None:
    def go(number: int) -> str:
        cluster = ps.connect(["ps0"], trainers=2)
        _items(cluster).push(_IDS, torch.ones(30, 4))
        try:
            cluster.snapshot(tmp_path / "1", extra={"rank": number}).wait(60)
        except ps.SnapshotError as error:
            return str(error)
        finally:
            cluster.finish()
        return ""

    told = train([lambda: go(0), lambda: go(1)])
    assert sum(not each for each in told) == 1
    assert any("is being written with" in each or "exists" in each for each in told)


def test_snapshot_errors_are_checkpoint_errors() -> None:
    assert issubclass(ps.SnapshotError, CheckpointError)
    assert issubclass(ps.RestoreError, CheckpointError)
    assert issubclass(ps.RestoreError, ps.DeclarationError)
