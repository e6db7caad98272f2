"""The methods of ``nn.Module`` that a remote module refuses, and how.

They read or change parameters, buffers, hooks or submodules, which are not
here. Without these refusals they would quietly act on an empty module. What makes
sense across the wire (``state_dict``, ``load_state_dict``, ``to``, ``half``,
``requires_grad_``) is in ``module``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn


def _refused(name: str, advice: str = "") -> Callable[..., NoReturn]:
    message = f"Method ``{name}`` not supported for RemoteModule{advice}"

    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(message)

    refuse.__name__ = name
    refuse.__doc__ = "Raises ``ValueError``: the module is on another worker."
    return refuse


class LocalOnlyMethodsRefused(nn.Module):
    """An ``nn.Module`` whose contents are elsewhere."""

    register_buffer = _refused("register_buffer")
    register_parameter = _refused("register_parameter")
    add_module = _refused("add_module")
    apply = _refused("apply")

    cuda = _refused("cuda")
    ipu = _refused("ipu")
    xpu = _refused("xpu")
    cpu = _refused("cpu")
    type = _refused("type")
    float = _refused("float")
    double = _refused("double")
    bfloat16 = _refused("bfloat16")

    register_backward_hook = _refused("register_backward_hook")
    register_forward_pre_hook = _refused("register_forward_pre_hook")
    register_forward_hook = _refused("register_forward_hook")

    parameters = _refused("parameters", ". Please use ``remote_parameters`` instead.")
    named_parameters = _refused("named_parameters")
    buffers = _refused("buffers")
    named_buffers = _refused("named_buffers")
    children = _refused("children")
    named_children = _refused("named_children")
    modules = _refused("modules")
    named_modules = _refused("named_modules")

    zero_grad = _refused("zero_grad")
    share_memory = _refused("share_memory")
    extra_repr = _refused("extra_repr")
