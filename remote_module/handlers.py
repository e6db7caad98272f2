"""The functions that run at the worker that owns a remote module, on behalf of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import rpc
from remote_module.devices import move_tensors
from remote_module.randomness import seeded

_CPU = torch.device("cpu")


def create_module(
    module_cls: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: str,
    scripted: bool,
    seed: int | None = None,
) -> nn.Module:
    """Makes a module on ``device``, compiled with TorchScript if ``scripted``.

    Args:
        module_cls: makes it.
        args: positional arguments.
        kwargs: keyword arguments.
        device: where it goes.
        scripted: whether it is compiled.
        seed: of the random numbers that are drawn meanwhile; None: they come as ever.

    Raises:
        ValueError: ``module_cls`` made something else.
    """
    drawn = contextlib.nullcontext() if seed is None else seeded(seed, torch.device(device))
    with drawn:
        module = module_cls(*args, **kwargs)
    if not isinstance(module, nn.Module):
        raise ValueError(
            "Expect `module_cls(*args, **kwargs)` returns an instance of <class nn.Module>, "
            f"but it returns an instance of {type(module)}."
        )
    module.to(device)
    return torch.jit.script(module) if scripted else module


def run_forward(
    module_rref: rpc.RRef[nn.Module],
    device: str,
    is_device_map_set: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls the module; for one that is not on the CPU, moves tensors in and out."""
    module = module_rref.local_value()
    target = torch.device(device)
    if target.type == _CPU.type:
        return module(*args, **kwargs)
    result = module(*move_tensors(args, target), **move_tensors(kwargs, target))
    return result if is_device_map_set else move_tensors(result, _CPU)


def parameter_rrefs(
    module_rref: rpc.RRef[nn.Module], recurse: bool
) -> list[rpc.RRef[nn.Parameter]]:
    """References to the module's parameters."""
    return [rpc.RRef(parameter) for parameter in module_rref.local_value().parameters(recurse)]


def set_training(module_rref: rpc.RRef[nn.Module], mode: bool) -> None:
    """Puts the module into training or evaluation mode."""
    module_rref.local_value().train(mode)


def read_state(
    module_rref: rpc.RRef[nn.Module], prefix: str, is_device_map_set: bool
) -> dict[str, Any]:
    """The module's state, without graphs; on the CPU if there is no device map to the caller."""
    state: dict[str, Any] = module_rref.local_value().state_dict(prefix=prefix)
    return state if is_device_map_set else dict(move_tensors(dict(state), _CPU))


def load_state(
    module_rref: rpc.RRef[nn.Module], state: Mapping[str, Any], strict: bool, assign: bool
) -> tuple[list[str], list[str]]:
    """Copies a state into the module; returns the names that are missing and unexpected."""
    mismatch = module_rref.local_value().load_state_dict(state, strict, assign)
    return list(mismatch.missing_keys), list(mismatch.unexpected_keys)


def convert(
    module_rref: rpc.RRef[nn.Module],
    device: str | None,
    dtype: torch.dtype | None,
    non_blocking: bool,
    memory_format: torch.memory_format | None,
) -> None:
    """Moves the module to a device, or gives its tensors another dtype or memory format."""
    options: dict[str, Any] = {"device": device, "dtype": dtype, "non_blocking": non_blocking}
    if memory_format is not None:
        options["memory_format"] = memory_format
    module_rref.local_value().to(**options)


def set_requires_grad(module_rref: rpc.RRef[nn.Module], requires_grad: bool) -> None:
    """Says whether autograd records operations on the module's parameters."""
    module_rref.local_value().requires_grad_(requires_grad)
