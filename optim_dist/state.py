"""The state of a distributed optimizer: fetched from its owners, given to them, changed there.

Parameters are named by their positions among those that the optimizer was made for. So a
state may be loaded by an optimizer of the same parameters on other owners. The functions that run
at the owners are at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

import rpc
from optim_dist.failures import from_each
from optim_dist.local_optimizer import LocalOptimizer

T = TypeVar("T")

Hyperparameters: TypeAlias = dict[str, Any]
"""A parameter group without its parameters, such as ``{"lr": 0.1, ...}``."""


class StateAcrossOwners:
    """The part of ``DistributedOptimizer`` that reads and writes its state.

    Attributes:
        remote_optimizers: references to the local optimizers, one per owner.
    """

    remote_optimizers: Sequence[rpc.RRef[Any]]
    _positions: Sequence[Sequence[int]]
    _groups: Groups | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The hyperparameters, as ``torch.optim.Optimizer`` has them.

        Changes to them reach every owner with the next step. Under ``"params"`` stand the
        positions of the parameters, of which nothing is here.

        Raises:
            ValueError: the owners' optimizers have different numbers of groups.
        """
        return self._known_groups().optimizer.param_groups

    def placeholder(self) -> torch.optim.Optimizer:
        """An optimizer of torch's with these ``param_groups`` that optimizes nothing itself."""
        return self._known_groups().optimizer

    def hyperparameters(self) -> list[Hyperparameters]:
        """A copy of the hyperparameters of each group."""
        return [_plain(group) for group in self.param_groups]

    def set_hyperparameters(self, groups: Sequence[Hyperparameters]) -> None:
        """Changes the hyperparameters of each group, here and with the next step at the owners.

        Raises:
            ValueError: there is another number of groups.
        """
        mine = self.param_groups
        if len(mine) != len(groups):
            raise ValueError(f"the optimizer has {len(mine)} parameter groups, not {len(groups)}")
        for group, new in zip(mine, groups, strict=True):
            group.update(new)

    def placed_optimizers(self) -> list[tuple[rpc.RRef[Any], Sequence[int]]]:
        """Each local optimizer with the positions of the parameters that it optimizes."""
        return list(zip(self.remote_optimizers, self._positions, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Gathers the state of all owners here.

        Returns:
            ``"state"``: what is kept for each parameter, by its position; ``"param_groups"``.
        """
        state: dict[int, Any] = {}
        states = self._ask(
            "reading the state of an optimizer", read_local, [()] * len(self._positions)
        )
        for positions, local in zip(self._positions, states, strict=True):
            state.update({positions[at]: each for at, each in local.items()})
        groups = [{**_plain(group), "params": list(group["params"])} for group in self.param_groups]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state that :meth:`state_dict` returned, perhaps for other owners.

        Raises:
            ValueError: there is another number of groups.
        """
        groups = [_plain(group) for group in state_dict["param_groups"]]
        self.set_hyperparameters(groups)
        state = state_dict["state"]
        arguments = [
            ({at: state[p] for at, p in enumerate(positions) if p in state},)
            for positions in self._positions
        ]
        self._ask("loading the state of an optimizer", write_local, arguments)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the parameters' own ``.grad`` at their owners.

        The gradients of a distributed backward pass are in its context, and need no clearing.
        """
        arguments = [(set_to_none,)] * len(self._positions)
        self._ask("clearing gradients", zero_local, arguments)

    def _known_groups(self) -> Groups:
        if self._groups is None:
            groups = self._ask("reading hyperparameters", read_groups, [()] * len(self._positions))
            self._groups = Groups(_merged(groups, self._positions))
        return self._groups

    def _send_groups(self) -> None:
        """Tells the owners of hyperparameters that were changed, with their next step."""
        assert self._groups is not None
        if (changed := self._groups.changed()) is not None:
            arguments = [(changed,)] * len(self._positions)
            self._ask("changing hyperparameters", write_groups, arguments)

    def _ask(
        self, what: str, function: Callable[..., T], arguments: Sequence[tuple[Any, ...]]
    ) -> list[T]:
        calls = {
            rref.owner(): (rref, *each)
            for rref, each in zip(self.remote_optimizers, arguments, strict=True)
        }
        return from_each(what, calls, lambda owner: rpc.rpc_async(owner, function, calls[owner]))


class Groups:
    """The hyperparameters, in an optimizer of torch's that optimizes nothing.

    Schedulers of ``torch.optim.lr_scheduler`` act on it.

    Args:
        groups: with the parameters' positions under ``"params"``.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.optimizer = _Placeholder(groups)
        self._sent = [_plain(group) for group in groups]

    def forget_sent(self) -> None:
        """Has all owners told of everything at the next step, as one is new."""
        self._sent = []

    def changed(self) -> list[Hyperparameters] | None:
        """The hyperparameters, if they are not those of the last time; notes a step."""
        self.optimizer.step()  # a scheduler counts them
        now = [_plain(group) for group in self.optimizer.param_groups]
        if now == self._sent:
            return None
        self._sent = now
        return now


class _Placeholder(torch.optim.Optimizer):
    """Has parameter groups, but no parameters."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__([{**group, "params": [torch.zeros(0)]} for group in groups], {})
        for mine, group in zip(self.param_groups, groups, strict=True):
            mine["params"] = list(group["params"])
        if groups:
            self.defaults = _plain(groups[0])  # where some schedulers look for what there is

    def step(self, closure: Any = None) -> Any:
        """Does nothing; the owners' optimizers step."""


def _merged(
    by_owner: Sequence[Sequence[dict[str, Any]]], positions: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """The owners' groups as one, with the parameters' positions among all.

    Raises:
        ValueError: the owners have different numbers of groups.
    """
    if len({len(groups) for groups in by_owner}) > 1:
        raise ValueError(
            "the owners' optimizers have different numbers of parameter groups: "
            f"{[len(groups) for groups in by_owner]}"
        )
    merged = []
    for groups in zip(*by_owner, strict=True):
        params = [
            its[at] for group, its in zip(groups, positions, strict=True) for at in group["params"]
        ]
        merged.append({**groups[0], "params": sorted(params)})
    return merged


def _plain(group: Mapping[str, Any]) -> Hyperparameters:
    return {name: value for name, value in group.items() if name != "params"}


# At the owners


def read_local(optimizer: rpc.RRef[LocalOptimizer]) -> dict[int, Any]:
    """The state of each parameter in the optimizer here, by its place among those here."""
    return optimizer.local_value().read_state()


def shapes_of_local(optimizer: rpc.RRef[LocalOptimizer]) -> dict[int, torch.Size]:
    """The shape of each parameter of the optimizer here, by its place among those here."""
    return optimizer.local_value().shapes()


def write_local(optimizer: rpc.RRef[LocalOptimizer], state: Mapping[int, Any]) -> None:
    """Replaces what the optimizer here keeps."""
    optimizer.local_value().write_state(state)


def read_groups(optimizer: rpc.RRef[LocalOptimizer]) -> list[dict[str, Any]]:
    """The hyperparameters of the optimizer here, and the places of each group's parameters."""
    return optimizer.local_value().read_groups()


def write_groups(optimizer: rpc.RRef[LocalOptimizer], groups: Sequence[Hyperparameters]) -> None:
    """Changes the hyperparameters of the optimizer here."""
    for group, new in zip(optimizer.local_value().optim.param_groups, groups, strict=True):
        group.update(new)


def zero_local(optimizer: rpc.RRef[LocalOptimizer], set_to_none: bool) -> None:
    """Clears the own gradients of the parameters here."""
    optimizer.local_value().zero_grad(set_to_none)
