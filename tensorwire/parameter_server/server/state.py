"""The state of one shard, and what each record of its log does to it.

Head and backup run the same records in the same order, so that they hold the same bits. Not for
several threads at a time (``lane``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.consistency import BSP, Consistency, Reduce
from tensorwire.parameter_server.decisions.pushes import Apply, Push, Reached
from tensorwire.parameter_server.decisions.records import Assign, Exported, Import
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.views import KEPT
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.declarations.wire import Float32, Packed
from tensorwire.parameter_server.kernels.arrays import Bools, Bytes, Ints
from tensorwire.parameter_server.kernels.copying import joined
from tensorwire.parameter_server.messaging.messages import (
    Ask,
    Changed,
    DensePush,
    FirstRows,
    Known,
    Load,
    TableIds,
    TablePush,
    Values,
)
from tensorwire.parameter_server.server import restoring
from tensorwire.parameter_server.server.parts import (
    Copied,
    CopiedTable,
    FrozenDense,
    FrozenShard,
    Moved,
    MovedDense,
    MovedTable,
)
from tensorwire.parameter_server.snapshots.contents import Restored
from tensorwire.parameter_server.snapshots.kept import spec_of
from tensorwire.parameter_server.snapshots.published import saved_at
from tensorwire.parameter_server.storage import tables as many
from tensorwire.parameter_server.storage.changes import Changes
from tensorwire.parameter_server.storage.dense import DensePart, DenseShard
from tensorwire.parameter_server.storage.last_changes import Numbering
from tensorwire.parameter_server.storage.table import Rows, TableShard
from tensorwire.parameter_server.storage.tables import ManyParts, ManyPlaces

_logger: Final = logging.getLogger("tensorwire")
_MEMOS: Final = 3
"""Pulls of each trainer that are remembered; it may have asked for more before it pushes."""

Buffers = Callable[[str, Sequence[int], torch.dtype], Tensor]
"""Makes a tensor to be sent to a worker: its name, shape and dtype."""


@dataclass(slots=True)
class Memo:
    """The rows that a pull of a trainer found, so that its push need not look again."""

    pull: int
    places: dict[tuple[str, ...], ManyPlaces] = field(default_factory=dict)


class ShardState:
    """The state of one shard.

    Args:
        shard: its number.
        consistency: says how gradients of one step become one.
        kernels: see ``kernels``.
        buffers: makes tensors that are sent without being copied again.
        device: where rows of tables are; None for the host's memory.
    """

    def __init__(
        self,
        shard: int,
        consistency: Consistency,
        kernels: ModuleType,
        buffers: Buffers,
        device: torch.device | None = None,
    ) -> None:
        self.shard = shard
        self.slots: tuple[int, ...] = ()
        self.tables: dict[str, TableShard] = {}
        self.dense: dict[str, DenseShard] = {}
        self.frozen: dict[int, FrozenShard | orders.Unmarked] = {}
        self.exports: dict[tuple[int, int], Moved] = {}
        self.declared: dict[str, str] = {}
        self.updates = 0
        self.chain = ""
        self._version = -1
        self._told: set[tuple[str, ...]] = set()
        self._mean = isinstance(consistency, BSP) and consistency.reduce is Reduce.MEAN
        self._kernels = kernels
        self._buffers = buffers
        self._device = device
        self._memos: dict[int, deque[Memo]] = {}
        self._time = 0
        self._numbering: Numbering | None = None

    @property
    def bytes(self) -> int:
        """The bytes that tables and dense groups take."""
        tables = sum(table.bytes for table in self.tables.values())
        return tables + sum(group.bytes for group in self.dense.values())

    # --- records

    def run(self, what: object) -> None:
        """Changes the state by one record."""
        if isinstance(what, Apply):
            self._apply(what)
        elif isinstance(what, orders.Prime):
            self._prime(what)
        elif isinstance(what, orders.Declare):
            self._declare(what.name, what.text)
        elif isinstance(what, Reached):
            self._pass_cut(what)
        elif isinstance(what, Import):
            self._import(what.load)
        elif isinstance(what, Exported):
            self.exports.pop((what.target, what.epoch), None)
        elif isinstance(what, orders.Published):
            self._publish(what.change)
        elif isinstance(what, Assign):
            self._assign(what.load)

    def _apply(self, update: Apply) -> None:
        self.updates += 1
        self._time = max(self._time, update.time)
        if self._numbering is not None:
            self._numbering.number += 1
        loads: list[tuple[Push, Load]] = [(push, push.load) for push in update.pushes]
        share = float(len(loads)) if self._mean and len(loads) > 1 else None
        for names, pushes in _together(loads).items():
            tables = [self.tables[name] for name in names]
            self._compare(names, [(push.trainer, part.hyper) for push, part in pushes])
            for table, hyper in zip(tables, pushes[0][1].hyper, strict=True):
                if hyper != table.hyper:
                    table.set_hyper(table.rule.with_hyper(hyper))
            parts = [self._parts(push, part) for push, part in pushes]
            many.apply(self._kernels, tables, parts, update.time, share)
        for name, group in self.dense.items():
            given = [(push.trainer, load.dense[name]) for push, load in loads if name in load.dense]
            dense = [part for _, part in given]
            self._compare((name,), [(trainer, part.hyper) for trainer, part in given])
            if dense:
                group.apply([self._dense_part(part) for part in dense], share)

    def _compare(self, names: tuple[str, ...], given: list[tuple[int, object]]) -> None:
        """Says once if trainers whose gradients make one step want different steps."""
        for trainer, hyper in given[1:]:
            if names not in self._told and repr(hyper) != repr(given[0][1]):
                self._told.add(names)
                _logger.warning(
                    "trainers %d and %d give %s different hyper-parameters for one step, %r and "
                    "%r; those of trainer %d count", given[0][0], trainer, ", ".join(names),
                    given[0][1], hyper, given[0][0],
                )  # fmt: skip

    def _parts(self, push: Push, part: TablePush) -> ManyParts:
        rows = part.rows
        spec = self.tables[rows.tables[0]].spec
        grad = spec.wire.push.unpack(part.grad, spec.dim)
        memos = [m for m in self._memos.get(push.trainer, ()) if m.pull == part.pulled]
        places = memos[0].places.get(rows.tables) if memos else None
        return ManyParts(rows.sizes, rows.ids.numpy(), grad.numpy(), places)

    def _dense_part(self, part: DensePush) -> DensePart:
        grads = {dtype: packed[0] for dtype, packed in part.grads.items()}
        return DensePart(grads, part.absent, part.hyper)

    def _prime(self, order: orders.Prime) -> None:
        self.slots, self._time = order.slots, order.time
        early = {n: text for n, text in self.declared.items() if not text.startswith(KEPT)}
        declared, self.declared = {**order.declared, **early}, {}
        self.tables, self.dense = {}, {}
        self.chain, self._version = "", -1
        self._end_numbering()
        for name, text in declared.items():
            self._declare(name, text)
        if order.folder and not order.awaited:
            self._restore(saved_at(order.folder))

    def _restore(self, restored: Restored) -> None:
        """Takes in everything of the snapshot that belongs to this shard."""
        for table in self.tables.values():
            restoring.load_table(table, restored, self._own(), self._time)
        for group in self.dense.values():
            restoring.load_dense(group, restored)

    def _declare(self, name: str, text: str) -> None:
        known = self.declared.get(name)
        if known is not None and (known == text or not known.startswith(KEPT)):
            return
        self.declared[name] = text
        if not self.slots:  # it is made when the shard is primed, which says what belongs to it
            return
        spec = spec_of(name, text)
        if isinstance(spec, TableSpec):
            kept = self.tables.get(name)
            if kept is not None:
                self._end_numbering()
            self.tables[name] = (
                TableShard(spec, self._kernels, self._device)
                if kept is None
                else restoring.declared_table(kept, spec, self._time, self._device)
            )
            if self.chain and self.tables[name].watchers.changes is None:
                self.tables[name].watchers.changes = Changes()
        else:
            group = self.dense.get(name)
            self.dense[name] = (
                DenseShard(spec, self.slots, self.shard)
                if group is None
                else restoring.declared_dense(group, spec, self.slots)
            )

    def _own(self) -> Bools:
        own: Bools = np.asarray(self.slots) == self.shard
        return own

    def _assign(self, values: Values | FirstRows) -> None:
        if isinstance(values, FirstRows):
            table, ids = self.tables[values.table], values.ids.numpy()
            own = table.in_slots(ids, self._own())
            if self._numbering is not None:
                self._numbering.number += 1
            table.fill_new(ids[own], values.rows.numpy()[own])
            return
        group = self.dense.get(values.name)
        if group is not None:
            group.load(values.data, values.loader, values.keeps_state)

    # --- cuts

    def _pass_cut(self, reached: Reached) -> None:
        cut = reached.cut
        if isinstance(cut.action, orders.Freeze):
            version = cut.action.version
            frozen = self.freeze() if version is None else self._take(version, cut.change)
            self.frozen[cut.change] = frozen
        elif isinstance(cut.action, orders.Move):
            assert cut.epoch is not None
            targets = [shard for shard in cut.awaited if shard != self.shard]
            self._move(cut.action.slots, targets, cut.epoch, reached.accounts)
        elif isinstance(cut.action, orders.EndMarks) and cut.action.chain == self.chain:
            self._end_marks()

    def freeze(self) -> FrozenShard:
        """The shard as it is now."""
        return FrozenShard(
            self.slots,
            {name: table.freeze() for name, table in self.tables.items()},
            {name: _frozen(group) for name, group in self.dense.items()},
        )

    def _take(self, version: orders.Version, change: int) -> FrozenShard | orders.Unmarked:
        """Takes out of the state all that a version of a chain holds."""
        if self.chain != version.chain:
            if version.extent is orders.Extent.CHANGES:
                return orders.Unmarked()
            self._note_changes_for(version.chain)
        self._version = change
        wanted: dict[str, Bytes] = {}
        gone: dict[str, Ints] = {}
        for name, table in self.tables.items():
            assert table.watchers.changes is not None
            table.watchers.changes.cut(len(table))
            if version.extent is orders.Extent.CHANGES:
                wanted[name] = table.watchers.changes.unpublished(len(table))
                gone[name] = table.watchers.changes.gone.unpublished
        tables = {name: table.freeze(wanted.get(name)) for name, table in self.tables.items()}
        dense = {name: _frozen(group) for name, group in self.dense.items()}
        return FrozenShard(self.slots, tables, dense, version, gone)

    def _note_changes_for(self, chain: str) -> None:
        self.chain = chain
        for table in self.tables.values():
            table.watchers.changes = Changes()

    def _end_marks(self) -> None:
        self.chain, self._version = "", -1
        for table in self.tables.values():
            table.watchers.changes = None

    def _publish(self, change: int) -> None:
        """Notes that a version is whole; nothing of the last one need be written again."""
        if change == self._version:
            for table in self.tables.values():
                assert table.watchers.changes is not None
                table.watchers.changes.publish()

    def copied(self) -> Copied:
        """All but the rows of tables, as it is now."""
        return Copied(
            self.slots,
            dict(self.declared),
            self._time,
            self.updates,
            {name: _copied(table) for name, table in self.tables.items()},
            {
                name: MovedDense(
                    self.declared[name], group.data(group.pieces), group.steps, group.is_loaded
                )
                for name, group in self.dense.items()
            },
            dict(self.exports),
            self.chain,
            self._version,
        )

    def become(self, copied: Copied, rows: Mapping[str, Sequence[Rows]]) -> None:
        """Takes over what another server kept of this shard."""
        self.slots, self.updates, self._time = copied.slots, copied.updates, copied.time
        self.chain, self._version = copied.chain, copied.version
        for name, text in copied.declared.items():
            self._declare(name, text)
        for name, about in copied.tables.items():
            table = self.tables[name]
            table.become(about.hyper, about.steps, about.swept, about.counts)
            for piece in rows.get(name, ()):
                table.enter(piece)
            if about.candidates is not None:
                table.enter_candidates(about.candidates)
            if about.gone is not None and table.watchers.changes is not None:
                table.watchers.changes.enter_gone(about.gone)
        for name, pieces in copied.dense.items():
            group = self.dense[name]
            group.enter(pieces.data, pieces.steps)
            group.is_loaded = pieces.is_loaded
        self.exports = dict(copied.exports)

    def forget_frozen(self, kept: int) -> None:
        """Forgets how the shard was, but for the last ``kept`` times: nobody will write it."""
        for change in sorted(self.frozen)[: len(self.frozen) - kept]:
            frozen = self.frozen.pop(change)
            if isinstance(frozen, FrozenShard):
                self.thaw(frozen)

    def thaw(self, frozen: FrozenShard) -> None:
        """Ends remembering how the shard was."""
        for each in frozen.tables.values():
            each.thaw()

    def _move(
        self,
        slots: tuple[int, ...],
        targets: Sequence[int],
        epoch: int,
        accounts: Mapping[str, Account],
    ) -> None:
        """Sets rows and pieces aside for those who keep them from now on."""
        new = np.asarray(slots)
        self.slots = slots
        self._end_numbering()
        tables = {name: self._leave(table, new, targets) for name, table in self.tables.items()}
        dense = {name: group.leave(slots) for name, group in self.dense.items()}
        for target in targets:
            pieces = {}
            for name, data in dense.items():
                group = self.dense[name]
                own = {p: d for p, d in data.items() if slots[group.spec.pieces[p].slot] == target}
                text = self.declared[name]
                pieces[name] = MovedDense(text, own, group.steps, group.is_loaded)
            moved = {name: parts[target] for name, parts in tables.items()}
            self.exports[target, epoch] = Moved(moved, pieces, self.chain, self._version, accounts)

    def _leave(
        self, table: TableShard, slots: Ints, targets: Sequence[int]
    ) -> dict[int, MovedTable]:
        left, going = {}, []
        for target in targets:
            rows = table.rows_in(slots == target)
            taken = table.taken(rows)
            waiting = table.take_candidates(slots == target)
            gone = table.take_gone(slots == target)
            text = self.declared[table.spec.name]
            left[target] = MovedTable(text, taken.ids, taken.columns, waiting, table.steps, gone)
            going.append(rows)
        if going:
            table.remove(np.concatenate(going))
        return left

    def _import(self, moved: Moved) -> None:
        self._end_numbering()
        if moved.chain and not self.chain:
            self._note_changes_for(moved.chain)
            self._version = moved.version
        for name, rows in moved.tables.items():
            self.enter(name, rows)
        for name, pieces in moved.dense.items():
            self._declare(name, pieces.declared)
            group = self.dense[name]
            data = restoring.pieces_as_declared(pieces.data, pieces.declared, group.spec)
            group.enter(data, pieces.steps)
            group.is_loaded = group.is_loaded or pieces.is_loaded

    def enter(self, name: str, rows: MovedTable) -> None:
        """Takes rows of a table in, which may have been declared there and not yet here."""
        self._declare(name, rows.declared)
        table = self.tables[name]
        moved = Rows(rows.ids, dict(rows.columns))
        table.steps = max(table.steps, rows.steps)
        table.enter(restoring.rows_as_declared(moved, rows.declared, table.spec, self._time))
        if rows.candidates is not None:
            table.enter_candidates(rows.candidates)
        if rows.gone is not None and table.watchers.changes is not None:
            table.watchers.changes.enter_gone(rows.gone)

    # --- pulls

    def read(
        self, ask: Ask, time: int
    ) -> tuple[
        tuple[Packed, ...], dict[str, Mapping[torch.dtype, Tensor] | None], tuple[Changed, ...]
    ]:
        """Reads what a pull asks for.

        Returns:
            Rows of tables; elements by dense group; and which rows are there, if the asker keeps
            rows.
        """
        memo = Memo(ask.number)
        changed: tuple[Changed, ...] = ()
        if ask.known:
            answers = [
                self._read_changed(rows, known, ask.worker, time, memo)
                for rows, known in zip(ask.tables, ask.known, strict=True)
            ]
            tables, changed = tuple([p for p, _ in answers]), tuple([c for _, c in answers])
        else:
            tables = tuple([self._read_rows(rows, ask.worker, time, memo) for rows in ask.tables])
        if ask.tables and ask.trainer >= 0:
            self._memos.setdefault(ask.trainer, deque(maxlen=_MEMOS)).append(memo)
        return tables, {name: self._read_dense(ask.worker, name) for name in ask.dense}, changed

    def _read_rows(self, rows: TableIds, to: str, time: int, memo: Memo) -> Packed:
        tables = [self.tables[name] for name in rows.tables]
        kind, shape = tables[0].spec.wire.pull, (len(rows.ids), tables[0].spec.dim)
        exact = isinstance(kind, Float32)
        out = self._buffers(to, shape, torch.float32) if exact else torch.empty(shape)
        memo.places[rows.tables] = many.pull(
            self._kernels, tables, rows.sizes, rows.ids.numpy(), out.numpy(), time
        )
        return (out,) if exact else kind.pack(out)

    def _read_changed(
        self, rows: TableIds, known: Known, to: str, time: int, memo: Memo
    ) -> tuple[Packed, Changed]:
        """The rows that may be others than the asker knows."""
        if self._numbering is None:
            self._numbering = Numbering()
        numbering = self._numbering
        tables, ids = [self.tables[name] for name in rows.tables], rows.ids.numpy()
        places = many.find(self._kernels, tables, rows.sizes, ids, time)
        memo.places[rows.tables] = places
        numbers = known.numbers.numpy() if known.life == numbering.life else np.array([-1])
        every = np.broadcast_to(numbers, ids.shape)
        which, sizes = many.changed(tables, rows.sizes, places.rows, every, numbering)
        kind, shape = tables[0].spec.wire.pull, (sum(sizes), tables[0].spec.dim)
        exact = isinstance(kind, Float32)
        out = self._buffers(to, shape, torch.float32) if exact else torch.empty(shape)
        many.read(self._kernels, tables, sizes, places.rows[which], ids[which], out.numpy())
        bits = torch.from_numpy(np.packbits(which))
        changed = Changed(numbering.life, numbering.number, bits)
        return ((out,) if exact else kind.pack(out)), changed

    def _end_numbering(self) -> None:
        """Drops noted places and changes, as rows were not only updated: they say nothing now."""
        self._memos.clear()
        self._numbering = None
        for table in self.tables.values():
            table.watchers.last_changes = None

    def _read_dense(self, to: str, name: str) -> dict[torch.dtype, Tensor] | None:
        group = self.dense[name]
        if not group.is_loaded:
            return None
        answer = {}
        for dtype, flat in group.values().items():
            answer[dtype] = self._buffers(to, flat.shape, dtype)
            joined([flat], answer[dtype])
        return answer

    def bytes_wanted(self, rows: Mapping[str, int]) -> int:
        """Bytes that so many rows of each table may need at most."""
        known = {name: count for name, count in rows.items() if name in self.tables}
        return sum(count * self.tables[name].row_bytes for name, count in known.items())


def rows_of(load: Load | None) -> dict[str, int]:
    """The number of rows of each table in a push."""
    counts: dict[str, int] = {}
    for part in load.tables if load is not None else ():
        counts.update(zip(part.rows.tables, part.rows.sizes, strict=True))
    return counts


Pushes = Sequence[tuple[Push, TablePush]]
"""Gradients of several trainers for the same tables, in order."""


def _together(loads: Sequence[tuple[Push, Load]]) -> Mapping[tuple[str, ...], Pushes]:
    """Groups pushes by the names of their tables: one group, if all have the same tables.

    Else each table by itself, with those pushes that have it.
    """
    kinds = {tuple([part.rows.tables for part in load.tables]) for _, load in loads}
    together: dict[tuple[str, ...], list[tuple[Push, TablePush]]] = {}
    for push, load in loads:
        for part in load.tables:
            for own in [part] if len(kinds) == 1 else _alone(part):
                together.setdefault(own.rows.tables, []).append((push, own))
    return together


def _alone(part: TablePush) -> list[TablePush]:
    """The same gradients, each table's by itself."""
    sizes = part.rows.sizes
    if len(sizes) == 1:
        return [part]
    packed = zip(*[each.split_with_sizes(sizes) for each in part.grad], strict=True)
    ids = part.rows.ids.split_with_sizes(sizes)
    return [
        TablePush(TableIds((name,), (len(own),), own), tuple(grad), (hyper,))
        for name, own, grad, hyper in zip(part.rows.tables, ids, packed, part.hyper, strict=True)
    ]


def _copied(table: TableShard) -> CopiedTable:
    counts = (table.evicted, table.dropped)
    gone = table.watchers.changes.gone if table.watchers.changes is not None else None
    return CopiedTable(
        table.rule.hyper(), table.steps, table.swept, counts, table.candidates(), gone
    )


def _frozen(group: DenseShard) -> FrozenDense:
    data = group.data(group.pieces)
    return FrozenDense(group.spec, group.groups, data, group.steps, group.is_loaded)
