"""Stand-ins for parameters, with a ``.grad`` that nobody else sees.

torch's engine reads and writes a leaf's ``.grad`` without the interpreter's lock, so that to
set it aside for a while, as a step might, crashes a process in which another thread runs
a local backward pass. An optimizer is therefore given tensors that lie in the memory of
the parameters and count its changes together with them, but have a ``.grad`` of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter


class Shadows:
    """The stand-ins of some parameters.

    Args:
        parameters: what an optimizer is to be made for. Of a kind of their own they stand
            for themselves, as does what torch refuses.

    Attributes:
        tensors: what the optimizer is given instead, in the same order.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        made = {id(each): _Shadow(each) for each in parameters if _can_have_one(each)}
        self.tensors = [made[id(p)].tensor if id(p) in made else p for p in parameters]
        self._by_tensor = {id(shadow.tensor): shadow for shadow in made.values()}

    def parameter_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor stands for; itself if that is nothing else."""
        shadow = self._by_tensor.get(id(tensor))
        return tensor if shadow is None else shadow.parameter

    def without(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that stand for nothing else."""
        return [tensor for tensor in tensors if id(tensor) not in self._by_tensor]

    def follow(self) -> None:
        """Moves them to where the parameters are, as ``.data`` or ``to()`` may have moved these."""
        for shadow in self._by_tensor.values():
            shadow.follow()

    def lead(self) -> None:
        """Ends a step: has the parameters follow what it did, and drops the gradients."""
        for shadow in self._by_tensor.values():
            shadow.lead()


class _Shadow:
    """One stand-in.

    Attributes:
        parameter: what it stands for.
        tensor: it.
    """

    __slots__ = ("_is_counted_apart", "parameter", "tensor")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        tensor = parameter.detach()  # which counts changes together with the parameter
        if isinstance(parameter, Parameter):
            self.tensor: torch.Tensor = Parameter(tensor, parameter.requires_grad)
        else:
            self.tensor = tensor.requires_grad_(parameter.requires_grad)
        self.tensor.__dict__ = parameter.__dict__  # by which some optimizers tell parameters apart
        self._is_counted_apart = False

    def follow(self) -> None:
        parameter, tensor = self.parameter, self.tensor
        if tensor.requires_grad is not parameter.requires_grad:
            tensor.requires_grad_(parameter.requires_grad)
        if not _are_one(parameter, tensor):
            tensor.data = parameter.data
            self._is_counted_apart = True
        grad_dtype = getattr(parameter, "grad_dtype", None)
        if grad_dtype is not getattr(tensor, "grad_dtype", None):
            tensor.grad_dtype = grad_dtype

    def lead(self) -> None:
        parameter, tensor = self.parameter, self.tensor
        was_stepped = tensor.grad is not None
        tensor.grad = None
        if not _are_one(parameter, tensor):  # ``parameter.data = ...``, in its ``step()``
            parameter.data = tensor.data
            self._is_counted_apart = True
        if was_stepped and self._is_counted_apart:
            torch.autograd.graph.increment_version(parameter)


def _can_have_one(parameter: Any) -> bool:
    """Not what torch refuses, nor what tells for itself where its elements are."""
    plain = type(parameter) in (torch.Tensor, Parameter)
    return plain and parameter.is_leaf and parameter.layout is torch.strided


def _are_one(parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether both show the same elements in the same way."""
    if parameter.dtype is not tensor.dtype or parameter.device != tensor.device:
        return False
    return parameter.is_set_to(tensor)
