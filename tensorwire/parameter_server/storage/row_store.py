"""The seam at which a table's rows are kept: a weight and the rule's state for each row number.

A table knows ids, who may come in and who must leave; a store knows nothing of them. ``HostRows``
keeps float32 in the host's memory, ``HalfRows`` 16 bits there, ``DeviceRows`` float32 on an
accelerator. Another place for rows, such as a disk, is another class and a line in
:func:`store_for`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from tensorwire.parameter_server.declarations.rules import Per, Rule
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.kernels.arrays import Array, Floats, Ints
from tensorwire.parameter_server.kernels.sharing import divide
from tensorwire.parameter_server.rows.device_memory import DeviceColumn
from tensorwire.parameter_server.rows.memory import Column
from tensorwire.parameter_server.storage import updates

Columns = Mapping[str, Array]
"""Copies of some rows by name: ``weight``, and ``state.NAME`` for each state of the rule."""


class RowStore(Protocol):
    """Rows of one table, numbered from 0. One thread at a time uses it.

    Attributes:
        spec: what the table is; replaced when the table is declared anew.
        row_bytes: the bytes that a row and its state take.
    """

    spec: TableSpec
    row_bytes: int

    def reserve(self, count: int) -> None:
        """Makes room for so many rows."""

    def release(self, count: int) -> None:
        """Forgets all rows from ``count`` on."""

    def read(self, rows: Ints, out: Floats) -> None:
        """Copies rows into ``out``; those whose number is negative are left out."""

    def begin(self, rows: Ints, ids: Ints, rule: Rule, step: int) -> None:
        """Gives rows the initial values of their ids, and of the rule's state."""

    def write(self, rows: Ints, ids: Ints, values: Floats, step: int) -> None:
        """Replaces rows; their state stays as it is.

        Args:
            rows: all different.
            ids: of these rows.
            values: a row for each.
            step: how often the table was updated.
        """

    def update(self, rows: Ints, ids: Ints, grad: Floats, rule: Rule, step: int) -> None:
        """Moves rows by a rule.

        Args:
            rows: all different.
            ids: of these rows.
            grad: a gradient for each; it stays as it is.
            rule: says how.
            step: how often the table was updated, this time included.
        """

    def move(self, origins: Ints, targets: Ints) -> None:
        """Copies rows, with their state, over others."""

    def take(self, rows: Ints) -> dict[str, Array]:
        """A copy of some rows as they are kept, with their state."""

    def put(self, rows: Ints, columns: Columns) -> None:
        """Replaces rows by what :meth:`take` gave; what is not named stays as it is."""


def store_for(spec: TableSpec, kernels: ModuleType, device: torch.device | None) -> RowStore:
    """The store that a table needs.

    Args:
        spec: what the table is.
        kernels: see ``kernels``.
        device: where float32 rows are; None for the host's memory.
    """
    if spec.precision is not Precision.FLOAT32:
        return HalfRows(spec, kernels)
    return HostRows(spec, kernels) if device is None else DeviceRows(spec, device)


C = TypeVar("C", Column, DeviceColumn)


class _Kept(Generic[C]):
    """Rows and state in columns of one kind, whatever the kind is."""

    def __init__(self, spec: TableSpec, weight: C, state: dict[str, C]) -> None:
        self.spec = spec
        self.weight: C = weight
        self.state: dict[str, C] = state
        self._columns: dict[str, C] = {"weight": weight}
        self._columns |= {f"state.{name}": column for name, column in state.items()}
        every = self._columns.values()
        self.row_bytes = sum(int(column.dtype.itemsize * column.width) for column in every)

    def reserve(self, count: int) -> None:
        for column in self._columns.values():
            column.reserve(count)

    def release(self, count: int) -> None:
        for column in self._columns.values():
            column.release(count)

    def move(self, origins: Ints, targets: Ints) -> None:
        for column in self._columns.values():
            column.rows[targets] = column.rows[origins]

    def take(self, rows: Ints) -> dict[str, Array]:
        return {name: column.rows[rows] for name, column in self._columns.items()}

    def put(self, rows: Ints, columns: Columns) -> None:
        for name, column in self._columns.items():
            if name in columns:
                column.rows[rows] = columns[name]

    def _begin_state(self, rows: Ints, rule: Rule) -> None:
        for name, column in self.state.items():
            column.rows[rows] = rule.initial(name)

    def _initial(self, ids: Ints) -> Floats:
        values: Floats = np.empty((len(ids), self.spec.dim), np.float32)
        self.spec.init.fill(values, np.arange(len(ids)), ids)
        return values


def _widths(spec: TableSpec) -> dict[str, int]:
    """The number of columns of each state of a row."""
    state = spec.rule.state.items()
    return {name: spec.dim if per is Per.COLUMN else 1 for name, per in state}


def _host_state(spec: TableSpec) -> dict[str, Column]:
    return {name: Column(np.float32, width) for name, width in _widths(spec).items()}


class HostRows(_Kept[Column]):
    """float32 in the host's memory: kernels work on the rows where they are.

    Args:
        spec: what the table is.
        kernels: see ``kernels``.
    """

    def __init__(self, spec: TableSpec, kernels: ModuleType) -> None:
        super().__init__(spec, Column(np.float32, spec.dim), _host_state(spec))
        self._k = kernels

    def read(self, rows: Ints, out: Floats) -> None:
        """Gathers rows."""
        k, source = self._k, self.weight.rows
        divide(len(rows), out.nbytes, lambda a, b: k.gather(source, rows[a:b], out[a:b]))

    def begin(self, rows: Ints, ids: Ints, rule: Rule, step: int) -> None:
        """Fills rows where they are."""
        self.spec.init.fill(self.weight.rows, rows, ids)
        self._begin_state(rows, rule)

    def write(self, rows: Ints, ids: Ints, values: Floats, step: int) -> None:
        """Scatters values."""
        self._k.scatter(values, rows, self.weight.rows)

    def update(self, rows: Ints, ids: Ints, grad: Floats, rule: Rule, step: int) -> None:
        """Moves rows where they are."""
        state = {name: column.rows for name, column in self.state.items()}
        updates.apply(self._k, rule, self.weight.rows, state, rows, grad, step)


class HalfRows(_Kept[Column]):
    """Rows of 16 bits in the host's memory, rounded by chance; state is float32.

    Args:
        spec: what the table is.
        kernels: see ``kernels``.
    """

    def __init__(self, spec: TableSpec, kernels: ModuleType) -> None:
        super().__init__(spec, Column(np.uint16, spec.dim), _host_state(spec))
        self._k = kernels
        is_brain = spec.precision is Precision.BFLOAT16
        self._format = torch.bfloat16 if is_brain else torch.float16
        self._is_brain = is_brain

    def read(self, rows: Ints, out: Floats) -> None:
        """Widens rows to float32."""
        there = rows >= 0
        bits = torch.from_numpy(self.weight.rows[rows[there]].view(np.int16))
        out[there] = bits.view(self._format).float().numpy()

    def begin(self, rows: Ints, ids: Ints, rule: Rule, step: int) -> None:
        """Rounds initial values."""
        self.write(rows, ids, self._initial(ids), step)
        self._begin_state(rows, rule)

    def write(self, rows: Ints, ids: Ints, values: Floats, step: int) -> None:
        """Rounds values; the chance depends on id and step only."""
        bits = np.empty(values.shape, np.uint16)
        shorten = self._k.to_bfloat16 if self._is_brain else self._k.to_float16
        shorten(values, ids, getattr(self.spec.init, "seed", 0), step, bits)
        self.weight.rows[rows] = bits

    def update(self, rows: Ints, ids: Ints, grad: Floats, rule: Rule, step: int) -> None:
        """Moves copies of the rows as float32, and rounds them."""
        values: Floats = np.empty((len(rows), self.spec.dim), np.float32)
        self.read(rows, values)
        state = {name: column.rows[rows] for name, column in self.state.items()}
        updates.apply(self._k, rule, values, state, np.arange(len(rows)), grad, step)
        for name, moved in state.items():
            self.state[name].rows[rows] = moved
        self.write(rows, ids, values, step)


class DeviceRows(_Kept[DeviceColumn]):
    """float32 on an accelerator: rules move rows there by their torch code.

    Args:
        spec: what the table is.
        device: where the rows are.
    """

    def __init__(self, spec: TableSpec, device: torch.device) -> None:
        state = {name: DeviceColumn(width, device) for name, width in _widths(spec).items()}
        super().__init__(spec, DeviceColumn(spec.dim, device), state)

    def read(self, rows: Ints, out: Floats) -> None:
        """Copies rows to the host."""
        there = rows >= 0
        out[there] = self.weight.rows[rows[there]]

    def begin(self, rows: Ints, ids: Ints, rule: Rule, step: int) -> None:
        """Copies initial values to the device."""
        self.weight.rows[rows] = self._initial(ids)
        self._begin_state(rows, rule)

    def write(self, rows: Ints, ids: Ints, values: Floats, step: int) -> None:
        """Copies values to the device."""
        self.weight.rows[rows] = values

    def update(self, rows: Ints, ids: Ints, grad: Floats, rule: Rule, step: int) -> None:
        """Moves rows on the device."""
        updates.apply_on_device(rule, self.weight, self.state, rows, grad, step)
