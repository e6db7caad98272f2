"""The real state of a shard, played beside the histories: a table, and dense parameters.

Each id of a game has one row of one column and one parameter of one element. Each push has a
gradient of one for all of them, and the learning rate is one: so every value says how many pushes
its shard has applied. At the end, at each snapshot and at each copy that is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.consistency import BSP, Consistency, Reduce
from tensorwire.parameter_server.decisions.pushes import Apply, Push, Reached
from tensorwire.parameter_server.decisions.records import Import
from tensorwire.parameter_server.decisions.slots import slot_of
from tensorwire.parameter_server.declarations import spec as specs
from tensorwire.parameter_server.declarations.dense_spec import (
    DenseSpec,
    Piece,
    PieceData,
    Spread,
    describe,
)
from tensorwire.parameter_server.declarations.initialisers import Constant
from tensorwire.parameter_server.declarations.rules import SGD
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.kernels import torch_kernels
from tensorwire.parameter_server.messaging.messages import DensePush, Load, TableIds, TablePush
from tensorwire.parameter_server.server.parts import Copied, FrozenShard, Moved
from tensorwire.parameter_server.server.state import ShardState
from tensorwire.parameter_server.storage.table import Rows
from tests.tensorwire.parameter_server.game.plans import IDS, Broken, History
from tests.tensorwire.parameter_server.game.publisher import Part

TABLE, DENSE = "items", "net"
_RULE = SGD(lr=1.0)


@functools.cache
def real_ids() -> dict[int, int]:
    """By id of the game, which is its own slot, an id that has this slot by its hash."""
    found: dict[int, int] = {}
    candidate = 0
    while len(found) < len(IDS):
        found.setdefault(slot_of(candidate), candidate)
        found = {slot: each for slot, each in found.items() if slot in IDS}
        candidate += 1
    return found


@functools.cache
def _dense() -> DenseSpec:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in IDS]
    spec = describe(DENSE, torch.optim.SGD(parameters, lr=1.0), Spread.ELEMENTS)
    return replace(spec, pieces=tuple(Piece(n, 0, 0, 1, slot) for n, slot in enumerate(IDS)))


@functools.cache
def declared() -> Mapping[str, str]:
    """The declarations of trainers, as text."""
    table = TableSpec(TABLE, 1, _RULE, Constant())
    return {TABLE: table.encode(), DENSE: specs.encode(_dense())}


def _memory(to: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


@dataclass(frozen=True)
class Copy:
    """A shard on its way to a new backup."""

    rest: Copied
    rows: Mapping[str, Sequence[Rows]]


class RealState:
    """The state of a shard as servers have it.

    Args:
        shard: its number.
        consistency: of the cluster.
    """

    def __init__(self, shard: int, consistency: Consistency) -> None:
        if isinstance(consistency, BSP):  # the mean over trainers would count none of them
            consistency = BSP(Reduce.SUM)
        self.state = ShardState(shard, consistency, torch_kernels, _memory)
        self.versions: dict[int, dict[int, float]] = {}

    def run(self, what: Any, whole: Mapping[int, History] | None = None) -> None:
        """Does what a record says.

        Args:
            what: the record.
            whole: what is in the snapshot from which a shard is primed.
        """
        if isinstance(what, Apply):
            what = replace(what, pushes=tuple(map(_loaded, what.pushes)))
        elif isinstance(what, Import):
            what = replace(what, load=what.load[1])
        elif isinstance(what, orders.Prime):
            what = replace(what, folder="")
        self.state.run(what)
        if isinstance(what, Reached) and _is_version(what):
            every = self.state.tables.get(TABLE)
            frozen = every.freeze() if every is not None else None
            self.versions[what.cut.change] = _values(frozen) if frozen is not None else {}
            if frozen is not None:
                frozen.thaw()
        if whole is not None:
            self._restore(whole)

    def _restore(self, whole: Mapping[int, History]) -> None:
        state = self.state
        own = [each for each in IDS if state.slots[each] == state.shard and whole.get(each)]
        values = {each: -float(_count(whole[each])) for each in own}
        if TABLE in state.tables:
            ids = np.array([real_ids()[each] for each in own], np.int64)
            weight = np.array(list(values.values()), np.float32).reshape(-1, 1)
            state.tables[TABLE].enter(Rows(ids, {"weight": weight}))
        if DENSE in state.dense:
            data = {IDS.index(e): PieceData(torch.tensor([value])) for e, value in values.items()}
            state.dense[DENSE].enter(data, 0)

    def moved(self, target: int, epoch: int) -> Moved:
        """The values that go to another shard."""
        return self.state.exports[target, epoch]

    def copy(self) -> Copy:
        """All of it, for a new backup."""
        frozen, rest = self.state.freeze(), self.state.copied()
        rows = {name: _pieces(each) for name, each in frozen.tables.items()}
        self.state.thaw(frozen)
        return Copy(rest, rows)

    def become(self, copy: Copy) -> None:
        """Takes over what another server kept."""
        self.state.become(copy.rest, copy.rows)

    # --- comparing

    def check(self, rows: Mapping[int, History]) -> None:
        """Compares the values with how many pushes there were."""
        frozen = self.state.freeze()
        try:
            self._compare(frozen, rows)
        finally:
            self.state.thaw(frozen)

    def check_frozen(self, change: int, rows: Mapping[int, History]) -> None:
        """Compares what a snapshot would write; nobody writes it any more."""
        frozen = self.state.frozen.pop(change)
        assert isinstance(frozen, FrozenShard)
        self._compare(frozen, rows)
        self.state.thaw(frozen)

    def version_part(self, change: int) -> Part | orders.Unmarked:
        """The part of a version that this shard would write."""
        frozen, every = self.state.frozen.pop(change), self.versions.pop(change)
        if isinstance(frozen, orders.Unmarked):
            return frozen
        rows = _values(frozen.tables[TABLE]) if TABLE in frozen.tables else {}
        self.state.thaw(frozen)
        return Part(rows, every)

    def _compare(self, frozen: FrozenShard, rows: Mapping[int, History]) -> None:
        wanted = {each: -float(_count(history)) for each, history in rows.items() if history}
        if TABLE in frozen.tables:
            found = _values(frozen.tables[TABLE])
            if found != {real_ids()[each]: value for each, value in wanted.items()}:
                raise Broken(f"shard {self.state.shard} has rows {found}, not {wanted}")
        if DENSE in frozen.dense:
            data = {IDS[place]: p.value.item() for place, p in frozen.dense[DENSE].data.items()}
            if data != {each: wanted.get(each, 0.0) for each in {*data, *wanted}}:
                raise Broken(f"shard {self.state.shard} has dense values {data}, not {wanted}")


def _loaded(push: Push) -> Push:
    """A push with gradients in the place of numbers."""
    ids = torch.tensor([real_ids()[each] for each in sorted(push.load)], dtype=torch.int64)
    ones = torch.ones(len(ids))
    rows = TableIds((TABLE,), (len(ids),), ids)
    table = TablePush(rows, (ones.reshape(-1, 1),), (_RULE.hyper(),))
    dense = DensePush({torch.float32: (ones,)}, frozenset(), _dense().groups)
    return replace(push, load=Load((table,), {DENSE: dense}))


def _is_version(reached: Reached) -> bool:
    action = reached.cut.action
    return isinstance(action, orders.Freeze) and action.version is not None


def _count(history: History) -> int:
    return sum(len(step) for step in history)


def _values(frozen: Any) -> dict[int, float]:
    return {
        each: float(value)
        for piece in _pieces(frozen)
        for each, (value,) in zip(piece.ids.tolist(), piece.columns["weight"], strict=True)
    }


def _pieces(frozen: Any) -> list[Rows]:
    return list(iter(lambda: frozen.next_piece(1000), None))
