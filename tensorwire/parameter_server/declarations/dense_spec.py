"""A group of dense parameters: an optimizer's, cut into pieces that servers keep.

An elementwise optimizer gives the same bits however its parameters are cut, so large ones are cut
into pieces; those of other optimizers stay whole. A piece belongs to a slot, as an id does, so
that pieces move with the map. Pieces next to each other lie in slots next to each other.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tensorwire.parameter_server.decisions.slots import SLOTS
from tensorwire.parameter_server.declarations.arguments import instance
from tensorwire.parameter_server.opaque import OptimizerValue

_LARGE: Final = 1 << 22
_LEAST: Final = 1 << 14
_PIECES: Final = 128

_ELEMENTWISE: Final[frozenset[type[Optimizer]]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)


class Spread(enum.Enum):
    """The ways in which an optimizer's parameters may be spread over servers."""

    ELEMENTS = "cut anywhere"
    """Pieces of parameters: right for optimizers whose elements do not see each other."""
    PARAMETERS = "each whole on one server"
    """Whole parameters: right for optimizers that use norms or factors of a parameter."""
    TOGETHER = "all on one server"
    """All parameters together: right for optimizers whose parameters see each other."""


@dataclass(frozen=True)
class Piece:
    """A range of a parameter's elements.

    Args:
        parameter: its place among all parameters of the optimizer.
        group: its parameter group.
        start: the first element.
        stop: one behind the last.
        slot: where it is kept.
    """

    parameter: int
    group: int
    start: int
    stop: int
    slot: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class DenseSpec:
    """One optimizer and its parameters.

    Args:
        name: unique in the cluster.
        optimizer: its class.
        shapes: of the parameters, in the order of the groups.
        dtypes: theirs.
        pieces: all of them, in order.
        spread: how they were cut.
        defaults: of the optimizer.
        groups: the hyper-parameters of each group.
        attributes: what else the optimizer object holds.
        names: of the parameters in the model, if they are known.
    """

    name: str
    optimizer: type[Optimizer]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    pieces: tuple[Piece, ...]
    spread: Spread
    defaults: Mapping[str, object]
    groups: tuple[Mapping[str, object], ...]
    attributes: Mapping[str, object]
    names: tuple[str, ...] = ()

    def differences(self, other: object) -> list[str]:
        """The points in which another declaration of this group says otherwise."""
        if not isinstance(other, DenseSpec):
            return [f"it is a {type(other).__name__}, not a dense group"]
        differences = []
        for what in ("optimizer", "shapes", "dtypes", "spread"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if repr(mine) != repr(theirs):
                differences.append(f"{what}={theirs!r}, not {mine!r}")
        return differences

    def other_steps(self, other: DenseSpec) -> list[str]:
        """The hyper-parameters with which another declaration of this group would step otherwise.

        Where a scheduler has set a learning rate, the one that it began with counts.
        """
        differences = []
        for number, (mine, theirs) in enumerate(zip(self.groups, other.groups, strict=False)):
            is_scheduled = "initial_lr" in mine or "initial_lr" in theirs
            for name in ("lr",) if is_scheduled else self.defaults:
                one, two = (each.get("initial_lr" if name == "lr" else name, each.get(name))
                            for each in (mine, theirs))  # fmt: skip
                if repr(one) != repr(two):
                    differences.append(f"parameter group {number}: {name}={two!r}, not {one!r}")
        return differences

    def kept_by(self, slots: Sequence[int], shard: int) -> list[int]:
        """The pieces of a shard, by their place in :attr:`pieces`."""
        return [place for place, piece in enumerate(self.pieces) if slots[piece.slot] == shard]


@dataclass(frozen=True)
class PieceData:
    """A piece's elements and its state in the optimizer."""

    value: Tensor
    state: Mapping[str, object] = field(default_factory=dict)


def spread_of(optimizer: Optimizer) -> Spread:
    """The way in which the parameters of an optimizer may be spread.

    Raises:
        ValueError: it needs a closure, which cannot run on a server.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss several times a step and needs a closure for it, which "
            "cannot run on a server; choose another optimizer, or keep this one local"
        )
    return Spread.ELEMENTS if type(optimizer) in _ELEMENTWISE else Spread.PARAMETERS


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, group after group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def describe(name: str, optimizer: Optimizer, spread: Spread) -> DenseSpec:
    """Describes a constructed optimizer of dense parameters.

    Raises:
        TypeError: ``name`` is no text.
    """
    instance("dense parameters", "name", name, str, "a text")
    parameters = parameters_of(optimizer)
    owners = [g for g, group in enumerate(optimizer.param_groups) for _ in group["params"]]
    return DenseSpec(
        name,
        type(optimizer),
        tuple(tuple(each.shape) for each in parameters),
        tuple(each.dtype for each in parameters),
        _cut([each.numel() for each in parameters], owners, spread),
        spread,
        dict(optimizer.defaults),
        tuple(hyper_of(group) for group in optimizer.param_groups),
        _attributes(optimizer),
        _names(optimizer),
    )


def _names(optimizer: Optimizer) -> tuple[str, ...]:
    """The parameters' names, if the optimizer was given them with their names."""
    groups = optimizer.param_groups
    if not all("param_names" in group for group in groups):
        return ()
    return tuple(str(name) for group in groups for name in group["param_names"])


def hyper_of(group: Mapping[str, object]) -> dict[str, object]:
    """The hyper-parameters of a group, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _cut(sizes: Sequence[int], owners: Sequence[int], spread: Spread) -> tuple[Piece, ...]:
    total = sum(sizes)
    step = max(_LEAST, -(-total // _PIECES))
    pieces: list[Piece] = []
    before = 0
    for parameter, size in enumerate(sizes):
        most = step if spread is Spread.ELEMENTS else max(size, 1)
        for start in range(0, size, most):
            stop = min(start + most, size)
            middle = before + (start + stop) // 2
            slot = 0 if spread is Spread.TOGETHER else middle * SLOTS // max(total, 1)
            pieces.append(Piece(parameter, owners[parameter], start, stop, slot))
        before += size
    return tuple(pieces)


def _attributes(optimizer: Optimizer) -> dict[str, object]:
    """The attributes a class of its own keeps in the object, beyond what every optimizer has."""
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in vars(plain) and not callable(value)
    }


def state_of_piece(
    state: Mapping[str, object], piece: Piece, shape: Sequence[int]
) -> dict[str, object]:
    """The share of a piece in the state of its parameter, if pieces are cut anywhere."""
    return {
        key: value.detach().reshape(-1)[piece.start : piece.stop].clone()
        if isinstance(value, Tensor) and value.shape == torch.Size(shape) and value.dim()
        else copied(value)
        for key, value in state.items()
    }


def copied(value: object) -> object:
    """A copy of a tensor without its graph; anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def joined_state(
    pieces: Sequence[tuple[Piece, Mapping[str, object]]], shape: Sequence[int]
) -> dict[str, object]:
    """The state of a parameter: the inverse of :func:`state_of_piece` for all its pieces."""
    joined = {}
    for key, value in pieces[0][1].items():
        is_cut = isinstance(value, Tensor) and value.dim() == 1 and len(value) == len(pieces[0][0])
        parts: list[OptimizerValue] = [state[key] for _, state in pieces]
        joined[key] = torch.cat(parts).reshape(tuple(shape)) if is_cut else value
    return joined


def split_state(spec: DenseSpec, piece: Piece, state: Mapping[str, object]) -> dict[str, object]:
    """The share of a piece in the state of its parameter."""
    if spec.spread is Spread.ELEMENTS:
        return state_of_piece(state, piece, spec.shapes[piece.parameter])
    return {key: copied(value) for key, value in state.items()}


def whole_state(
    spec: DenseSpec, parameter: int, pieces: Sequence[tuple[Piece, Mapping[str, object]]]
) -> dict[str, object]:
    """The state of a parameter, of the states of all its pieces in order."""
    if spec.spread is Spread.ELEMENTS:
        return joined_state(pieces, spec.shapes[parameter])
    return dict(pieces[0][1])


def require_step(spec: DenseSpec) -> None:
    """Has a throw-away optimizer make one step on zeros, as a server would on what it keeps.

    Args:
        spec: what the group is. Of each parameter group the smallest parameter of each number of
            dimensions is tried, unless it is large.

    Raises:
        ValueError: the step fails.
    """
    _after_a_step(spec)


def state_keys(spec: DenseSpec) -> dict[tuple[int, int], list[str]]:
    """The names of the state kept for a parameter, by its group and number of dimensions.

    Raises:
        ValueError: the optimizer cannot step.
    """
    tried, kinds = _after_a_step(spec)
    return {kind: sorted(tried.state.get(each, {})) for kind, each in kinds.items()}


def _after_a_step(spec: DenseSpec) -> tuple[Optimizer, dict[tuple[int, int], nn.Parameter]]:
    smallest: dict[tuple[int, int], Piece] = {}
    for piece in spec.pieces:
        kind = piece.group, len(spec.shapes[piece.parameter])
        if len(piece) <= min(_LARGE, len(smallest.get(kind, range(_LARGE)))):
            smallest[kind] = piece
    tried, parameters = optimizer_of(copy.deepcopy(spec)), {}
    for kind, piece in smallest.items():
        shape = spec.shapes[piece.parameter]
        flat = (len(piece),) if spec.spread is Spread.ELEMENTS else shape
        parameter = nn.Parameter(torch.zeros(flat, dtype=spec.dtypes[piece.parameter]))
        parameter.grad = torch.zeros_like(parameter)
        tried.param_groups[piece.group]["params"].append(parameter)
        parameters[kind] = parameter
    try:
        tried.step()
    except Exception as error:
        raise ValueError(
            f"{spec.optimizer.__name__} cannot step on servers, which keep parameters and dense "
            f"gradients on the CPU: {type(error).__name__}: {error}; choose another optimizer or "
            "other options of it, or keep this one local"
        ) from error
    return tried, parameters


def optimizer_of(spec: DenseSpec) -> Optimizer:
    """An optimizer of that class without parameters. Its own constructor may want anything."""
    made: Optimizer = spec.optimizer.__new__(spec.optimizer)
    groups = [{"params": [torch.zeros(1)], **hyper} for hyper in spec.groups]
    Optimizer.__init__(made, groups, dict(spec.defaults))
    vars(made).update(spec.attributes)
    for group in made.param_groups:
        group["params"] = []
    return made
