"""Clusters publish versions while they train, begin with them, and go back to them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpc.agent import Agent
from rpc.testing import MemoryHub, as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.checkpoint import NotSavedError
from tensorwire.checkpoint.chain import Chain, Kind
from tensorwire.parameter_server.client import publishing
from tensorwire.parameter_server.decisions import tasks
from tensorwire.parameter_server.following.command import compact
from tensorwire.parameter_server.reading import read_dense
from tensorwire.parameter_server.snapshots.published import saved_at
from tests import waiting
from tests.tensorwire.checkpoint.folders import flip
from tests.tensorwire.parameter_server.clusters import train

_IDS = torch.arange(30)
_COLUMNS = ("weight", "state.sum", "touched")


def _items(cluster: ps.Cluster) -> ps.Table:
    return cluster.table(
        "items", 4, ps.Adagrad(lr=1.0), admit=ps.MinCount(2), evict=ps.UnusedFor(6)
    )


def _some(step: int) -> Tensor:
    return _IDS[(_IDS * 7 + step) % 5 < 2]


def _push(items: ps.Table, step: int) -> None:
    ids = _some(step)
    items.push(ids, torch.full((len(ids), 4), 0.5 + step))


def _push_on(items: ps.Table) -> None:
    for step in range(7, 12):
        _push(items, step)


def _all(folder: Path) -> list[Tensor]:
    """Everything of a snapshot or version."""
    pieces = [columns for _, columns in saved_at(folder).pieces("items")]
    if not pieces:
        return []
    ids, order = torch.sort(torch.cat([each["ids"] for each in pieces]))
    return [ids, *(torch.cat([each[c] for each in pieces])[order] for c in _COLUMNS)]


def _kinds(folder: Path) -> list[Kind]:
    return [each.kind for each in Chain.open(folder).versions()]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class _Replay:
    """A cluster in which heads die and that is resized while each step's version is compared.

    Args:
        hub: connects the workers.
        agents: servers, whose names are ``ps0`` and so on, and the trainer.
        consistency: of the cluster.
        folder: of versions and snapshots.
    """

    def __init__(
        self, hub: MemoryHub, agents: Sequence[Agent], consistency: Any, folder: Path
    ) -> None:
        self._hub = hub
        self._folder = folder
        self._servers = {each.info.name: each.info.id for each in agents[:-1]}
        self._cluster = ps.connect(list(self._servers)[:3], backups=1, consistency=consistency)
        self._items = _items(self._cluster)
        self._model = nn.Linear(3, 2)
        self._optimizer = ps.Optimizer(
            self._cluster, self._model, dense=torch.optim.Adam, name="net"
        )
        self.published = self._cluster.publish(
            folder / "chain", ps.Steps(10_000), base_every=10_000, state=True
        )
        self.published.wait()

    def step(self, number: int) -> None:
        _push(self._items, number)
        self._model(torch.ones(1, 3)).sum().backward()
        self._optimizer.step()
        _until_published(self.published)
        wanted = self._folder / "whole"
        self._cluster.snapshot(wanted, overwrite=True).wait()
        assert self.published.version is not None
        at = self.published.version.folder
        assert _same(_all(at), _all(wanted)), number
        assert torch.equal(read_dense(at, "net"), read_dense(wanted, "net"))  # type: ignore[arg-type]

    def kill_a_head(self) -> None:
        """While a version is taken."""
        waiting.until(lambda: _has_all_backups(self._cluster), 60)
        shards = self._cluster.session.view.shards
        self.published.take()
        self._hub.cut(self._servers.pop(shards[0].head.name))
        _until_published(self.published)

    def resize(self, count: int) -> None:
        waiting.until(lambda: _has_all_backups(self._cluster), 60)
        self._cluster.resize(list(self._servers)[-count:])


@pytest.mark.kills
@pytest.mark.timeout(900)
@pytest.mark.parametrize("consistency", [ps.BSP(), ps.Async()], ids=str)
def test_each_version_is_as_the_snapshot_of_its_step(
    tmp_path: Path, consistency: Any, full_length: bool, record_property: Callable[..., None]
) -> None:
    """While heads die and the cluster is resized, ids wait for rows, and rows are evicted."""
    hub, deltas = MemoryHub(), 200 if full_length else 7
    often = deltas // 3
    names = [f"ps{number}" for number in range(7)]
    with local_group(*names, "trainer", hub=hub) as agents, as_worker(agents[-1]):
        replay = _Replay(hub, agents, consistency, tmp_path)
        for number in range(1, deltas + 1):
            if number % often == 1:
                replay.kill_a_head()
            if number % often == 0:
                replay.resize(3 + number // often % 2)
            replay.step(number)
    record_property("times", deltas)
    kinds = _kinds(tmp_path / "chain")
    assert (kinds[0], kinds.count(Kind.BASE)) == (Kind.BASE, 1), "no delta had to be given up"
    assert kinds.count(Kind.DELTA) >= deltas


def test_versions_are_due_by_steps_and_hold_what_was_pushed(tmp_path: Path) -> None:
    def go() -> list[int]:
        cluster = ps.connect(["ps0"])
        items = _items(cluster)
        published = cluster.publish(tmp_path, ps.Steps(3))
        for step in range(1, 8):
            _push(items, step)
            published.wait()
        published.stop()
        with pytest.raises(ps.ParameterServerError, match=r"any more; call cluster\.publish"):
            published.take()
        return [each.step for each in Chain.open(tmp_path).versions()]

    steps = train([go])[0]
    assert steps[-2:] == [3, 6]
    assert ps.read(tmp_path, "items")[1].shape[1] == 4
    with pytest.raises(NotSavedError, match=r"have .*, not 'state.sum'"):
        ps.read(tmp_path, "items", "state.sum")


def test_a_version_is_due_once_the_push_that_it_must_hold_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters: list[ps.Cluster] = []
    noted, safe = publishing.Publishing.note_step, []

    def note(self: ps.Publishing, step: int) -> None:
        safe.append(clusters[0].session.is_safe_within(step - 1, 0))
        noted(self, step)

    def go() -> None:
        cluster = ps.connect(["ps0"])
        clusters.append(cluster)
        items = _items(cluster)
        cluster.publish(tmp_path, ps.Steps(1))
        for step in range(1, 5):
            _push(items, step)

    monkeypatch.setattr(publishing.Publishing, "note_step", note)
    train([go])
    assert safe == [True] * 4


def _shards(cluster: ps.Cluster) -> list[Any]:
    servers = cluster.stats()["servers"].values()
    return [shard for server in servers for shard in server["shards"].values()]


def _bytes(cluster: ps.Cluster) -> int:
    return sum(each["bytes"] for each in _shards(cluster))


def _notes_changes(cluster: ps.Cluster) -> bool:
    return any(each["notes_changes"] for each in _shards(cluster))


def test_servers_note_no_changes_once_nobody_publishes(tmp_path: Path) -> None:
    def go() -> None:
        cluster = ps.connect(["ps0", "ps1"])
        items = cluster.table("items", 4, ps.SGD(lr=1.0))
        items.push(_IDS, torch.ones(30, 4))
        before = _bytes(cluster)
        published = cluster.publish(tmp_path, ps.Steps(1))
        published.wait()
        assert _bytes(cluster) == before + 2 * len(_IDS)
        published.stop()
        assert _bytes(cluster) == before
        items.push(_IDS, torch.ones(30, 4))
        again = cluster.publish(tmp_path, ps.Steps(1))
        again.wait()
        items.push(_IDS[:7], torch.ones(7, 4))
        again.wait()
        ids, rows = ps.read(tmp_path, "items")
        assert torch.equal(rows, items.pull(ids))

    train([go], servers=2)
    assert _kinds(tmp_path) == [Kind.BASE, Kind.BASE, Kind.DELTA]


def test_servers_note_no_changes_for_a_publisher_that_is_lost(tmp_path: Path) -> None:
    """Also if the server that coordinated then is lost, too; another may publish then."""
    hub, names = MemoryHub(), ["ps0", "ps1", "ps2"]
    with local_group(*names, "trainer0", "trainer1", hub=hub) as agents:
        with as_worker(agents[3]):
            cluster = ps.connect(names, backups=1, consistency=ps.Async())
            cluster.table("items", 4, ps.SGD(lr=1.0)).push(_IDS, torch.ones(30, 4))
            cluster.publish(tmp_path / "one", ps.Steps(1)).wait()
        with as_worker(agents[4]):
            other = ps.connect(names, backups=1, consistency=ps.Async())
            waiting.until(lambda: _has_all_backups(other), 60)
            assert _notes_changes(other)
            hub.cut(agents[3].info.id)
            hub.cut(agents[0].info.id)
            waiting.until(lambda: _has_all_backups(other) and not _notes_changes(other), 60)
            published = other.publish(tmp_path / "two", ps.Steps(1))
            published.wait()
            assert _kinds(tmp_path / "two") == [Kind.BASE]


def test_rows_for_serving_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    def go() -> None:
        cluster = ps.connect(["ps0"])
        items = cluster.table("items", 2, ps.SGD(lr=1.0))
        half = ps.Precision.FLOAT16
        with pytest.raises(ValueError, match=r"precision=.*FLOAT16 rounds rows"):
            cluster.publish(tmp_path, ps.Steps(1), state=True, precision=half)
        items.push(torch.tensor([1, 2]), torch.tensor([[0.1, -7e4], [0.2, 0.3]]))
        published = cluster.publish(tmp_path, ps.Steps(1), precision=half)
        published.wait()
        items.push(torch.tensor([2]), torch.tensor([[0.01, 0.02]]))
        published.wait()
        ids, rows = ps.read(tmp_path, "items")
        wanted = items.pull(ids)
        wanted[0, 1] = 65504.0
        assert _kinds(tmp_path) == [Kind.BASE, Kind.DELTA]
        assert torch.equal(rows, wanted.half())

    train([go])


def test_rows_for_serving_may_be_of_eight_bits_with_a_scale_each(tmp_path: Path) -> None:
    ids, eight = torch.arange(200), ps.Precision.INT8

    def go() -> Tensor:
        cluster = ps.connect(["ps0", "ps1"])
        items = cluster.table("items", 16, ps.SGD(lr=1.0))
        with pytest.raises(ValueError, match=r"precision=.*INT8 rounds rows"):
            cluster.publish(tmp_path / "exact", ps.Steps(1), state=True, precision=eight)
        with pytest.raises(ValueError, match=r"precision=.*INT8 is for rows that are published"):
            cluster.table("others", 16, ps.SGD(lr=1.0), precision=eight)
        items.push(ids, torch.randn(200, 16, generator=torch.Generator().manual_seed(0)))
        published = cluster.publish(tmp_path / "chain", ps.Steps(1), precision=eight)
        published.wait()
        items.push(ids[:50], torch.randn(50, 16, generator=torch.Generator().manual_seed(1)))
        published.wait()
        with pytest.raises(ps.SnapshotError, match=r"precision=INT8, for readers: rows of items"):
            ps.connect(["ps0", "ps1"], name="another", restore=tmp_path / "chain")
        return items.pull(ids)

    (rows,) = train([go], servers=2)
    assert _kinds(tmp_path / "chain") == [Kind.BASE, Kind.DELTA]
    found, read = ps.read(tmp_path / "chain", "items")
    assert torch.equal(found, ids)
    most = rows.abs().amax(1, keepdim=True)
    assert bool(((read - rows).abs() <= most / 254 * (1 + 1e-5)).all())
    assert not torch.equal(read, rows)
    with ps.follow(tmp_path / "chain") as model:
        assert torch.equal(model.table("items").pull(ids), read)
        assert torch.equal(model.table("items").pull(torch.tensor([999])), torch.zeros(1, 16))
    compact(Chain.open(tmp_path / "chain"), tmp_path / "whole")
    assert torch.equal(ps.read(tmp_path / "whole", "items")[1], read)


def test_what_a_full_disk_did_not_take_is_in_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def go() -> bool:
        cluster = ps.connect(["ps0", "ps1"])
        items = _items(cluster)
        published = cluster.publish(tmp_path / "chain", ps.Steps(1000), state=True)
        published.wait()
        for step in range(1, 7):
            _push(items, step)
            with monkeypatch.context() as patch:
                if step % 3:
                    patch.setattr(publishing.ChainWriter, "commit", full)
                published.take()
                if step % 3:
                    with pytest.raises(ps.SnapshotError, match="No space left"):
                        published.wait()
                else:
                    published.wait()
        cluster.snapshot(tmp_path / "snapshot").wait()
        return _same(_all(tmp_path / "chain"), _all(tmp_path / "snapshot"))

    assert train([go], servers=2) == [True]
    assert _kinds(tmp_path / "chain") == [Kind.BASE, Kind.DELTA, Kind.DELTA]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for servers that do not come back."""
    monkeypatch.setattr(tasks, "PATIENCE", 0.1)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_cluster_goes_back_to_the_last_whole_delta_and_publishes_a_base(
    tmp_path: Path, is_damaged: bool
) -> None:
    hub = MemoryHub()
    with local_group("ps0", "ps1", "trainer", hub=hub) as agents, as_worker(agents[-1]):
        cluster = ps.connect(["ps0", "ps1"])
        items = _items(cluster)
        published = cluster.publish(tmp_path, ps.Steps(1), state=True)
        rows, versions = [], []
        for step in range(1, 6):
            _push(items, step)
            published.wait()
            rows.append(items.pull(_IDS))
            versions.append(published.version)
        published.stop()
        if is_damaged:
            flip(next(versions[-1].folder.glob("*.safetensors")), -1)
        _push(items, 6)
        hub.cut(agents[0].info.id)
        with pytest.raises(ps.RolledBack) as told:
            _push_on(items)
        last = versions[-2 if is_damaged else -1]
        assert last.kind is Kind.DELTA
        assert (told.value.step, told.value.snapshot) == (last.step, str(last.folder))
        assert torch.equal(items.pull(_IDS), rows[last.step - 1])
        again = cluster.publish(tmp_path, ps.Steps(1000), state=True)
        again.wait()
        assert again.version is not None
        assert (again.version.kind, again.version.step) == (Kind.BASE, last.step)
        assert again.version.number > versions[-1].number


def test_a_table_that_is_declared_and_converted_begins_a_base(tmp_path: Path) -> None:
    """Rows that were kept as a snapshot had them are kept otherwise from then on."""

    def first() -> None:
        cluster = ps.connect(["ps0"])
        _push(_items(cluster), 1)
        _push(_items(cluster), 2)
        cluster.snapshot(tmp_path / "begun").wait()

    def second() -> None:
        cluster = ps.connect(["ps0"], restore=tmp_path / "begun", strict=False)
        other = cluster.table("other", 1, ps.SGD(lr=1.0))
        published = cluster.publish(tmp_path / "chain", ps.Steps(1000), state=True)
        published.wait()
        other.push(_IDS[:3], torch.ones(3, 1))
        published.take()
        published.wait()
        half = {"precision": ps.Precision.BFLOAT16, "admit": ps.MinCount(2)}
        cluster.table("items", 4, ps.Adagrad(lr=1.0), evict=ps.UnusedFor(6), **half)
        published.take()
        published.wait()

    train([first])
    train([second])
    assert _kinds(tmp_path / "chain") == [Kind.BASE, Kind.DELTA, Kind.BASE]
    assert ps.read(tmp_path / "chain", "items")[1].dtype == torch.bfloat16


def test_training_goes_on_from_a_delta_on_other_servers_as_if_nothing_were(tmp_path: Path) -> None:
    def first() -> None:
        cluster = ps.connect(["ps0", "ps1"])
        items = _items(cluster)
        published = cluster.publish(tmp_path / "chain", ps.Steps(1000), state=True)
        for step in range(1, 5):
            _push(items, step)
            published.take()
            published.wait()
        for step in range(5, 12):
            _push(items, step)
        cluster.snapshot(tmp_path / "straight").wait()

    def second() -> None:
        cluster = ps.connect(["ps0", "ps1", "ps2"], restore=tmp_path / "chain")
        items = _items(cluster)
        for step in range(5, 12):
            _push(items, step)
        cluster.snapshot(tmp_path / "restored").wait()

    train([first], servers=2)
    train([second], servers=3)
    assert _same(_all(tmp_path / "straight"), _all(tmp_path / "restored"))


def _has_all_backups(cluster: ps.Cluster) -> bool:
    cluster.session.refresh()
    return all(len(shard.chain) == 2 for shard in cluster.session.view.shards)


def _until_published(published: ps.Publishing) -> None:
    """A version that meets the death of a head is given up; the next one holds what it should."""
    for _ in range(20):
        published.take()
        try:
            published.wait()
        except ps.SnapshotError:
            continue
        return
    raise AssertionError("no version was published")


def test_one_trainer_publishes(tmp_path: Path) -> None:
    begun, done = threading.Event(), threading.Event()

    def first() -> None:
        cluster = ps.connect(["ps0"], trainers=2, consistency=ps.Async())
        _push(_items(cluster), 1)
        cluster.publish(tmp_path / "one", ps.Seconds(0.01)).wait()
        with pytest.raises(ps.ParameterServerError, match="already; stop"):
            cluster.publish(tmp_path / "two", ps.Seconds(1))
        begun.set()
        assert done.wait(60)

    def second() -> None:
        cluster = ps.connect(["ps0"], trainers=2, consistency=ps.Async())
        _push(_items(cluster), 1)
        assert begun.wait(60)
        with pytest.raises(BlockingIOError, match="a chain has one writer"):
            cluster.publish(tmp_path / "one", ps.Seconds(1))
        with pytest.raises(ps.SnapshotError, match="'trainer0' publishes this cluster already"):
            cluster.publish(tmp_path / "three", ps.Seconds(1)).wait()
        done.set()

    train([first, second])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"every": 5}, "every=5 is a int, not ps.Steps"),
        ({"every": ps.Steps(1), "base_every": 0}, "base_every=0 must be at least 1"),
        ({"every": ps.Steps(1), "keep_bases": 0}, "keep_bases=0 must be at least 1"),
        ({"every": ps.Steps(1), "state": 1}, "state=1 is a int, not True or False"),
        ({"every": ps.Steps(1), "extra": {1}}, "no plain JSON"),
    ],
)
def test_a_wrong_argument_is_one_error(
    tmp_path: Path, options: dict[str, Any], wanted: str
) -> None:
    def go() -> None:
        with pytest.raises((TypeError, ValueError), match=wanted):
            ps.connect(["ps0"]).publish(tmp_path / "none", **options)

    train([go])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("wrong", [lambda: ps.Steps(0), lambda: ps.Seconds(0)])
def test_never_is_no_time_to_publish(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="at least"):
        wrong()
