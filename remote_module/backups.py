"""A module's state in another worker's memory, so that its owner's death takes nothing with it.

The owner sends its module's state, and what optimizers keep for its parameters, after each step;
a step is over when the backup has it. Copies are numbered, as steps may run at the same time.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import rpc
from remote_module import handlers
from rpc import extend

_logger: Final = logging.getLogger("rpc")

States = Mapping[bytes, Mapping[str, Mapping[str, Any]]]
"""The state that each optimizer keeps for each parameter, by the parameter's name."""


@dataclass(frozen=True, slots=True)
class ModuleCopy:
    """A module's state after a step.

    Args:
        number: higher is later.
        state: as of ``state_dict``, on the CPU.
        optimizers: what they keep.
    """

    number: int
    state: Mapping[str, Any]
    optimizers: States


class _Backed:
    """A module here that has a backup, or was made of one."""

    def __init__(self, key: str, backup: str | None, optimizers: States) -> None:
        self.key, self.backup = key, backup
        self.optimizers: dict[bytes, Mapping[str, Mapping[str, Any]]] = dict(optimizers)
        self.numbers = itertools.count()

    def copied(self, module: nn.Module) -> ModuleCopy:
        state = {name: _copied(value) for name, value in module.state_dict().items()}
        return ModuleCopy(next(self.numbers), state, dict(self.optimizers))

    def send(self, made: ModuleCopy) -> None:
        """Brings a copy to the backup; without one from now on if it is lost."""
        backup = self.backup
        if backup is None:
            return
        try:
            rpc.rpc_sync(backup, keep, (self.key, made), timeout=0)
        except (rpc.WorkerLostError, rpc.UnknownWorkerError) as error:
            self.backup = None
            _logger.warning("a module goes on without its backup: %s", error)


class _Modules:
    """The modules of this worker that have backups, and the copies that it keeps for others."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.backed: weakref.WeakKeyDictionary[nn.Module, _Backed] = weakref.WeakKeyDictionary()
        self.kept: dict[str, ModuleCopy] = {}

    @classmethod
    def here(cls) -> _Modules:
        return extend.worker_state("remote_module.backups", cls)

    def of(self, parameters: Sequence[Any]) -> Iterator[tuple[nn.Module, _Backed]]:
        """The modules that have some of these parameters."""
        ids = set(map(id, parameters))
        with self.lock:
            everything = list(self.backed.items())
        for module, backed in everything:
            if any(id(each) in ids for each in module.parameters()):
                yield module, backed


def back_up(module: rpc.RRef[nn.Module], key: str, backup: str) -> None:
    """Has a module of this worker backed up from now on."""
    modules, value = _Modules.here(), module.local_value()
    backed = _Backed(key, backup, {})
    with modules.lock:
        modules.backed[value] = backed
    backed.send(backed.copied(value))


def copies_after_step(
    name: bytes, parameters: Sequence[Any], read_state: Callable[[], Mapping[int, Any]]
) -> list[Callable[[], None]]:
    """Copies the modules that a step has changed; returns what sends the copies.

    Args:
        name: of the optimizer.
        parameters: that it optimizes.
        read_state: what it keeps for each, by the parameter's place.
    """
    sends: list[Callable[[], None]] = []
    for module, backed in _Modules.here().of(parameters):
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        state = read_state()
        backed.optimizers[name] = {
            own: {field: _copied(value) for field, value in state[places[id(parameter)]].items()}
            for own, parameter in module.named_parameters()
            if places.get(id(parameter)) in state
        }
        made = backed.copied(module)
        sends.append(lambda backed=backed, made=made: backed.send(made))  # type: ignore[misc]
    return sends


def is_backed(parameters: Sequence[Any]) -> bool:
    """True if one of these parameters is of a module with a backup."""
    return any(True for _ in _Modules.here().of(parameters))


def left_by(name: bytes, parameters: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """The state that an optimizer of this name had kept where modules here were before."""
    state = {}
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    for module, backed in _Modules.here().of(parameters):
        states = backed.optimizers.get(name, {})
        for own, parameter in module.named_parameters():
            if own in states and id(parameter) in places:
                state[places[id(parameter)]] = {f: _copied(v) for f, v in states[own].items()}
    return state


def keep(key: str, made: ModuleCopy) -> None:
    """Keeps a copy for another worker, unless a later one is here."""
    modules = _Modules.here()
    mine = ModuleCopy(
        made.number,
        {name: _copied(value) for name, value in made.state.items()},
        {
            name: {p: {f: _copied(v) for f, v in fields.items()} for p, fields in states.items()}
            for name, states in made.optimizers.items()
        },
    )
    with modules.lock:
        known = modules.kept.get(key)
        if known is None or known.number < made.number:
            modules.kept[key] = mine


def is_kept(key: str) -> bool:
    """True if there is a copy here."""
    return key in _Modules.here().kept


def create_of_copy(
    module_cls: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    key: str,
    backup: str | None,
) -> nn.Module:
    """Makes a module again, with the state of the copy here."""
    modules = _Modules.here()
    module = handlers.create_module(module_cls, args, kwargs, device, False, 0)
    with modules.lock:
        kept = modules.kept.pop(key)
    module.load_state_dict(dict(kept.state))
    backed = _Backed(key, backup, kept.optimizers)
    with modules.lock:
        modules.backed[module] = backed
    backed.send(backed.copied(module))
    return module


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)
