"""The optimizers of tables: how rows move. Each is a row's own, with its state beside the row.

A rule is a frozen dataclass whose fields are its hyper-parameters. ``update`` says in torch what it
does to the rows that a push touches; rows that are not touched do not change. For the rules here
there are compiled kernels besides (``storage.updates``), which give the same bits.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from tensorwire.parameter_server.declarations.arguments import number


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
    """Whether a learning rate of 0, as at the begin of a warm-up, is none of the rule's: rows then
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


@dataclass(frozen=True)
class SGD(Rule):
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


@dataclass(frozen=True)
class Adagrad(Rule):
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


@dataclass(frozen=True)
class RowwiseAdagrad(Rule):
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
        """By how much each row moves for a gradient of one."""
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


@dataclass(frozen=True)
class Adam(Rule):
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


@dataclass(frozen=True)
class FTRL(Rule):
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
