"""Installs and removes the one redirection of this process."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable

import rpc
from rpc import extend
from tensorwire.dropin.environment import environment, environment_without
from tensorwire.dropin.errors import DropinError
from tensorwire.dropin.names import C_MODULE
from tensorwire.dropin.redirection import Redirection


class _Installed:
    """The redirection, as long as there is one. Names are a matter of the whole process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.redirection: Redirection | None = None
        self.stop_restoring: Callable[[], None] = lambda: None


_installed = _Installed()


def install(backend: str | None = None) -> Redirection:
    """Lets torch's RPC names stand for ours, in this process and in those it starts.

    The order of imports does not matter: modules, classes and functions that other modules
    imported before are replaced there, too. Instances and subclasses of torch's classes that
    exist already stay what they are. Does nothing the second time.

    Args:
        backend: ``"TENSORWIRE"`` or ``"TENSORPIPE"``: over which groups are formed, whatever
            a library names. Default what it names, which mostly is TENSORPIPE.

    Returns:
        What was changed, for tools that need torch's own modules: see ``genuine``.

    Raises:
        DropinError: torch's own RPC is running in this process, or another backend was
            asked for before.
        ValueError: there is no such backend.

    Example::

        import tensorwire.dropin

        tensorwire.dropin.install()
        import torchrl.collectors.distributed  # its remote calls are ours
    """
    with _installed.lock:
        imposed = _backend(backend)
        if _installed.redirection is not None:
            return _the_same(_installed.redirection, imposed)
        _require_that_torch_is_idle()
        redirection = Redirection(imposed)
        redirection.make()
        _installed.stop_restoring = extend.restore_torch_names(redirection.suspended)
        _installed.redirection = redirection
        os.environ.update(environment(backend=backend))
        return redirection


def uninstall() -> None:
    """Restores torch's names. Does nothing if they are torch's.

    Raises:
        DropinError: RPC is running in this process.
    """
    with _installed.lock:
        if _installed.redirection is None:
            return
        if rpc._is_current_rpc_agent_set():
            raise DropinError("RPC is running in this process; call rpc.shutdown() before this")
        _installed.stop_restoring()
        _installed.redirection.undo()
        _installed.redirection = None
        restored = environment_without(os.environ)
        for name in set(os.environ) - set(restored):
            del os.environ[name]
        os.environ.update(restored)


def is_installed() -> bool:
    """True while torch's names stand for ours."""
    return _installed.redirection is not None


def _require_that_torch_is_idle() -> None:
    torchs = importlib.import_module(C_MODULE)
    if torchs._is_current_rpc_agent_set() and not rpc._is_current_rpc_agent_set():
        raise DropinError(
            "torch's own RPC is running in this process; call torch.distributed.rpc.shutdown() "
            "before tensorwire.dropin.install(), or install before torch's init_rpc"
        )


def _backend(name: str | None) -> rpc.BackendType | None:
    if name is None:
        return None
    if not rpc.backend_registered(name):
        known = ", ".join(rpc.BackendType.__members__)
        raise ValueError(f"backend={name!r} does not exist; there are {known}")
    return rpc.BackendType[name]


def _the_same(redirection: Redirection, backend: rpc.BackendType | None) -> Redirection:
    if backend not in (None, redirection.backend):
        raise DropinError(
            f"the drop-in is installed already, with backend={redirection.backend}; "
            "call tensorwire.dropin.uninstall() before installing it with another"
        )
    return redirection
