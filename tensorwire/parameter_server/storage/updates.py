"""Applies a rule to rows: by compiled kernels, or else by the rule's own torch code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

from tensorwire.parameter_server.declarations import rules
from tensorwire.parameter_server.kernels.arrays import Floats, Ints
from tensorwire.parameter_server.kernels.sharing import divide
from tensorwire.parameter_server.rows.device_memory import DeviceColumn, to_device

State = Mapping[str, Floats]


def apply(
    kernels: ModuleType,
    rule: rules.Rule,
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
    compiled, updates = _COMPILED.get(type(rule)), kernels.UPDATES
    if compiled is not None and updates is not None:
        divide(
            len(rows),
            (2 + len(state)) * grad.nbytes,
            lambda a, b: compiled(updates, rule, weight, state, rows[a:b], grad[a:b], step),
        )
    else:
        _apply_torch(kernels, rule, weight, state, rows, grad, step)


def _apply_torch(
    kernels: ModuleType,
    rule: rules.Rule,
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
    rule: rules.Rule,
    weight: DeviceColumn,
    state: Mapping[str, DeviceColumn],
    rows: Ints,
    grad: Floats,
    step: int,
) -> None:
    """The same for rows that lie on a device, by the rule's own torch code."""
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


def _roots(values: Floats) -> Floats:
    """Square roots as torch takes them, in place."""
    torch.from_numpy(values).sqrt_()
    return values


def _sgd(
    k: ModuleType, rule: Any, weight: Floats, state: State, rows: Ints, grad: Floats, step: int
) -> None:
    if rule.momentum:
        buffer, factor = state["momentum"], rule.momentum
        k.momentum(weight, buffer, rows, grad, rule.lr, factor, rule.nesterov, rule.weight_decay)
    else:
        k.sgd(weight, rows, grad, rule.lr, rule.weight_decay)


def _adagrad(
    k: ModuleType, rule: Any, weight: Floats, state: State, rows: Ints, grad: Floats, step: int
) -> None:
    under: Floats = np.empty(grad.shape, np.float32)
    decay = rule.weight_decay
    k.adagrad_sums(weight, state["sum"], rows, grad, decay, under)
    k.adagrad_step(weight, rows, grad, _roots(under), rule.rate(step), rule.eps, decay)


def _rowwise(
    k: ModuleType, rule: Any, weight: Floats, state: State, rows: Ints, grad: Floats, step: int
) -> None:
    squares: Any = np.empty(len(rows), np.float32)
    k.square_sums(grad, squares)
    k.rowwise_sums(state["sum"], rows, squares, grad.shape[1])
    k.rowwise_step(weight, rows, grad, rule.steps(torch.from_numpy(squares)).numpy())


def _adam(
    k: ModuleType, rule: Any, weight: Floats, state: State, rows: Ints, grad: Floats, step: int
) -> None:
    one, two = rule.betas
    under: Floats = np.empty(grad.shape, np.float32)
    k.adam_moments(state["mean"], state["square"], rows, grad, 1 - one, 1 - two, under)
    k.adam_step(weight, state["mean"], rows, _roots(under), rule.size(step), rule.eps)


def _ftrl(
    k: ModuleType, rule: Any, weight: Floats, state: State, rows: Ints, grad: Floats, step: int
) -> None:
    old: Floats = np.empty(grad.shape, np.float32)
    new: Floats = np.empty(grad.shape, np.float32)
    k.ftrl_sums(state["sum"], rows, grad, old, new)
    linear = state["linear"]
    hyper = rule.lr, rule.l1, rule.l2, rule.beta
    k.ftrl_step(weight, linear, rows, grad, _roots(old), _roots(new), *hyper)


_COMPILED: Final[Mapping[type[rules.Rule], Callable[..., None]]] = {
    rules.SGD: _sgd,
    rules.Adagrad: _adagrad,
    rules.RowwiseAdagrad: _rowwise,
    rules.Adam: _adam,
    rules.FTRL: _ftrl,
}
