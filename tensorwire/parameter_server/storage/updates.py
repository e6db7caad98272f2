"""Applies a rule to rows: by the kernel that it brings, or else by its torch code."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import numpy as np
import torch

from tensorwire.parameter_server.declarations.rules import (
    BatchedRule,
    Kernel,
    Rule,
    Touched,
    kernel_of,
)
from tensorwire.parameter_server.kernels.arrays import Floats, Ints
from tensorwire.parameter_server.kernels.sharing import divide
from tensorwire.parameter_server.rows.device_memory import DeviceColumn, to_device

State = Mapping[str, Floats]


def apply(
    kernels: ModuleType,
    rule: Rule,
    weight: Floats,
    state: State,
    rows: Ints,
    grad: Floats,
    step: int,
) -> None:
    """Moves rows of a table.

    Args:
        kernels: compiled ones, or not.
        rule: says how.
        weight: all rows.
        state: all rows' state, by name.
        rows: which rows; all different.
        grad: their gradients; they stay as they are.
        step: how often the table was updated, this time included.
    """
    kind: type = type(rule)
    kernel = kernel_of(kind) if kernels.UPDATES is not None else Kernel.NONE
    if kernel is Kernel.NONE:
        _apply_torch(kernels, rule, weight, state, rows, grad, step)
    elif kernel is Kernel.OF_ONE:
        divide(
            len(rows),
            (2 + len(state)) * grad.nbytes,
            lambda begin, end: rule.kernel(weight, rows[begin:end], grad[begin:end], state, step),
        )
    else:
        columns = {name: _addresses(values) for name, values in state.items()}
        ends = np.array([len(rows)])
        apply_many(kernels, rule, Touched(_addresses(weight), columns, rows, ends, grad), step)


def apply_many(kernels: ModuleType, rule: Rule, touched: Touched, step: int) -> None:
    """Moves rows of several tables by a rule that has a kernel for that.

    Args:
        kernels: compiled ones.
        rule: says how.
        touched: the rows.
        step: how often each of the tables was updated, this time included.
    """
    assert isinstance(rule, BatchedRule)
    batched, compiled = rule, kernels.UPDATES
    divide(
        len(touched.rows),
        (2 + len(touched.state)) * touched.grad.nbytes,
        lambda begin, end: batched.batch_kernel(compiled, touched, begin, end, step),
    )


def _addresses(values: Floats) -> Ints:
    """The address at which an array begins."""
    return np.array([values.__array_interface__["data"][0]])


def _apply_torch(
    kernels: ModuleType,
    rule: Rule,
    weight: Floats,
    state: State,
    rows: Ints,
    grad: Floats,
    step: int,
) -> None:
    """Copies the rows out, lets the rule change the copies, and copies them back."""
    copies = {name: _taken(kernels, values, rows) for name, values in state.items()}
    moved = _taken(kernels, weight, rows)
    tensors = {name: torch.from_numpy(values) for name, values in copies.items()}
    rule.update(torch.from_numpy(moved), torch.from_numpy(grad).clone(), tensors, step)
    kernels.scatter(moved, rows, weight)
    for name, values in copies.items():
        kernels.scatter(values, rows, state[name])


def apply_on_device(
    rule: Rule,
    weight: DeviceColumn,
    state: Mapping[str, DeviceColumn],
    rows: Ints,
    grad: Floats,
    step: int,
) -> None:
    """Moves rows that lie on a device, by the rule's own torch code."""
    index = weight.index(rows)
    copies = {name: column.tensor[index] for name, column in state.items()}
    moved = weight.tensor[index]
    slope = to_device(torch.from_numpy(grad), index.device)
    rule.update(moved, slope.clone() if slope.is_cpu else slope, copies, step)
    weight.tensor[index] = moved
    for name, values in copies.items():
        state[name].tensor[index] = values


def _taken(kernels: ModuleType, values: Floats, rows: Ints) -> Floats:
    taken: Floats = np.empty((len(rows), values.shape[1]), np.float32)
    kernels.gather(values, rows, taken)
    return taken
