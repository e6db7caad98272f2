"""One owner's share of a distributed optimizer: a ``torch.optim`` optimizer and its step.

Decides how gradients that are not in ``.grad`` reach an optimizer that looks
only there. It knows neither RPC nor autograd contexts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autograd_dist.borrowed_grads import BorrowedGrads
from autograd_dist.grad_fields import GradFields
from optim_dist.shadows import Shadows


class LocalOptimizer:
    """An optimizer that is stepped with gradients from elsewhere.

    What it optimizes are stand-ins for the parameters (:mod:`shadows`); parameters that are added
    to it later have their own ``.grad`` set aside during a step.

    Args:
        optimizer_class: makes it; what it makes has a ``step()`` that looks at ``.grad``.
        parameters: what it optimizes.
        args: its further positional arguments.
        kwargs: its keyword arguments.
        grad_fields: of this worker; a step uses those of its parameters.

    Raises:
        TypeError: what was made has no ``step()``.
        ValueError: a parameter cannot be stepped here. One of a kind of its own says so by a method
            ``why_not_stepped_here``, which returns the sentence, or None.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Any],
        parameters: Sequence[torch.Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        grad_fields: GradFields,
    ) -> None:
        _require_steppable(parameters)
        self._shadows = Shadows(parameters)
        self.optim = optimizer_class(self._shadows.tensors, *args, **kwargs)
        if not callable(getattr(self.optim, "step", None)):
            made = f"{name_of(optimizer_class)} made {self.optim!r}"
            raise TypeError(f"{made}, which has no step(): an optimizer is needed")
        self._grad_fields = grad_fields

    def step_with(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Steps the optimizer; parameters without a gradient stay as they are.

        Args:
            gradients: by parameter; those of other tensors are ignored.
        """
        shadows, others = self._shadows, self._others()
        # Spans the optimizer's code because that is what it is for: nobody else may step with
        # these parameters, or this optimizer's state, in the meantime.
        with self._grad_fields.used([*shadows.parameters, *others]), BorrowedGrads(others):
            try:
                shadows.begin(gradients)
                for parameter in others:
                    parameter.grad = gradients.get(parameter)
                self.optim.step()
            finally:
                shadows.end()

    def read_state(self) -> dict[int, Any]:
        """The state that the optimizer keeps for each parameter, by the parameter's place.

        Raises:
            TypeError: it is no optimizer of ``torch.optim``, and keeps nothing that can be read.
        """
        places = {id(each): place for place, each in enumerate(self._shadows.tensors)}
        state = self._torchs().state
        return {places[id(each)]: dict(kept) for each, kept in state.items() if id(each) in places}

    def shapes(self) -> dict[int, torch.Size]:
        """The shape of each parameter, by its place."""
        return {place: each.shape for place, each in enumerate(self._shadows.tensors)}

    def write_state(self, state: Mapping[int, Any]) -> None:
        """Replaces what the optimizer keeps.

        Raises:
            TypeError: it is no optimizer of ``torch.optim``.
        """
        optim = self._torchs()
        document = optim.state_dict()
        ordered = [each for group in optim.param_groups for each in group["params"]]
        numbers = {id(each): number for number, each in enumerate(ordered)}
        tensors = self._shadows.tensors
        document["state"] = {numbers[id(tensors[at])]: dict(each) for at, each in state.items()}
        with self._grad_fields.used(self._shadows.parameters):
            optim.load_state_dict(document)

    def read_groups(self) -> list[dict[str, Any]]:
        """The hyperparameters of each group, and the places of its parameters.

        Raises:
            TypeError: it is no optimizer of ``torch.optim``.
        """
        places = {id(each): place for place, each in enumerate(self._shadows.tensors)}
        return [
            {**group, "params": [places[id(p)] for p in group["params"] if id(p) in places]}
            for group in self._torchs().param_groups
        ]

    def zero_grad(self, set_to_none: bool) -> None:
        """Clears the parameters' own ``.grad``."""
        parameters = [*self._shadows.parameters, *self._others()]
        with self._grad_fields.used(parameters):
            for parameter in parameters:
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def _torchs(self) -> torch.optim.Optimizer:
        if not isinstance(self.optim, torch.optim.Optimizer):
            raise TypeError(f"{self.optim!r} is no torch.optim.Optimizer: it has no known state")
        return self.optim

    def __getstate__(self) -> dict[str, Any]:
        """Makes a copy to look at, such as for the ``state_dict()`` of its ``optim``."""
        return {"optim": self.optim}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.optim = state["optim"]
        self._shadows, self._grad_fields = Shadows(()), GradFields()

    def _others(self) -> list[torch.Tensor]:
        """The tensors that it optimizes without a stand-in, such as those added to it later."""
        groups = getattr(self.optim, "param_groups", ({"params": self._shadows.tensors},))
        return self._shadows.without(groups)


def require_usable(optimizer_class: object) -> None:
    """Checks that what makes optimizers can be used by a distributed one.

    Raises:
        TypeError: it makes none.
        ValueError: it is a class whose ``step`` insists on a closure.
    """
    is_class = isinstance(optimizer_class, type)
    if not callable(getattr(optimizer_class, "step", None) if is_class else optimizer_class):
        raise TypeError(
            "optimizer_class must be a subclass of torch.optim.Optimizer or another callable "
            f"that makes what has a step(), but got {optimizer_class!r}"
        )
    if is_class:
        _require_no_closure(optimizer_class)


def _require_steppable(parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        ask = getattr(type(parameter), "why_not_stepped_here", None)
        if ask is not None and (reason := ask(parameter)) is not None:
            raise ValueError(reason)


def name_of(optimizer_class: object) -> str:
    """The name of an optimizer's class in errors."""
    return getattr(optimizer_class, "__name__", None) or repr(optimizer_class)


def _require_no_closure(optimizer_class: Any) -> None:
    parameters = inspect.signature(optimizer_class.step).parameters.values()
    needed = [p.name for p in [*parameters][1:] if p.default is p.empty and p.kind not in _VARIADIC]
    if needed:
        raise ValueError(
            f"{optimizer_class.__name__}.step needs {' and '.join(needed)}, to evaluate the loss "
            "again within one step; a distributed optimizer cannot do that, so choose another one"
        )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
