"""``DistributedOptimizer``: one local optimizer per owner of parameters, stepped together.

Decides who makes and steps what, and checks the arguments. ``local_optimizer`` has the part of a
step that runs at an owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch

import autograd_dist
import rpc
from autograd_dist.api import backward_with_sequel, sequels
from autograd_dist.contexts import entered
from autograd_dist.sequels import new_name, new_sequel
from optim_dist.failures import from_each, from_one
from optim_dist.local_optimizer import LocalOptimizer, name_of, require_usable
from optim_dist.state import StateAcrossOwners
from remote_module import RemoteModule, backups
from rpc.extend import call_method, import_remedy, is_living, life_of, retell

_SECONDS_TO_TELL: Final = 5.0
"""The seconds that an owner gets to say whether it had stepped, after a pass failed."""


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
        self._sequel_name = new_name()
        self._make = partial(_make_local_optimizer_call, optimizer_class, args, kwargs)
        self._params = _as_list(params_rref)
        by_owner, positions = _by_owner(self._params)
        self._positions = [positions[owner] for owner in by_owner]
        self.remote_optimizers: list[rpc.RRef[OwnersOptimizer]] = from_each(
            f"making the optimizer {self._name}",
            by_owner,
            lambda owner: self._make(owner, by_owner[owner], self._sequel_name),
        )
        self._lives = {owner: life_of(owner) for owner in by_owner}

    def recover(self, modules: Sequence[RemoteModule]) -> None:
        """Goes on with modules that were made again from their backups.

        The local optimizers of lost workers are made anew where the modules are now, with the
        state that they had after the step that the backups have.

        Args:
            modules: on which ``RemoteModule.recover`` was called, in the order in which their
                parameters were given here.

        Raises:
            ValueError: the modules have another number of parameters than were lost, or are on
                a worker that has parameters of this optimizer already.

        Example::

            try:
                optimizer.step(context_id)
            except rpc.WorkerLostError:
                encoder.recover()
                optimizer.recover([encoder])
        """
        gone = [
            at for at, each in enumerate(self._params) if not is_living(self._lives[each.owner()])
        ]
        fresh = [rref for module in modules for rref in module.remote_parameters()]
        if len(gone) != len(fresh):
            raise ValueError(
                f"{len(gone)} parameters of the optimizer were lost, but the modules have "
                f"{len(fresh)}"
            )
        params = list(self._params)
        for at, rref in zip(gone, fresh, strict=True):
            params[at] = rref
        by_owner, positions = _by_owner(params)
        living = {params[own[0]].owner() for own in self._positions if own[0] not in gone}
        made_anew = {params[at].owner() for at in gone}
        if both := living & made_anew:
            raise ValueError(
                f"worker {both.pop().name!r} has parameters of this optimizer already; recover "
                "modules onto workers without any"
            )
        made = from_each(
            f"making the optimizer {self._name} again",
            {owner: by_owner[owner] for owner in by_owner if owner in made_anew},
            lambda owner: self._make(owner, by_owner[owner], self._sequel_name),
        )
        kept = {each.owner(): each for each in [*self.remote_optimizers, *made]}
        self._params = params
        self._lives = {owner: life_of(owner) for owner in by_owner}
        self._positions = [positions[owner] for owner in by_owner]
        self.remote_optimizers = [kept[owner] for owner in by_owner]
        if self._groups is not None:
            self._groups.forget_sent()

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
                step = partial(rpc.rpc_sync, func=call_method, args=(only, _STEP, context_id))
                from_one(what, only.owner(), step)
                return
            optimizers = {optimizer.owner(): optimizer for optimizer in self.remote_optimizers}
            from_each(
                what,
                optimizers,
                lambda to: rpc.rpc_async(to, call_method, (optimizers[to], _STEP, context_id)),
            )

    def backward_and_step(
        self, context_id: int, losses: Sequence[torch.Tensor], retain_graph: bool = False
    ) -> None:
        """Runs the backward pass and steps: ``autograd_dist.backward``, then :meth:`step`.

        Parameters become the same, bit for bit, in one exchange of messages less: an owner
        steps as soon as its own gradients are complete, and answers both at once. Nothing can
        be done between the two, so there is no clipping of gradients; to clip, call
        ``autograd_dist.backward``, ``clip_grad_norm_`` and :meth:`step`.

        Args:
            context_id: of the autograd context that the losses were computed in.
            losses: scalars on this worker, the roots of the backward pass.
            retain_graph: keep the graph, on every worker, for another pass.

        Raises:
            BackwardError: the backward pass or an owner's step failed; the text says on which
                worker, and which owners had stepped. Nothing is undone.
            RuntimeError: a loss is unusable, or there is no such context.
            TypeError: an argument has the wrong type.
            Exception: of the type that the first owner to fail raised whose step came after
                the pass, as :meth:`step` does.

        Example::

            with autograd_dist.context() as context_id:
                optimizer.backward_and_step(context_id, [forward(batch)])
        """
        if self._groups is not None:
            self._send_groups()
        sequel = new_sequel(self._sequel_name)
        try:
            stepped = backward_with_sequel(context_id, losses, retain_graph, sequel)
        except Exception as error:
            raise self._with_names_of_stepped(error, context_id, sequel) from error
        if stepped < len(self.remote_optimizers):
            self._step_the_others(context_id, sequel)
        autograd_dist._retrieve_context(context_id).sequels.append(sequel)

    def _step_the_others(self, context_id: int, sequel: bytes) -> None:
        """Has those owners step that could not know that their gradients were complete."""
        with entered(context_id):
            from_each(
                f"the step of {self._name}",
                [optimizer.owner() for optimizer in self.remote_optimizers],
                lambda to: rpc.rpc_async(to, _step_unless_done, (context_id, sequel)),
            )

    def _with_names_of_stepped(self, error: Exception, context_id: int, sequel: bytes) -> Exception:
        """Returns the same error, which also says which owners had stepped."""
        owners = [optimizer.owner() for optimizer in self.remote_optimizers]
        asked = [(owner, _has_stepped_at(owner, context_id, sequel)) for owner in owners]
        answers = [(owner.name, _answer_of(future)) for owner, future in asked]
        stepped = [name for name, answer in answers if answer is True]
        unknown = [name for name, answer in answers if answer is None]
        told = f"owners that had stepped: {', '.join(stepped) or 'none'}"
        if unknown:
            told += f"; of {', '.join(unknown)} it is not known"
        return retell(error, f"{error} ({told})")


def _has_stepped_at(
    owner: rpc.WorkerInfo, context_id: int, sequel: bytes
) -> rpc.Future[bool] | None:
    try:
        return rpc.rpc_async(owner, _has_stepped, (context_id, sequel), timeout=_SECONDS_TO_TELL)
    except Exception:  # it may be lost, which is what the error is about
        return None


def _answer_of(future: rpc.Future[bool] | None) -> bool | None:
    try:
        return None if future is None else bool(future.wait())
    except Exception:  # as above
        return None


def _defaults_of(optimizer_class: object) -> dict[str, Any]:
    """The original's defaults where torch.optim differs; it steps with functions of its own."""
    if optimizer_class is torch.optim.SGD:
        return {"lr": 1e-2}
    return {"lr": 1e-3} if optimizer_class is torch.optim.Adamax else {}


def _as_list(params_rref: Iterable[rpc.RRef[Any]]) -> Any:
    """The references as a list; what is none is left to :func:`_by_owner` to refuse."""
    is_one = isinstance(params_rref, (rpc.RRef, torch.Tensor))
    return params_rref if is_one or not isinstance(params_rref, Iterable) else list(params_rref)


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
    """A local optimizer whose gradients are its worker's in an autograd context.

    Attributes:
        name: of the distributed optimizer, the same in each life of an owner.
        values: what it optimizes, in order.
    """

    name: bytes = b""
    values: Sequence[torch.Tensor] = ()

    def step(self, context_id: int) -> None:
        """Steps with the gradients of a context that exists here; then backups have the step."""
        self.step_with(autograd_dist.get_gradients(context_id))
        if not backups.is_backed(self.values):
            return
        with self._grad_fields.used(self.values):
            sends = backups.copies_after_step(self.name, self.values, self.read_state)
        for send in sends:
            send()


_STEP: Final = OwnersOptimizer.step.__name__


def _step_unless_done(context_id: int, sequel: bytes) -> None:
    sequels().run(sequel, autograd_dist._retrieve_context(context_id))


def _has_stepped(context_id: int, sequel: bytes) -> bool:
    try:
        context = autograd_dist._retrieve_context(context_id)
    except autograd_dist.UnknownContextError:  # no gradient came here
        return False
    return sequels().has_run(sequel, context)


def _make_local_optimizer_call(
    optimizer_class: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    owner: rpc.WorkerInfo,
    parameters: Sequence[rpc.RRef[Any]],
    sequel_name: bytes,
) -> rpc.Future[rpc.RRef[OwnersOptimizer]]:
    arguments = (optimizer_class, parameters, args, kwargs, sequel_name)
    return rpc.rpc_async(owner, _make_local_optimizer, arguments)


def _make_local_optimizer(
    optimizer_class: Callable[..., Any],
    parameters: Sequence[rpc.RRef[Any]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    sequel_name: bytes,
) -> rpc.RRef[OwnersOptimizer]:
    values = [rref.local_value() for rref in parameters]
    fields = autograd_dist.grad_fields()
    optimizer = OwnersOptimizer(optimizer_class, values, args, kwargs, fields)
    optimizer.name, optimizer.values = sequel_name, values
    if backups.is_backed(values):
        if not isinstance(optimizer.optim, torch.optim.Optimizer):
            raise TypeError(
                "a RemoteModule with a backup needs an optimizer of torch.optim, whose state can "
                f"be copied, but got {optimizer.optim!r}"
            )
        if left := backups.left_by(sequel_name, values):
            optimizer.write_state(left)
    sequels().keep(sequel_name, optimizer)
    return rpc.RRef(optimizer)
