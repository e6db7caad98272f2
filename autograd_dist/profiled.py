"""Shows backward passes to torch's profilers.

A profiler records the thread that started it, and the thread that runs a backward pass
does all the pass's work on its worker (``home``). The spans are named as torch names its
own, for programs that look for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

PASS = "torch::distributed::autograd::backward"
SEND = "torch::distributed::autograd::SendRpcBackward"

profiler_enabled: Callable[[], bool] = _profiler_enabled
"""True if a profile of the running thread is recorded."""

P = ParamSpec("P")
R = TypeVar("R")


def in_span(name: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Does ``work`` in a span of the calling thread's profile, if there is one."""
    if not profiler_enabled():
        return work(*args, **kwargs)
    with record_function(name):
        return work(*args, **kwargs)
