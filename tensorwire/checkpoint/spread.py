"""Objects spread over workers, as checkpoints see them: owners that save and load their share.

An object takes part in checkpoints by its method ``checkpoint_shares``; the modules of
``remote_module`` and optimizers of ``optim_dist``, which know nothing of checkpoints, have
theirs here. On disk a share is nothing but named values, so that other owners, and any number
of them, may each load the names that they own now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import rpc
from optim_dist import DistributedOptimizer
from optim_dist import state as optimizer_state
from remote_module import RemoteModule
from tensorwire.checkpoint.fitting import (
    Fit,
    about_optimizer,
    fit_of_optimizer,
    fit_of_tensors,
    is_of_another_class,
)


class Names(Mapping[str, Any]):
    """The saved values of one object by name, each read when it is asked for.

    Args:
        names: of all values.
        read: returns the value of a name.
    """

    def __init__(self, names: Sequence[str], read: Callable[[str], Any]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Source(Protocol):
    """Reads and writes one owner's share, at that owner, to which it is sent."""

    def save(self) -> Mapping[str, Any]:
        """The share's values by name. They are written at once, or copied."""

    def check(self, values: Names) -> Fit:
        """Compares the values with what is here, before anything is loaded anywhere."""

    def load(self, values: Names) -> None:
        """Takes over the values of the names that belong to the share.

        Raises:
            KeyError: one is missing.
        """


@dataclass(frozen=True, slots=True)
class Share:
    """The share of an object that one worker owns.

    Args:
        worker: the owner.
        source: what saves and loads there.
    """

    worker: str
    source: Source


@runtime_checkable
class SpreadOut(Protocol):
    """An object that is spread over workers."""

    def checkpoint_shares(self) -> Sequence[Share]:
        """The share that each owner has of it."""

    def checkpoint_common(self) -> Any:
        """Plain data that belongs to no owner."""

    def load_checkpoint_common(self, common: Any) -> None:
        """Takes over what :meth:`checkpoint_common` returned."""


@dataclass(frozen=True, slots=True)
class _ModuleSource:
    module: rpc.RRef[Any]

    def save(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self.module.local_value().state_dict()
        return state

    def check(self, values: Names) -> Fit:
        return fit_of_tensors(self.module.local_value().state_dict(), values)

    def load(self, values: Names) -> None:
        load_module(self.module.local_value(), "", values)


@dataclass(frozen=True, slots=True)
class _RemoteModuleShares:
    """A remote module, all of which has one owner."""

    module: RemoteModule

    def checkpoint_shares(self) -> Sequence[Share]:
        rref = self.module.get_module_rref()
        return [Share(rref.owner_name(), _ModuleSource(rref))]

    def checkpoint_common(self) -> Any:
        return None

    def load_checkpoint_common(self, common: Any) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _OptimizerSource:
    optimizer: rpc.RRef[Any]
    positions: Sequence[int]

    def save(self) -> Mapping[str, Any]:
        state = optimizer_state.read_local(self.optimizer)
        kept = {str(self.positions[at]): each for at, each in state.items()}
        return about_optimizer(self._local, self._shapes()) | kept

    @property
    def _local(self) -> Any:
        return self.optimizer.local_value().optim

    def _shapes(self) -> dict[str, list[int]]:
        shapes = optimizer_state.shapes_of_local(self.optimizer)
        return {str(self.positions[at]): list(shape) for at, shape in shapes.items()}

    def check(self, values: Names) -> Fit:
        return fit_of_optimizer(self._local, self._shapes(), values)

    def load(self, values: Names) -> None:
        state = {
            at: values[str(position)]
            for at, position in enumerate(self.positions)
            if str(position) in values and not is_of_another_class(self._local, values)
        }
        optimizer_state.write_local(self.optimizer, state)


@dataclass(frozen=True, slots=True)
class _DistributedOptimizerShares:
    """A distributed optimizer, whose state is named by the parameters' positions."""

    optimizer: DistributedOptimizer

    def checkpoint_shares(self) -> Sequence[Share]:
        return [
            Share(rref.owner_name(), _OptimizerSource(rref, positions))
            for rref, positions in self.optimizer.placed_optimizers()
        ]

    def checkpoint_common(self) -> Any:
        return self.optimizer.hyperparameters()

    def load_checkpoint_common(self, common: Any) -> None:
        self.optimizer.set_hyperparameters(common)


def as_spread_out(value: Any) -> SpreadOut | None:
    """The value as checkpoints see it, if it is spread over workers."""
    if isinstance(value, RemoteModule):
        return _RemoteModuleShares(value)
    if isinstance(value, DistributedOptimizer):
        return _DistributedOptimizerShares(value)
    return value if isinstance(value, SpreadOut) else None


def load_module(module: Any, prefix: str, values: Names) -> None:
    """Copies saved values into a module whose names have a prefix there.

    Raises:
        KeyError: a parameter or buffer is missing.
        RuntimeError: the shapes do not fit.
    """
    state = {name: values[prefix + name] for name in module.state_dict()}
    module.load_state_dict(state)
