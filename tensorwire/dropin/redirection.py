"""Puts our modules and names in the place of torch's, and takes them away again.

Three things change: what ``import`` finds, the attributes of torch's modules, and names that
other modules imported before, such as a library's ``rpc_sync``. Each change is remembered with
the value it replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

import rpc
from tensorwire.dropin.names import C_MODULE, C_NAMES, DEFINED_IN, MODULES, NAMES, ROOTS

_LEFT_ALONE = ("rpc", "autograd_dist", "optim_dist", "remote_module", "tensorwire", "torch._C")
"""Packages that mean torch's own objects when they hold them."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One name of one module."""

    module: types.ModuleType
    name: str
    before: object
    after: object

    def make(self) -> None:
        setattr(self.module, self.name, self.after)

    def undo(self) -> None:
        """Restores the value, unless somebody else has changed it since."""
        if self.module.__dict__.get(self.name) is self.after:
            setattr(self.module, self.name, self.before)


class _CModule(types.ModuleType):
    """Stands for torch's C++ module: the names we have are ours, all others torch's."""

    def __init__(self, genuine: types.ModuleType) -> None:
        super().__init__(genuine.__name__, genuine.__doc__)
        self._genuine = genuine
        for name, place in C_NAMES.items():
            module, _, other_name = place.partition(":")
            setattr(self, name, getattr(importlib.import_module(module), other_name or name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._genuine, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._genuine)})


class _RpcModule(types.ModuleType):
    """Stands for ``torch.distributed.rpc`` where a backend is imposed by ``init_rpc``."""

    def __init__(self, backend: rpc.BackendType) -> None:
        super().__init__(rpc.__name__, rpc.__doc__)
        self.__dict__["init_rpc"] = self._init_rpc
        self.__dict__["_imposed"] = backend
        self.__dict__["__path__"] = rpc.__path__

    def _init_rpc(
        self,
        name: str,
        backend: rpc.BackendType | None = None,
        rank: int = -1,
        world_size: int | None = None,
        rpc_backend_options: rpc.RpcBackendOptions | None = None,
    ) -> None:
        """Joins the group over the imposed backend, whatever the program names."""
        rpc.init_rpc(name, self._imposed, rank, world_size, rpc_backend_options)

    def __getattr__(self, name: str) -> Any:
        return getattr(rpc, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(rpc, name, value)

    def __dir__(self) -> list[str]:
        return dir(rpc)


class _NoOtherSubmodules(importlib.abc.MetaPathFinder):
    """Refuses submodules of torch's packages that we have no counterpart of.

    Without it ``import torch.distributed.rpc.calls`` would load a second copy of
    ``rpc.calls``, because the package in which it is looked for is ours.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if any(name.startswith(f"{root}.") for root in ROOTS):
            raise ModuleNotFoundError(f"TensorWire has no counterpart of {name}", name=name)
        return None


@dataclass(slots=True)
class Redirection:
    """All that was changed.

    Args:
        backend: over which groups are formed, whatever a program names; None leaves it that.

    Attributes:
        genuine: torch's modules by name.
        ours: the modules that stand for them.
    """

    backend: rpc.BackendType | None = None
    genuine: dict[str, types.ModuleType] = field(default_factory=dict)
    ours: dict[str, types.ModuleType] = field(default_factory=dict)
    _changes: list[_Change] = field(default_factory=list)
    _finder: _NoOtherSubmodules = field(default_factory=_NoOtherSubmodules)

    def make(self) -> None:
        """Lets torch's names stand for ours, wherever they are known by now."""
        for name in (*MODULES, *(module for module, _ in NAMES), C_MODULE):
            importlib.import_module(name)
        self.genuine = {name: m for name, m in list(sys.modules.items()) if _is_redirected(name)}
        self.ours = {name: importlib.import_module(ours) for name, ours in MODULES.items()}
        if self.backend is not None:
            self.ours["torch.distributed.rpc"] = _RpcModule(self.backend)
        self.ours[C_MODULE] = _CModule(self.genuine[C_MODULE])
        self._changes = [*self._listed_names(), *self._names_imported_before()]
        for change in self._changes:
            change.make()
        _put(self.ours, in_place_of=self.genuine)
        sys.meta_path.insert(0, self._finder)

    def undo(self) -> None:
        """Restores everything."""
        sys.meta_path.remove(self._finder)
        _put(self.genuine, in_place_of=self.genuine)
        for change in reversed(self._changes):
            change.undo()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Lets ``import`` find torch's modules for a while."""
        _put(self.genuine, in_place_of=self.genuine)
        try:
            yield
        finally:
            _put(self.ours, in_place_of=self.genuine)

    def _listed_names(self) -> Iterator[_Change]:
        for (module_name, name), ours in NAMES.items():
            module = importlib.import_module(module_name)
            yield _Change(
                module, name, getattr(module, name), getattr(importlib.import_module(ours), name)
            )

    def _names_imported_before(self) -> Iterator[_Change]:
        """Finds what other modules took from torch's, by its identity."""
        replacements = self._replacements()
        for name, module in list(sys.modules.items()):
            if name in self.genuine or _is_below(name, _LEFT_ALONE):
                continue
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                replacement = replacements.get(id(value))
                if replacement is not None and isinstance(module, types.ModuleType):
                    yield _Change(module, attribute, value, replacement)

    def _replacements(self) -> Mapping[int, object]:
        """Maps the id of each of torch's modules, classes and functions to what replaces it."""
        ours_by_id: dict[int, object] = {}
        for name, ours in self.ours.items():
            genuine = self.genuine[name]
            ours_by_id[id(genuine)] = ours
            for attribute, value in vars(genuine).items():
                counterpart = getattr(ours, attribute, value)
                if counterpart is not value and _is_defined_by_torch(value):
                    ours_by_id[id(value)] = counterpart
        for change in self._listed_names():
            ours_by_id[id(change.before)] = change.after
        return ours_by_id


def _put(
    modules: Mapping[str, types.ModuleType], in_place_of: Mapping[str, types.ModuleType]
) -> None:
    """Lets names mean ``modules``, for ``import`` and as attributes of their packages."""
    for name in in_place_of:
        sys.modules.pop(name, None)
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent not in modules:
            setattr(sys.modules[parent], leaf, module)


def _is_redirected(name: str) -> bool:
    return name in MODULES or name == C_MODULE or _is_below(name, ROOTS)


def _is_below(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _is_defined_by_torch(value: object) -> bool:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    return str(getattr(value, "__module__", "")).startswith(DEFINED_IN)
