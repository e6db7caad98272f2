"""A remote module under ``torch.jit.script``: a module that TorchScript can call.

TorchScript is typed and calls Python only through functions with a signature, so the
module's methods are written out here from the TorchScript interface that the remote
module was made with. What they do is in ``module``: they begin a call and take its result.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import textwrap
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from remote_module.module import _RemoteModule

_NOT_SENT: Final = (
    "Passing a script RemoteModule over RPC is not supported, and a RemoteModule can only be "
    "pickled when using RPC. Send its `module_rref`, and give that to "
    "`RemoteModule.init_from_module_rref` at the receiver."
)

_METHODS: Final = f"""\
def forward({{parameters}}) -> {{result}}:
    return self._call({{arguments}})

@_rm_export
def forward_async({{parameters}}) -> _rm_Future[{{result}}]:
    return _rm_fork(self._finish, self._begin({{arguments}}))

def _finish(self, started: _rm_Future[{{result}}]) -> {{result}}:
    return self._take(started)

@_rm_ignore
def _call({{parameters}}) -> {{result}}:
    return _rm_calls[self.key].forward({{arguments}})

@_rm_ignore
def _begin({{parameters}}) -> _rm_Future[{{result}}]:
    return _rm_begun(_rm_calls[self.key].forward_async({{arguments}}))

@_rm_ignore
def _take(self, started: _rm_Future[{{result}}]) -> {{result}}:
    return started.wait().wait()

@_rm_export
def __getstate__(self) -> int:
    raise RuntimeError({_NOT_SENT!r})

@_rm_export
def __setstate__(self, state: int) -> None:
    raise RuntimeError({_NOT_SENT!r})
"""


def _begun(call: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Returns a future of ``call`` itself, done when that is.

    TorchScript passes on what a future holds but not its error, if that was set in Python.
    """
    done: torch.futures.Future[Any] = torch.futures.Future()
    call.add_done_callback(done.set_result)
    return done


class Calls:
    """The functions that make the calls of one remote module.

    Args:
        forward: calls and waits.
        forward_async: calls and returns a future.
    """

    __slots__ = ("__weakref__", "forward", "forward_async")

    def __init__(
        self,
        forward: Callable[..., Any],
        forward_async: Callable[..., torch.futures.Future[Any]],
    ) -> None:
        self.forward = forward
        self.forward_async = forward_async


_calls: Final[weakref.WeakValueDictionary[int, Calls]] = weakref.WeakValueDictionary()
"""By id. Weak, and of no use but to TorchScript, whose modules cannot hold Python objects
where their methods find them: they hold the number. The compiled module keeps the object."""

_NAMES: Final[Mapping[str, Any]] = {
    "_rm_Future": torch.futures.Future,
    "_rm_begun": _begun,
    "_rm_calls": _calls,
    "_rm_export": torch.jit.export,
    "_rm_fork": torch.jit.fork,
    "_rm_ignore": torch.jit.ignore,
}


class ScriptableRemoteModule(nn.Module):
    """Stands for a remote module while TorchScript compiles it.

    Args:
        remote_module: the handle.
    """

    __jit_ignored_attributes__ = ("on", "device", "module_rref", "calls")

    def __init__(self, remote_module: _RemoteModule) -> None:
        super().__init__()
        self.on = remote_module.on
        self.device = remote_module.device
        self.module_rref = remote_module.module_rref
        self.calls = Calls(remote_module.forward, remote_module.forward_async)
        self.key = id(self.calls)
        _calls[self.key] = self.calls


@functools.lru_cache(maxsize=64)
def scriptable_class(interface: type) -> type[ScriptableRemoteModule]:
    """The class for remote modules with a TorchScript interface.

    Args:
        interface: a class decorated with ``torch.jit.interface`` that has ``forward``.

    Raises:
        TypeError: it has no ``forward``, or takes arguments that TorchScript does not know.
    """
    forward = getattr(interface, "forward", None)
    if not inspect.isfunction(forward):
        raise TypeError(f"the TorchScript interface {interface.__qualname__} has no forward")
    methods = _define(_source(forward), forward, f"<{interface.__qualname__} of a RemoteModule>")
    body = {"__module__": __name__, **methods}
    return type(f"Remote{interface.__name__}", (ScriptableRemoteModule,), body)


def _source(forward: Callable[..., Any]) -> str:
    """The methods, with the signature of ``forward`` in its author's words."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    given = definition.args
    if given.vararg or given.kwarg or given.kwonlyargs or definition.returns is None:
        raise TypeError(
            f"{forward.__qualname__} must have positional parameters only, and say what it returns"
        )
    return _METHODS.format(
        parameters=ast.unparse(given),
        arguments=", ".join(each.arg for each in given.args[1:]),
        result=ast.unparse(definition.returns),
    )


def _define(source: str, forward: Callable[..., Any], file: str) -> dict[str, Any]:
    """Runs ``source`` among the names that ``forward`` sees, and where TorchScript can read it."""
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    seen = inspect.getclosurevars(forward).nonlocals
    names = {**forward.__globals__, **seen, **_NAMES}
    before = dict(names)
    exec(compile(source, file, "exec", dont_inherit=True), names)
    return {name: value for name, value in names.items() if before.get(name) is not value}
