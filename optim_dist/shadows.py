"""Stand-ins for parameters, with a ``.grad`` that nobody else sees.

torch's engine reads and writes a leaf's ``.grad`` without the interpreter's lock, so that to
set it aside for a while, as a step might, crashes a process in which another thread runs
a local backward pass. An optimizer is therefore given tensors that lie in the memory of
the parameters and count its changes together with them, but have a ``.grad`` of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter


class Shadows:
    """The stand-ins of some parameters.

    Args:
        parameters: what an optimizer is to be made for. Those of a kind of their own stand for
            themselves, as does what torch refuses.

    Attributes:
        parameters: those that something stands for.
        tensors: what the optimizer is given, in the order of the parameters it was made for.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        made = {id(each): _Shadow(each) for each in parameters if _can_have_one(each)}
        self.tensors = [made[id(p)].tensor if id(p) in made else p for p in parameters]
        self._shadows = list(made.values())
        self._ids = {id(shadow.tensor) for shadow in self._shadows}
        self.parameters = [shadow.parameter for shadow in self._shadows]

    def without(self, groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
        """The tensors in an optimizer's groups of parameters that stand for nothing else."""
        others = []
        for group in groups:
            for tensor in group["params"]:
                if id(tensor) not in self._ids:
                    others.append(tensor)
        return others

    def begin(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Begins a step: moves them to where the parameters are by now, and hands out gradients."""
        for shadow in self._shadows:
            shadow.begin(gradients.get(shadow.parameter))

    def end(self) -> None:
        """Ends a step: has the parameters follow what it did, and drops the gradients."""
        for shadow in self._shadows:
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

    def begin(self, gradient: torch.Tensor | None) -> None:
        """Takes a gradient, and moves it to where the parameter is.

        ``.data = ...`` or ``to()`` may have moved that.
        """
        tensor = self.tensor
        if not self._are_one():
            tensor.data = self.parameter.data
            self._is_counted_apart = True
        if gradient is None:
            return
        if gradient.dtype is not tensor.dtype and hasattr(tensor, "grad_dtype"):
            tensor.grad_dtype = self.parameter.grad_dtype  # it may allow that
        tensor.grad = gradient

    def lead(self) -> None:
        """Moves the parameter to where it is: ``.data = ...`` in a ``step()`` may have moved it."""
        tensor = self.tensor
        was_stepped = tensor.grad is not None
        if was_stepped:
            tensor.grad = None
        if not self._are_one():
            self.parameter.data = tensor.data
            self._is_counted_apart = True
        if self._is_counted_apart and was_stepped:
            torch.autograd.graph.increment_version(self.parameter)

    def _are_one(self) -> bool:
        """True if both show the same elements in the same way."""
        parameter, tensor = self.parameter, self.tensor
        try:
            return parameter.is_set_to(tensor) and parameter.dtype is tensor.dtype
        except RuntimeError:  # torch cannot tell, as on the meta device
            return False


def _can_have_one(parameter: Any) -> bool:
    """False for tensors that torch refuses, and for subclasses, which may hide their memory."""
    plain = type(parameter) in (torch.Tensor, Parameter)
    return plain and parameter.is_leaf and parameter.layout is torch.strided
