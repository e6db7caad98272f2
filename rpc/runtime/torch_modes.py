"""Torch's modes while messages are unpacked: those of a fresh thread, whoever unpacks.

A thread that waits unpacks its own reply, and maybe those of others. What it said to
torch (``inference_mode``, a default device, any other function mode) is about its own
code, and must not decide what tensors arrive as. Grad mode stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)

is_inference = torch.is_inference_mode_enabled
function_modes = _len_torch_function_stack
"""The number of such modes that the running thread is in. These two are what :func:`are_changed`
asks.
"""


def are_changed() -> bool:
    """True if the running thread is in modes that would show in tensors that are made."""
    return is_inference() or function_modes() != 0


@contextmanager
def usual() -> Iterator[None]:
    """Leaves those modes until the end of a ``with`` block."""
    with ExitStack() as after:
        for _ in range(_len_torch_function_stack()):
            after.callback(_push_on_torch_function_stack, _pop_torch_function_stack())
        if is_inference():
            has_grad = torch.is_grad_enabled()
            after.enter_context(torch.inference_mode(False))  # which turns gradients on
            after.enter_context(torch.set_grad_enabled(has_grad))
        yield
