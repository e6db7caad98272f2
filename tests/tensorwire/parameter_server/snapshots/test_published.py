"""Bases and deltas give what a snapshot of the same cut gives, whatever happens between them."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorwire import parameter_server as ps
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.orders import Extent, Version
from tensorwire.parameter_server.decisions.pushes import Apply, Cut, Push, PushKind, Reached
from tensorwire.parameter_server.decisions.records import Assign, Exported, Import
from tensorwire.parameter_server.decisions.slots import moved, slot_of
from tensorwire.parameter_server.declarations import spec as specs
from tensorwire.parameter_server.declarations.dense_spec import Spread, describe
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.kernels import torch_kernels
from tensorwire.parameter_server.messaging.messages import Load, TableIds, TablePush, Values
from tensorwire.parameter_server.server import restoring, writing
from tensorwire.parameter_server.server.parts import FrozenShard
from tensorwire.parameter_server.server.state import ShardState
from tensorwire.parameter_server.snapshots.contents import Restored
from tensorwire.parameter_server.snapshots.published import Replayed, about_version, content_of
from tensorwire.parameter_server.storage.frozen import Frozen
from tensorwire.parameter_server.storage.table import Rows
from tests.tensorwire.parameter_server.snapshots import shards as kit

_CHAIN = "a chain"
_IDS = 60
_ITEMS = TableSpec("items", 3, ps.Adagrad(lr=0.5), ps.Uniform(0.1), ps.MinCount(2), ps.UnusedFor(9))
_USERS = TableSpec("a/b c", 2, ps.SGD(lr=0.5), ps.Uniform(0.1), precision=ps.Precision.BFLOAT16)
_NET = describe("net", torch.optim.Adam(nn.Linear(3, 2).parameters(), lr=0.1), Spread.ELEMENTS)
_TABLES = (_ITEMS, _USERS)


class _Cluster:
    """Shards that pushes come to, and the versions that were published of them."""

    def __init__(self, folder: Path, seed: int, with_state: bool = True) -> None:
        self.dice = random.Random(seed)
        self.folder = folder
        self.with_state = with_state
        declared = {each.name: specs.encode(each) for each in (*_TABLES, _NET)}
        self.shards = {each.shard: each for each in kit.primed(declared, 2)}
        for each in self.shards.values():
            each.run(Assign(Values("net", 0, kit.beginning(_NET))))
        self.time = self.epoch = self.change = self.tried = 0
        self.made = 2
        self.versions: list[Restored] = []
        self.pushed: set[int] = set()

    @property
    def slots(self) -> tuple[int, ...]:
        return next(iter(self.shards.values())).slots

    def push(self) -> None:
        self.time += 1
        ids = torch.tensor(sorted(self.dice.sample(range(_IDS), 7)))
        self.pushed |= set(ids.tolist())
        for shard in self.shards.values():
            own = torch.tensor([i for i in ids.tolist() if shard.slots[slot_of(i)] == shard.shard])
            own = own.to(torch.int64)
            pushes = []
            for spec in _TABLES:
                grad = spec.wire.push.pack(torch.sin(own[:, None] + torch.arange(spec.dim) + 0.3))
                rows = TableIds((spec.name,), (len(own),), own)
                pushes.append(TablePush(rows, grad, (spec.rule.hyper(),)))
            load = Load(tuple(pushes), kit.dense_gradients(shard, _NET, self.time).dense)
            push = Push(0, self.time - 1, self.epoch, PushKind.UPDATE, load)
            shard.run(Apply((push,), self.time))

    def resize(self) -> None:
        """Some shards stay, others come."""
        old = list(self.shards)
        staying = self.dice.sample(old, self.dice.randint(1, len(old)))
        new = [self.made + n for n in range(self.dice.randint(0, 2))]
        self.made += len(new)
        self.epoch += 1
        self.change += 1
        slots = moved(self.slots, [*staying, *new])
        awaited = {each: frozenset(old) - {each} for each in (*staying, *new)}
        move = orders.Move(slots)
        cut = Cut(self.change, {}, {}, self.epoch, awaited, move, self.time)
        declared = {each.name: specs.encode(each) for each in (*_TABLES, _NET)}
        for number in new:
            made = ShardState(number, ps.BSP(), torch_kernels, kit.memory)
            made.run(orders.Prime({0: 0}, self.time, self.epoch, slots, frozenset(old), declared))
            self.shards[number] = made
        for number in old:
            self.shards[number].run(Reached(cut))
        for number in old:
            for (target, epoch), rows in list(self.shards[number].exports.items()):
                self.shards[target].run(Import(number, epoch, rows))
                self.shards[number].run(Exported(target, epoch))
        self.shards = {n: each for n, each in self.shards.items() if n in awaited}

    def replace(self) -> None:
        """A new backup is copied, and takes over."""
        number = self.dice.choice(list(self.shards))
        old = self.shards[number]
        frozen, rest = old.freeze(), old.copied()
        rows: dict[str, list[Any]] = {}
        for name, table in frozen.tables.items():
            while (piece := table.next_piece(10)) is not None:
                rows.setdefault(name, []).append(piece)
        heir = ShardState(number, ps.BSP(), torch_kernels, kit.memory)
        heir.become(rest, rows)
        self.shards[number] = heir

    def publish(self, extent: Extent, fails: bool = False) -> None:
        """Takes a version; pushes come while it is written."""
        self.change += 1
        version = Version(_CHAIN, extent, self.with_state)
        cut = Cut(self.change, {}, action=orders.Freeze(version), time=self.time)
        folder = self.folder / str(self.change)
        folder.mkdir(parents=True)
        for shard in self.shards.values():
            shard.run(Reached(cut))
        change, time, writers = self.change, self.time, dict(self.shards)
        due, self.pushed = self.pushed, set()
        for _ in range(self.dice.randint(0, 3)):
            self.push()
        if self.dice.random() < 0.3:
            self.resize()
        for number, shard in writers.items():
            frozen = shard.frozen.pop(change)
            assert isinstance(frozen, FrozenShard)
            writing.write(folder, number, frozen, threading.Lock())
            shard.thaw(frozen)
        if fails:
            self.pushed |= due
            return
        for shard in self.shards.values():
            shard.run(orders.Published(change))
        found = content_of(folder, about_version(list(writers), {0: time}, time, None, {}))
        found.verify()
        if extent is Extent.CHANGES:
            rows = [i for _, c in found.pieces(_USERS.name) for i in c["ids"].tolist()]
            assert sorted(rows) == sorted(due)
        self.versions = [found] if extent is Extent.ALL else [*self.versions, found]


def test_pushes_wait_for_a_slice_of_rows_at_most_and_files_have_them_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(9000)
    (shard,) = kit.primed({_USERS.name: specs.encode(_USERS)}, 1)
    shard.tables[_USERS.name].fill_new(ids, np.ones((9000, 2), np.float32))
    lock, copied, next_piece = threading.Lock(), [], Frozen.next_piece

    def counted(frozen: Frozen, size: int) -> Rows | None:
        rows = next_piece(frozen, size)
        assert lock.locked()
        copied.append(0 if rows is None else len(rows.ids))
        return rows

    monkeypatch.setattr(Frozen, "next_piece", counted)
    frozen = shard.freeze()
    writing.write(tmp_path, 0, frozen, lock)
    shard.thaw(frozen)
    assert max(copied) <= 4096
    found = content_of(tmp_path, about_version([0], {0: 0}, 0, None, {}))
    ((_, columns),) = found.pieces(_USERS.name)
    assert np.array_equal(columns["ids"].numpy(), ids)


def _restored(versions: list[Restored], shards: int) -> list[ShardState]:
    """New shards with what a base and its deltas have."""
    replayed = Replayed(versions)
    declared = {each.name: specs.encode(each) for each in (*_TABLES, _NET)}
    made = kit.primed(declared, shards, time=replayed.time)
    for shard in made:
        for table in shard.tables.values():
            own = np.asarray(shard.slots) == shard.shard
            restoring.load_table(table, replayed, own, replayed.time)
        for group in shard.dense.values():
            restoring.load_dense(group, replayed)
    return made


def _told(shards: list[ShardState]) -> dict[str, Any]:
    """All that training goes on from, in an order that does not depend on shards."""
    found: dict[str, Any] = {}
    for spec in _TABLES:
        found |= {f"{spec.name}/{k}": v for k, v in kit.columns(shards, spec.name).items()}
        found[f"{spec.name}/waiting"] = torch.tensor(kit.waiting(shards, spec.name))
        found[f"{spec.name}/steps"] = torch.tensor(max(s.tables[spec.name].steps for s in shards))
    for place, piece in kit.dense(shards, "net").items():
        found[f"net/{place}"] = piece.value
        found |= {f"net/{place}/{k}": torch.as_tensor(v) for k, v in piece.state.items()}
    return found


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [n for n in found.keys() | wanted if not torch.equal(found[n], wanted[n])]


@pytest.mark.parametrize("seed", range(4))
def test_each_version_is_what_a_snapshot_of_its_cut_is(seed: int, tmp_path: Path) -> None:
    """Versions that were given up, new shards, new backups, evicted and reborn rows between.

    Where no row is evicted, a delta has exactly the rows that changed.
    """
    cluster = _Cluster(tmp_path, seed)
    for _ in range(5):
        cluster.push()
    for number in range(10):
        for _ in range(cluster.dice.randint(0, 4)):
            cluster.push()
        for happens in (cluster.resize, cluster.replace):
            if cluster.dice.random() < 0.3:
                happens()
        wanted = _told(list(cluster.shards.values()))
        extent = Extent.ALL if number % 5 == 0 else Extent.CHANGES
        fails = number > 0 and cluster.dice.random() < 0.3
        cluster.publish(extent, fails)
        if not fails:
            found = _told(_restored(cluster.versions, cluster.dice.randint(1, 3)))
            assert not _differences(found, wanted), f"seed {seed}, version {number}"
