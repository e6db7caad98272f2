"""Makes ``torch.distributed.rpc`` and its kin stand for our modules in this process.

Must run before anything imports torch's tests, and in every process. torch's
C++ finds its handler module by name when it carries its first call, so while
our TensorPipe transport starts the names stand for the genuine modules again.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

MODULES: Mapping[str, str] = {
    "torch.distributed.rpc": "rpc",
    "torch.distributed.rpc.api": "rpc.api",
    "torch.distributed.rpc.functions": "rpc.functions",
    "torch.distributed.rpc.backend_registry": "rpc.backend_registry",
    "torch.distributed.rpc.constants": "rpc.constants",
    "torch.distributed.rpc.internal": "rpc.internal",
    "torch.distributed.rpc.options": "rpc.options",
    "torch.distributed.rpc.rref_proxy": "rpc.rref_proxy",
    "torch.distributed.rpc._testing": "rpc._testing",
    "torch.distributed.autograd": "autograd_dist",
    "torch.distributed.nn.api.remote_module": "remote_module",
}
"""torch's modules, and those of ours that take their place."""

NAMES: Mapping[tuple[str, str], str] = {
    ("torch.distributed.nn", "RemoteModule"): "remote_module",
    ("torch.distributed.optim", "DistributedOptimizer"): "optim_dist",
    ("torch.autograd.profiler_legacy", "profile"): "rpc.observe.profiling",
    # These took their copies of the names when torch was imported.
    ("torch._jit_internal", "RRef"): "rpc",
    ("torch.nn.parallel.distributed", "RRef"): "rpc",
}
"""Single names in modules of torch that otherwise stay."""

_ROOTS = ("torch.distributed.rpc", "torch.distributed.autograd")


@dataclass(slots=True)
class Redirection:
    """What stands where; can be undone and redone."""

    genuine: dict[str, types.ModuleType] = field(default_factory=dict)
    ours: dict[str, types.ModuleType] = field(default_factory=dict)

    def put(self, modules: Mapping[str, types.ModuleType]) -> None:
        """Lets torch's names mean ``modules``, for ``import`` and as attributes."""
        for name in self.genuine:
            sys.modules.pop(name, None)
        for name, module in modules.items():
            sys.modules[name] = module
            parent, _, leaf = name.rpartition(".")
            if parent not in modules:
                setattr(sys.modules[parent], leaf, module)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Lets torch's names mean torch's modules for a while."""
        self.put(self.genuine)
        try:
            yield
        finally:
            self.put(self.ours)


class _NothingElse(importlib.abc.MetaPathFinder):
    """Refuses submodules that we have no counterpart of.

    Without it ``import torch.distributed.rpc.calls`` would load a second copy of
    ``rpc.protocol.calls``, because the package it is looked for in is ours.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if any(name.startswith(f"{root}.") for root in _ROOTS):
            raise ModuleNotFoundError(f"there is no counterpart of {name}", name=name)
        return None


def redirect() -> Redirection:
    """Redirects all names of this process; see the module."""
    redirection = Redirection()
    for name in MODULES:
        importlib.import_module(name)
    redirection.genuine = {
        name: module for name, module in sys.modules.items() if _is_redirected(name)
    }
    for name, ours in MODULES.items():
        redirection.ours[name] = importlib.import_module(ours)
    for (module, name), ours in NAMES.items():
        value = getattr(importlib.import_module(ours), name)
        setattr(importlib.import_module(module), name, value)
    redirection.put(redirection.ours)
    sys.meta_path.insert(0, _NothingElse())
    _let_the_transport_see_torch(redirection)
    return redirection


def _is_redirected(name: str) -> bool:
    return name in MODULES or any(name == r or name.startswith(f"{r}.") for r in _ROOTS)


def _let_the_transport_see_torch(redirection: Redirection) -> None:
    from rpc.transports.tensorpipe.transport import TensorPipeTransport

    start = TensorPipeTransport.start

    def start_with_torch(*args: Any) -> bytes:
        with redirection.suspended():
            return start(*args)

    TensorPipeTransport.start = start_with_torch  # type: ignore[method-assign]
