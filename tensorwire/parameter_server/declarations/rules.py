"""The optimizers of tables, which move each row by itself, with its state beside the row.

A rule is a frozen dataclass whose fields are its hyper-parameters. ``update`` says in torch what it
does to the rows that a push touches; rows that are not touched do not change. A rule may bring a
compiled kernel besides, which gives the same bits: ``kernel`` for the rows of one table, or, as the
rules here do, ``batch_kernel`` for those of many. ``storage.updates`` calls them.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tensorwire.parameter_server.declarations.arguments import number
from tensorwire.parameter_server.kernels.arrays import Floats, Ints


class Per(enum.Enum):
    """The amount of state that a rule keeps under one name."""

    COLUMN = "as many numbers as the row has columns"
    ROW = "one number for the row"


class Rule:
    """Base of all rules; derive your own from it, as a frozen dataclass.

    Example::

        @dataclass(frozen=True)
        class Lion(ps.Rule):
            lr: float
            beta: float = 0.9
            state = {"mean": ps.Per.COLUMN}

            def update(self, weight, grad, state, step):
                weight.sub_(state["mean"].lerp(grad, 1 - self.beta).sign_(), alpha=self.lr)
                state["mean"].lerp_(grad, 1 - self.beta)
    """

    state: ClassVar[Mapping[str, Per]] = {}
    """The state kept for each row, by name; all zeros, or ``initial``, at first."""
    rests_at_zero: ClassVar[bool] = False
    """True if the rule has no learning rate of 0, as at the begin of a warm-up: rows then
    stay as they are, and nothing is pushed."""

    def initial(self, name: str) -> float:
        """The value with which state begins. Default 0."""
        return 0.0

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Changes rows and their state in place.

        Args:
            weight: the rows, ``(n, dim)``, float32.
            grad: their gradients; may be overwritten.
            state: by name, ``(n, dim)`` or ``(n, 1)``.
            step: how often the table was updated, this time included.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update()")

    def kernel(
        self, weight: Floats, rows: Ints, grad: Floats, state: Mapping[str, Floats], step: int
    ) -> None:
        """Does what :meth:`update` does to rows where they lie, in compiled code. Optional.

        Servers with numba call it for rows in their memory. Rows on a device, and servers without
        numba, are updated by :meth:`update`; as replicas may differ in that, both must give the
        same bits. Several threads may call it at a time, for different rows.

        Args:
            weight: all rows of a table, ``(room, dim)``, float32.
            rows: the numbers of the rows to move, all different, int64.
            grad: a gradient for each of these, ``(len(rows), dim)``; stays as it is.
            state: of all rows, by name, ``(room, dim)`` or ``(room, 1)``, float32.
            step: how often the table was updated, this time included.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no kernel()")

    def hyper(self) -> tuple[float, ...]:
        """The values of the fields, which travel with each push."""
        values: list[float] = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            values += value if isinstance(value, tuple) else [value]
        return tuple(values)

    def with_hyper(self, values: tuple[float, ...]) -> Rule:
        """The same rule with other values; the inverse of :meth:`hyper`."""
        left = list(values)
        given = {}
        for field in fields(self):  # type: ignore[arg-type]
            old = getattr(self, field.name)
            if isinstance(old, tuple):
                given[field.name] = tuple(left.pop(0) for _ in old)
            else:
                given[field.name] = type(old)(left.pop(0))
        return type(self)(**given)


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

    def room(self, begin: int, end: int) -> Floats:
        """Scratch memory for the rows of a range."""
        room: Floats = np.empty((end - begin, self.grad.shape[1]), np.float32)
        return room


class BatchedRule(Rule):
    """A rule that has a kernel for the rows of several tables in one call."""

    def batch_kernel(self, k: ModuleType, t: Touched, begin: int, end: int, step: int) -> None:
        """Moves a range of rows where they lie.

        Args:
            k: ``kernels.numba_updates``.
            t: the rows.
            begin: only from this one on.
            end: only up to this one.
            step: how often each of the tables was updated, this time included.
        """
        raise NotImplementedError(f"{type(self).__name__} must define batch_kernel()")


class Kernel(enum.Enum):
    """The compiled code that a rule brings."""

    NONE = "none"
    OF_ONE = "kernel"
    OF_MANY = "batch_kernel"


@functools.cache
def kernel_of(kind: type) -> Kernel:
    """The kernel of a class of rules: none of a base whose ``update`` the class overrides."""
    for base in kind.__mro__:
        for kernel in (Kernel.OF_MANY, Kernel.OF_ONE):
            if kernel.value in vars(base):
                return kernel
        if "update" in vars(base):
            break
    return Kernel.NONE


def _roots(values: Floats) -> Floats:
    """Square roots as torch takes them, in place."""
    torch.from_numpy(values).sqrt_()
    return values


@dataclass(frozen=True)
class SGD(BatchedRule):
    """``torch.optim.SGD``, row by row.

    Args:
        lr: learning rate.
        momentum: share of a row's last step that is added to the next. Default 0.
        nesterov: looks ahead along the momentum. Default False.
        weight_decay: share of the row that is added to its gradient. Default 0.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        number("SGD", "lr", self.lr)
        number("SGD", "momentum", self.momentum)
        number("SGD", "weight_decay", self.weight_decay)
        if self.nesterov and not self.momentum:
            raise ValueError("SGD: nesterov=True needs a momentum above 0")

    @property
    def state(self) -> Mapping[str, Per]:  # type: ignore[override]
        """The last step, if there is momentum."""
        return {"momentum": Per.COLUMN} if self.momentum else {}

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """See :class:`torch.optim.SGD`."""
        if self.weight_decay:
            grad = grad.add(weight, alpha=self.weight_decay)
        if self.momentum:
            buffer = state["momentum"].mul_(self.momentum).add_(grad)
            grad = grad.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        weight.add_(grad, alpha=-self.lr)

    def batch_kernel(self, k: ModuleType, t: Touched, begin: int, end: int, step: int) -> None:
        """Moves a range of the touched rows of several tables."""
        rows = t.rows, t.ends, begin, end, t.grad
        if self.momentum:
            hyper = self.lr, self.momentum, self.nesterov, self.weight_decay
            k.momentum(t.weights, t.state["momentum"], *rows, *hyper)
        else:
            k.sgd(t.weights, *rows, self.lr, self.weight_decay)


@dataclass(frozen=True)
class Adagrad(BatchedRule):
    """``torch.optim.Adagrad``, row by row.

    Args:
        lr: learning rate.
        lr_decay: by how much it falls with each update of the table. Default 0.
        weight_decay: share of the row that is added to its gradient. Default 0.
        initial_accumulator_value: what sums of squares begin with. Default 0.
        eps: added to their roots. Default 1e-10.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    state: ClassVar[Mapping[str, Per]] = {"sum": Per.COLUMN}

    def __post_init__(self) -> None:
        for field in fields(self):
            number("Adagrad", field.name, getattr(self, field.name))

    def initial(self, name: str) -> float:
        """The value that sums of squares begin with."""
        return self.initial_accumulator_value

    def rate(self, step: int) -> float:
        """The learning rate of an update."""
        return self.lr / (1 + (step - 1) * self.lr_decay)

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """See :class:`torch.optim.Adagrad`."""
        if self.weight_decay:
            grad = grad.add(weight, alpha=self.weight_decay)
        total = state["sum"].addcmul_(grad, grad, value=1)
        weight.addcdiv_(grad, total.sqrt().add_(self.eps), value=-self.rate(step))

    def batch_kernel(self, k: ModuleType, t: Touched, begin: int, end: int, step: int) -> None:
        """Moves a range of the touched rows of several tables."""
        rows = t.rows, t.ends, begin, end, t.grad
        under = t.room(begin, end)
        k.adagrad_sums(t.weights, t.state["sum"], *rows, self.weight_decay, under)
        hyper = self.rate(step), self.eps, self.weight_decay
        k.adagrad_step(t.weights, *rows, _roots(under), *hyper)


@dataclass(frozen=True)
class RowwiseAdagrad(BatchedRule):
    """Adagrad with one sum for each row: the mean of its squared gradients. Takes little memory.

    Args:
        lr: learning rate.
        eps: added to the root of the sum. Default 1e-10.
    """

    lr: float = 1e-2
    eps: float = 1e-10

    state: ClassVar[Mapping[str, Per]] = {"sum": Per.ROW}

    def __post_init__(self) -> None:
        number("RowwiseAdagrad", "lr", self.lr)
        number("RowwiseAdagrad", "eps", self.eps)

    def steps(self, sums: Tensor) -> Tensor:
        """The step of each row for a gradient of one."""
        return self.lr / sums.sqrt().add_(self.eps)

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Moves each row by its own step; sums columns one after the other."""
        squares = grad * grad
        total = torch.zeros_like(squares[:, 0])
        for column in range(squares.shape[1]):
            total += squares[:, column]
        sums = state["sum"]
        sums += (total / squares.shape[1]).unsqueeze(1)
        steps = self.steps(sums).expand_as(grad).contiguous()
        weight.addcmul_(grad, steps, value=-1)

    def batch_kernel(self, k: ModuleType, t: Touched, begin: int, end: int, step: int) -> None:
        """Moves a range of the touched rows of several tables."""
        rows = t.rows, t.ends, begin, end
        squares: Floats = np.empty(end - begin, np.float32)
        k.square_sums(t.grad[begin:end], squares)
        k.rowwise_sums(t.state["sum"], *rows, squares, t.grad.shape[1])
        k.rowwise_step(t.weights, *rows, t.grad, self.steps(torch.from_numpy(squares)).numpy())


@dataclass(frozen=True)
class Adam(BatchedRule):
    """``torch.optim.SparseAdam``: Adam for the rows that a push touches.

    Args:
        lr: learning rate. Default 1e-3.
        betas: how much of the means of gradients and of their squares is kept.
        eps: added to the root of the latter. Default 1e-8.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    state: ClassVar[Mapping[str, Per]] = {"mean": Per.COLUMN, "square": Per.COLUMN}

    def __post_init__(self) -> None:
        number("Adam", "lr", self.lr)
        number("Adam", "eps", self.eps)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise TypeError(f"Adam: betas={self.betas!r} must be a tuple of two numbers")
        for beta in self.betas:
            number("Adam", "betas", beta, below=1.0)

    def size(self, step: int) -> float:
        """The learning rate with the corrections of the first updates."""
        one, two = self.betas
        return self.lr * math.sqrt(1 - two**step) / (1 - one**step)

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """See :class:`torch.optim.SparseAdam`."""
        one, two = self.betas
        mean, square = state["mean"], state["square"]
        mean.add_(grad.sub(mean).mul_(1 - one))
        square.add_(grad.pow(2).sub_(square).mul_(1 - two))
        moved = mean.div(square.sqrt().add_(self.eps))
        weight.add_(-self.size(step) * moved)

    def batch_kernel(self, k: ModuleType, t: Touched, begin: int, end: int, step: int) -> None:
        """Moves a range of the touched rows of several tables."""
        one, two = self.betas
        rows = t.rows, t.ends, begin, end
        mean, under = t.state["mean"], t.room(begin, end)
        k.adam_moments(mean, t.state["square"], *rows, t.grad, 1 - one, 1 - two, under)
        k.adam_step(t.weights, mean, *rows, _roots(under), self.size(step), self.eps)


@dataclass(frozen=True)
class FTRL(BatchedRule):
    """Follow the regularized leader, proximal: rows that are not needed become exactly zero.

    Args:
        lr: learning rate.
        l1: pull towards zero that makes rows sparse. Default 0.
        l2: pull towards zero in proportion. Default 0.
        beta: slows the first steps. Default 0.
    """

    lr: float = 0.1
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0

    state: ClassVar[Mapping[str, Per]] = {"sum": Per.COLUMN, "linear": Per.COLUMN}
    rests_at_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            number("FTRL", field.name, getattr(self, field.name))
        if not self.lr:
            raise ValueError("FTRL: lr=0 would divide by zero")

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        """Follows McMahan and others, "Ad Click Prediction", 2013, per column."""
        total, linear = state["sum"], state["linear"]
        old = total.sqrt()
        total.add_(grad * grad)
        new = total.sqrt()
        linear.add_(grad - ((new - old) / self.lr) * weight)
        pull = torch.where(linear > 0, self.l1, -self.l1).to(linear.dtype)
        moved = (pull - linear) / ((self.beta + new) / self.lr + self.l2)
        weight.copy_(torch.where(linear.abs() <= self.l1, torch.zeros_like(moved), moved))

    def batch_kernel(self, k: ModuleType, t: Touched, begin: int, end: int, step: int) -> None:
        """Moves a range of the touched rows of several tables."""
        rows = t.rows, t.ends, begin, end, t.grad
        old, new = t.room(begin, end), t.room(begin, end)
        k.ftrl_sums(t.state["sum"], *rows, old, new)
        hyper = self.lr, self.l1, self.l2, self.beta
        k.ftrl_step(t.weights, t.state["linear"], *rows, _roots(old), _roots(new), *hyper)
