"""How torch's profilers get to see a backward pass.

A profiler records the thread that started it, and the thread that runs a backward pass
does all the pass's work on its worker (``home``). The spans are named as torch names its
own, for programs that look for them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from rpc.observation import profiler_enabled

PASS = "torch::distributed::autograd::backward"
SEND = "torch::distributed::autograd::SendRpcBackward"

_NOT_RECORDED: AbstractContextManager[object] = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A span in the calling thread's profile, if there is one."""
    return record_function(name) if profiler_enabled() else _NOT_RECORDED
