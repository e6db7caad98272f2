"""Proves that torch's own RPC handles none of the calls: whatever would is a trap.

Our TensorPipe transport uses torch's agent as a bus. It may start it, send our
frames with it and look up its counters; everything else in torch's RPC that
makes or serves a call, an RRef or an autograd context ends in a marked line of
output, for which the test fails.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

MARK = "GENUINE TORCH RPC WAS USED:"

_MAKERS = (
    *("_invoke_rpc_builtin", "_invoke_rpc_torchscript", "_invoke_remote_builtin"),
    *("_invoke_remote_python_udf", "_invoke_remote_torchscript", "PyRRef"),
)
_API = ("rpc_sync", "rpc_async", "remote", "RRef", "_invoke_rpc", "_all_gather", "shutdown")
_AUTOGRAD = ("_new_context", "backward", "get_gradients", "_retrieve_context")


def install(genuine: Mapping[str, types.ModuleType]) -> None:
    """Sets the traps in torch's modules, which need not be importable any more."""
    from torch._C import _distributed_autograd

    in_c = genuine["torch._C._distributed_rpc"]
    api = genuine["torch.distributed.rpc.api"]
    package = genuine["torch.distributed.rpc"]
    for name in _MAKERS:
        _trap(name, in_c, api, package)
    for name in (*_API, "init_rpc"):
        _trap(name, api, package)
    for name in _AUTOGRAD:
        _trap(name, _distributed_autograd, genuine["torch.distributed.autograd"])
    _check_what_torch_serves(genuine["torch.distributed.rpc.internal"])


def _trap(name: str, *modules: types.ModuleType) -> None:
    def trapped(*args: Any, **kwargs: Any) -> NoReturn:
        _report(f"{name}{args!r}")

    for module in modules:
        if hasattr(module, name):
            setattr(module, name, trapped)


def _check_what_torch_serves(internal: Any) -> None:
    """torch's C++ calls ``_run_function`` for each call that comes in; it takes it from here."""
    from rpc.transports.tensorpipe.wire import TorchCall

    serve: Callable[[Any], Any] = internal._run_function

    def serve_ours(call: Any) -> Any:
        if not isinstance(call, TorchCall):
            _report(f"a call of {getattr(call, 'func', call)!r} was served")
        return serve(call)

    internal._run_function = serve_ours


def _report(what: str) -> NoReturn:
    print(MARK, what, file=sys.__stderr__, flush=True)
    raise AssertionError(f"{MARK} {what}")
