"""``DistributedOptimizer``: one local optimizer per owner of parameters, stepped together.

Decides who makes and steps what, and checks the arguments. What a step does at
an owner is in ``local_optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

import autograd_dist
import rpc
from autograd_dist.contexts import entered
from optim_dist.failures import from_each, from_one
from optim_dist.local_optimizer import LocalOptimizer, name_of, require_usable
from optim_dist.state import StateAcrossOwners
from rpc.extend import call_method, import_remedy


class DistributedOptimizer(StateAcrossOwners):
    """Optimizes parameters wherever they live.

    At construction every worker that owns some of the parameters makes its own
    ``optimizer_class`` for them. A step runs all of them at the same time, each
    with the gradients that its worker has in the given autograd context. Steps
    may be made by several trainers and in several contexts at once: on each
    worker those that share an optimizer or a parameter run one at a time. No
    order is promised between them, nor that gradients belong to the latest values
    of the parameters.

    Gradients never pass through the parameters' own ``.grad``, which stays what local
    training made of it, even while that goes on in another thread: the local optimizers
    are given stand-ins in the same memory. An optimizer's hooks run in the middle of a step,
    and must not wait for other steps, or backward passes, of its parameters on that worker.

    Without ``lr``, ``SGD`` takes 0.01 and ``Adamax`` 0.001, as in the original, and every other
    class its own.

    Args:
        optimizer_class: a subclass of ``torch.optim.Optimizer``, or whatever else makes
            something with a ``step()`` when it is called with parameters, ``args`` and
            ``kwargs``; not one whose ``step`` needs a closure, as that of ``LBFGS``.
        params_rref: references to the parameters, owned by any number of workers; with
            none, a step does nothing.
        args: further positional arguments for ``optimizer_class``.
        kwargs: keyword arguments for it, such as ``lr``.

    Attributes:
        remote_optimizers: references to the local optimizers, one per owner.
        is_functional_optim: always False; kept for programs that look at it.

    Raises:
        TypeError: ``optimizer_class``, what it made, or a member of ``params_rref`` is
            something else.
        ValueError: the optimizer needs a closure.
        Exception: what ``optimizer_class`` raised at an owner, which the text names.

    Example::

        optimizer = DistributedOptimizer(torch.optim.SGD, [weight, bias], lr=0.05)
        with autograd_dist.context() as context_id:
            loss = forward(batch)
            autograd_dist.backward(context_id, [loss])
            optimizer.step(context_id)
    """

    is_functional_optim = False

    def __init__(
        self,
        optimizer_class: Callable[..., Any],
        params_rref: Iterable[rpc.RRef[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        require_usable(optimizer_class)
        if not args:
            kwargs = _defaults_of(optimizer_class) | kwargs
        self._name = name_of(optimizer_class)
        by_owner, positions = _by_owner(params_rref)
        self._positions = [positions[owner] for owner in by_owner]
        self.remote_optimizers: list[rpc.RRef[OwnersOptimizer]] = from_each(
            f"making the optimizer {self._name}",
            by_owner,
            lambda owner: rpc.rpc_async(
                owner, _make_local_optimizer, (optimizer_class, by_owner[owner], args, kwargs)
            ),
        )

    def step(self, context_id: int) -> None:
        """Steps every local optimizer with its worker's gradients; returns when all have.

        Args:
            context_id: of the autograd context that the backward pass ran in.

        Raises:
            RuntimeError: there is no such context.
            Exception: of the type that the first owner to fail raised; the text
                names every owner that failed. The others have stepped.
        """
        autograd_dist.get_gradients(context_id)
        if self._groups is not None:
            self._send_groups()
        what = f"the step of {self._name}"
        with entered(context_id):  # owners that it has not reached must learn of it
            if len(self.remote_optimizers) == 1:
                (only,) = self.remote_optimizers
                args = only, _STEP, context_id
                from_one(what, only.owner(), lambda to: rpc.rpc_sync(to, call_method, args))
                return
            optimizers = {optimizer.owner(): optimizer for optimizer in self.remote_optimizers}
            from_each(
                what,
                optimizers,
                lambda to: rpc.rpc_async(to, call_method, (optimizers[to], _STEP, context_id)),
            )


def _defaults_of(optimizer_class: object) -> dict[str, Any]:
    """What the original, which steps with functions of its own, takes where torch.optim differs."""
    if optimizer_class is torch.optim.SGD:
        return {"lr": 1e-2}
    return {"lr": 1e-3} if optimizer_class is torch.optim.Adamax else {}


def _by_owner(
    params_rref: Iterable[rpc.RRef[Any]],
) -> tuple[dict[rpc.WorkerInfo, list[rpc.RRef[Any]]], dict[rpc.WorkerInfo, list[int]]]:
    """The references of each owner, and their positions among all."""
    if isinstance(params_rref, (rpc.RRef, torch.Tensor)):
        raise TypeError(
            f"params_rref must be a list of RRefs, but got one {type(params_rref).__name__}"
        )
    if not isinstance(params_rref, Iterable):
        raise TypeError(f"params_rref must be a list of RRefs, but got {params_rref!r}")
    by_owner: dict[rpc.WorkerInfo, list[rpc.RRef[Any]]] = {}
    positions: dict[rpc.WorkerInfo, list[int]] = {}
    for position, rref in enumerate(params_rref):
        if not isinstance(rref, rpc.RRef):
            raise TypeError(
                f"params_rref[{position}] must be an RRef to a parameter, but is of type "
                f"{type(rref).__name__}{import_remedy(rref)}"
            )
        owner = rref.owner()
        by_owner.setdefault(owner, []).append(rref)
        positions.setdefault(owner, []).append(position)
    return by_owner, positions


# At the owners


class OwnersOptimizer(LocalOptimizer):
    """A local optimizer whose gradients are its worker's in an autograd context."""

    def step(self, context_id: int) -> None:
        """Steps with the gradients of a context that exists here."""
        self.step_with(autograd_dist.get_gradients(context_id))


_STEP: Final = OwnersOptimizer.step.__name__


def _make_local_optimizer(
    optimizer_class: Callable[..., Any],
    parameters: Sequence[rpc.RRef[Any]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> rpc.RRef[OwnersOptimizer]:
    values = [rref.local_value() for rref in parameters]
    fields = autograd_dist.grad_fields()
    return rpc.RRef(OwnersOptimizer(optimizer_class, values, args, kwargs, fields))
