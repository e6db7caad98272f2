"""Divides ids, rows and gradients among the shards, and puts together what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.declarations.dense_spec import DenseSpec
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.declarations.wire import Float32, Packed
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.kernels.arrays import Ints
from tensorwire.parameter_server.kernels.copying import joined, joined_finite
from tensorwire.parameter_server.messaging.messages import DensePush, TableIds, TablePush

Buffers = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor from which to send to one server."""


@dataclass(frozen=True, slots=True)
class Split:
    """Ids of rows, divided among the shards that keep them.

    Args:
        rows: all of them.
        epoch: of the map.
        parts: by shard, the places in ``rows.ids`` of those that it keeps, and the ids; None
            instead of places if it keeps all.
    """

    rows: TableIds
    epoch: int
    parts: Mapping[int, tuple[Ints | None, TableIds]]


def split(rows: TableIds, slots: Sequence[int], epoch: int) -> Split:
    """Divides ids by a map from slots to shards."""
    shards = sorted(set(slots))
    if len(shards) == 1:
        return Split(rows, epoch, {shards[0]: (None, rows)})
    numbers = rows.ids.numpy()
    order = np.empty(len(numbers), np.int64)
    sizes = np.empty((len(shards), len(rows.sizes)), np.int64)
    shard_of = np.searchsorted(shards, np.asarray(slots))
    ends = np.cumsum(rows.sizes)
    kernels().partition(shard_of, len(shards), numbers, ends, order, sizes)
    parts, begin = {}, 0
    for shard, own in zip(shards, sizes.tolist(), strict=True):
        mine = order[begin : begin + sum(own)]
        begin += len(mine)
        ids = torch.from_numpy(numbers[mine])
        parts[shard] = (mine, TableIds(rows.tables, tuple(own), ids))
    return Split(rows, epoch, parts)


@dataclass(frozen=True, slots=True)
class RowGradients:
    """Gradients of rows, before they are split.

    Args:
        spec: one of the tables.
        rows: whose they are.
        grad: a row for each id; it is not changed any more.
        hyper: the hyper-parameters of each table.
    """

    spec: TableSpec
    rows: TableIds
    grad: Tensor
    hyper: tuple[tuple[float, ...], ...]


def table_push(
    whole: RowGradients, parted: Split, shard: int, pulled: int, buffers: Buffers
) -> TablePush:
    """One shard's share of gradients of rows."""
    places, rows = parted.parts[shard]
    kind = whole.spec.wire.push
    if isinstance(kind, Float32):
        out = buffers((len(rows.ids), whole.spec.dim), torch.float32)
        _gather(whole.grad, places, out)
        return TablePush(rows, (out,), whole.hyper, pulled)
    part = whole.grad if places is None else whole.grad[torch.from_numpy(places)]
    return TablePush(rows, kind.pack(part), whole.hyper, pulled)


def _gather(source: Tensor, places: Ints | None, out: Tensor) -> None:
    if places is None:
        joined([source.reshape(-1)], out.view(-1))
    else:
        kernels().gather(source.numpy(), places, out.numpy())


def joined_rows(spec: TableSpec, parted: Split, packed: Mapping[int, Packed]) -> Tensor:
    """The rows that shards sent, in the order of the ids."""
    kind = spec.wire.pull
    if len(parted.parts) == 1:
        (only,) = parted.parts
        return kind.unpack(packed[only], spec.dim)
    rows = torch.empty(len(parted.rows.ids), spec.dim)
    for shard, (places, _) in parted.parts.items():
        values = kind.unpack(packed[shard], spec.dim)
        kernels().scatter(values.numpy(), places, rows.numpy())
    return rows


@dataclass(frozen=True, slots=True)
class WholeDense:
    """Gradients of a dense group, before they are split.

    Args:
        spec: the group.
        grads: of each parameter, flat.
        hyper: the hyper-parameters of each group.
    """

    spec: DenseSpec
    grads: list[Tensor | None]
    hyper: tuple[Mapping[str, object], ...]

    def keep(self) -> None:
        """Takes copies, as the gradients may change from now on."""
        self.grads[:] = [None if each is None else each.clone() for each in self.grads]


def _runs(spec: DenseSpec, slots: Sequence[int], shard: int) -> list[tuple[int, int, int]]:
    """The runs that a shard keeps, in order: parameter, first element, one behind the last."""
    runs: list[tuple[int, int, int]] = []
    for place in spec.kept_by(slots, shard):
        piece = spec.pieces[place]
        if runs and runs[-1][0] == piece.parameter and runs[-1][2] == piece.start:
            runs[-1] = (piece.parameter, runs[-1][1], piece.stop)
        else:
            runs.append((piece.parameter, piece.start, piece.stop))
    return runs


def dense_push(
    whole: WholeDense, slots: Sequence[int], shard: int, buffers: Buffers
) -> tuple[DensePush, bool]:
    """One shard's share of a dense group's gradients, and whether all of it is finite."""
    spec = whole.spec
    parts: dict[torch.dtype, list[Tensor]] = {}
    for parameter, start, stop in _runs(spec, slots, shard):
        grad = whole.grads[parameter]
        if grad is not None:
            parts.setdefault(spec.dtypes[parameter], []).append(grad[start:stop])
    packed, finite = {}, True
    for dtype, slices in parts.items():
        out = buffers((sum(len(each) for each in slices),), dtype)
        finite &= joined_finite(slices, out)
        packed[dtype] = (out,)
    absent = frozenset(n for n, grad in enumerate(whole.grads) if grad is None)
    return DensePush(packed, absent, whole.hyper), finite


def joined_values(
    spec: DenseSpec, slots: Sequence[int], answers: Mapping[int, Mapping[torch.dtype, Tensor]]
) -> list[Tensor]:
    """The values of all parameters, flat, from what the shards keep of them.

    A parameter that lies on one shard is a part of its answer, and not copied.
    """
    pieces: dict[int, list[tuple[int, int, Tensor]]] = {}
    for shard, flats in answers.items():
        begins = dict.fromkeys(flats, 0)
        for parameter, start, stop in _runs(spec, slots, shard):
            dtype = spec.dtypes[parameter]
            begin = begins[dtype]
            begins[dtype] = begin + stop - start
            part = flats[dtype][begin : begins[dtype]]
            pieces.setdefault(parameter, []).append((start, stop, part))
    return [
        _joined(int(np.prod(shape)), dtype, pieces.get(parameter, []))
        for parameter, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    ]


def _joined(size: int, dtype: torch.dtype, parts: list[tuple[int, int, Tensor]]) -> Tensor:
    if len(parts) == 1 and len(parts[0][2]) == size:
        return parts[0][2]
    whole = torch.empty(size, dtype=dtype)
    for start, stop, part in parts:
        whole[start:stop] = part
    return whole
