"""Applies a rule to rows: by compiled kernels, or else by the rule's own torch code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

from tensorwire.parameter_server.declarations import rules
from tensorwire.parameter_server.kernels.arrays import Floats, Ints
from tensorwire.parameter_server.kernels.sharing import divide
from tensorwire.parameter_server.rows.device_memory import DeviceColumn, to_device

State = Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class Touched:
    """Rows of tables that move alike, those of one table after those of another.

    Args:
        weights: the address of each table's column of weights.
        state: by name, the addresses of the columns of state.
        rows: which rows; all different within a table.
        ends: where each table's rows end.
        grad: a gradient for each row; it stays as it is.
    """

    weights: Ints
    state: Mapping[str, Ints]
    rows: Ints
    ends: Ints
    grad: Floats


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
    if not is_compiled(kernels, rule):
        _apply_torch(kernels, rule, weight, state, rows, grad, step)
        return
    columns = {name: _addresses(values) for name, values in state.items()}
    ends = np.array([len(rows)])
    apply_many(kernels, rule, Touched(_addresses(weight), columns, rows, ends, grad), step)


def is_compiled(kernels: ModuleType, rule: rules.Rule) -> bool:
    """True if there is a kernel for this rule, and :func:`apply_many` may be used."""
    return kernels.UPDATES is not None and type(rule) in _COMPILED


def apply_many(kernels: ModuleType, rule: rules.Rule, touched: Touched, step: int) -> None:
    """Moves rows of several tables by a rule that is compiled.

    Args:
        kernels: compiled ones.
        rule: says how.
        touched: the rows.
        step: how often each of the tables was updated, this time included.
    """
    compiled, updates = _COMPILED[type(rule)], kernels.UPDATES
    divide(
        len(touched.rows),
        (2 + len(touched.state)) * touched.grad.nbytes,
        lambda begin, end: compiled(updates, rule, touched, begin, end, step),
    )


def _addresses(values: Floats) -> Ints:
    """Where an array begins."""
    return np.array([values.__array_interface__["data"][0]])


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


def _room(touched: Touched, begin: int, end: int) -> Floats:
    room: Floats = np.empty((end - begin, touched.grad.shape[1]), np.float32)
    return room


def _sgd(k: ModuleType, rule: Any, t: Touched, begin: int, end: int, step: int) -> None:
    rows = t.rows, t.ends, begin, end, t.grad
    if rule.momentum:
        hyper = rule.lr, rule.momentum, rule.nesterov, rule.weight_decay
        k.momentum(t.weights, t.state["momentum"], *rows, *hyper)
    else:
        k.sgd(t.weights, *rows, rule.lr, rule.weight_decay)


def _adagrad(k: ModuleType, rule: Any, t: Touched, begin: int, end: int, step: int) -> None:
    rows = t.rows, t.ends, begin, end, t.grad
    under = _room(t, begin, end)
    k.adagrad_sums(t.weights, t.state["sum"], *rows, rule.weight_decay, under)
    hyper = rule.rate(step), rule.eps, rule.weight_decay
    k.adagrad_step(t.weights, *rows, _roots(under), *hyper)


def _rowwise(k: ModuleType, rule: Any, t: Touched, begin: int, end: int, step: int) -> None:
    rows = t.rows, t.ends, begin, end
    squares: Any = np.empty(end - begin, np.float32)
    k.square_sums(t.grad[begin:end], squares)
    k.rowwise_sums(t.state["sum"], *rows, squares, t.grad.shape[1])
    k.rowwise_step(t.weights, *rows, t.grad, rule.steps(torch.from_numpy(squares)).numpy())


def _adam(k: ModuleType, rule: Any, t: Touched, begin: int, end: int, step: int) -> None:
    one, two = rule.betas
    rows = t.rows, t.ends, begin, end
    mean, under = t.state["mean"], _room(t, begin, end)
    k.adam_moments(mean, t.state["square"], *rows, t.grad, 1 - one, 1 - two, under)
    k.adam_step(t.weights, mean, *rows, _roots(under), rule.size(step), rule.eps)


def _ftrl(k: ModuleType, rule: Any, t: Touched, begin: int, end: int, step: int) -> None:
    rows = t.rows, t.ends, begin, end, t.grad
    old, new = _room(t, begin, end), _room(t, begin, end)
    k.ftrl_sums(t.state["sum"], *rows, old, new)
    hyper = rule.lr, rule.l1, rule.l2, rule.beta
    k.ftrl_step(t.weights, t.state["linear"], *rows, _roots(old), _roots(new), *hyper)


_COMPILED: Final[Mapping[type[rules.Rule], Callable[..., None]]] = {
    rules.SGD: _sgd,
    rules.Adagrad: _adagrad,
    rules.RowwiseAdagrad: _rowwise,
    rules.Adam: _adam,
    rules.FTRL: _ftrl,
}
