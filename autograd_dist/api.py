"""The module-level functions: check the arguments, find this worker's extension, delegate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed

from autograd_dist.contexts import (
    DistAutogradContext,
    current_context_id,
    current_id,
    make_current,
)
from autograd_dist.errors import UnknownContextError
from autograd_dist.extension import AutogradExtension
from autograd_dist.grad_fields import GradFields
from autograd_dist.sequels import Sequels
from autograd_dist.wire import EXTENSION_NAME
from rpc import extend
from rpc.errors import RpcError

_extension: Callable[[], AutogradExtension] = partial(extend.call_extension, EXTENSION_NAME)


def is_available() -> bool:
    """True if this installation can run distributed autograd."""
    return torch.distributed.is_available()


class context:
    """A ``with`` block whose calls take part in one distributed backward.

    Gives the context's id, which :func:`backward`, :func:`get_gradients` and
    optimizers take. Leaving the block frees the context on every worker.

    Raises:
        RuntimeError: the thread is in a context already, this one is entered and not left
            yet, or RPC is not initialized.

    Example::

        with autograd_dist.context() as context_id:
            loss = rpc.rpc_sync("server", forward, (x,)).sum()
            autograd_dist.backward(context_id, [loss])
    """

    def __enter__(self) -> int:
        extension = _extension()
        if current_context_id() is not None:
            refuse_nested(extension)
        context_id = extension.contexts.create().context_id
        block = (extension, context_id, current_id.set(context_id))
        # In one step, as another thread may enter at the same time.
        known: object = vars(self).setdefault("_block", block)
        if known is not block:
            current_id.reset(block[2])
            extension.release(context_id)
            raise RpcError(
                "this autograd context is entered already; make a context() for each with block"
            )
        return context_id

    def __exit__(self, *_: object) -> None:
        extension, context_id, inside = vars(self).pop("_block")
        try:
            current_id.reset(inside)
        except ValueError:
            pass  # a generator that another thread closes; where it entered, the context is over
        finally:
            extension.release(context_id)


def refuse_nested(extension: AutogradExtension) -> None:
    """Raises if the running code is in a context; takes it out of one that is over.

    It may still be in the context of whoever started it, such as a task that outlives it.

    Raises:
        RpcError: it is.
    """
    context_id = current_context_id()
    if context_id is None:
        return
    if extension.contexts.get(context_id) is not None:
        raise RpcError(
            "Already have an autograd context id for this thread; contexts cannot be nested"
        )
    make_current(None)


def backward(context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool = False) -> None:
    """Runs the backward pass from ``roots`` over every worker that the context reached.

    Gradients add up in the context, on the worker where each leaf lives, and not
    in ``.grad``; read them with :func:`get_gradients`. Outputs of calls that do
    not lead to the roots neither hold up the pass nor change it.

    There is no limit of time: ``rpc_timeout`` does not count. A pass ends with an error when
    a worker that it needs is lost, or the context is left by another thread. In a handler it
    ends when the caller gives the call up, or is lost.

    Args:
        context_id: from :class:`context`.
        roots: scalars on this worker that are results of a computation.
        retain_graph: keep the graph, on every worker, for another pass.

    Raises:
        BackwardError: something failed on the way; the text says on which worker.
        WorkerLostInBackwardError: a worker was lost on the way, whoever noticed it; a
            ``BackwardError`` and an ``rpc.WorkerLostError``.
        CallCancelledError: the caller of the handler that this is called in gave it up.
        BaseException: what a hook on this worker raised and is no ``Exception``, as it is.
        RuntimeError: a root is unusable, or the context does not exist here.
        TypeError: an argument has the wrong type.
    """
    backward_with_sequel(context_id, roots, retain_graph, b"")


def backward_with_sequel(
    context_id: int, roots: Sequence[torch.Tensor], retain_graph: bool, sequel: bytes
) -> int:
    """Runs :func:`backward`; other workers run the sequel when their gradients are complete.

    Returns:
        How many did; see ``sequels``.
    """
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple | Sequence):
        raise TypeError(
            "backward(): incompatible function arguments. Expected (context_id: int, "
            "roots: sequence of tensors, retain_graph: bool = False), but got "
            f"({type(context_id).__name__}, {type(roots).__name__})"
        )
    extension = _extension()
    if extension.contexts.get(context_id) is None:
        raise UnknownContextError(context_id)
    _check_roots(roots)
    return extension.backward(context_id, roots, retain_graph, sequel)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients accumulated in a context for the leaves on this worker.

    Args:
        context_id: from :class:`context`.

    Returns:
        A new dict from each leaf to its gradient, which may be sparse.

    Raises:
        TypeError: the id is no integer.
        UnknownContextError: the context does not exist here.
    """
    if not isinstance(context_id, int):
        raise TypeError(
            "get_gradients(): incompatible function arguments. Expected (context_id: int), but "
            f"got ({type(context_id).__name__})"
        )
    context = _extension().contexts.get(context_id)
    if context is None:
        raise UnknownContextError(context_id)
    return context.leaves.snapshot()


def grad_fields() -> GradFields:
    """The users of the ``.grad`` of leaves on this worker.

    A backward pass borrows ``.grad`` to run post-accumulate hooks; say that you use it
    when putting a context's gradients there, as optimizers do::

        with autograd_dist.grad_fields().used(parameters):
            ...
    """
    return _extension().grad_fields


def sequels() -> Sequels:
    """The actions of this worker when its gradients of a pass are complete."""
    return _extension().sequels


def _check_roots(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        raise RpcError("No tensors provided for gradient computation.")
    for position, root in enumerate(roots):
        if not isinstance(root, torch.Tensor):
            raise TypeError(
                "backward(): incompatible function arguments. "
                f"Root {position} is no tensor but {type(root).__name__}"
            )
        if not root.requires_grad:
            raise RpcError(f"requires_grad not set on root {position}")
        if root.numel() != 1:
            raise RpcError(
                f"root {position} is not a scalar, all roots need to be scalar; it has "
                f"shape {tuple(root.shape)}"
            )
        if root.grad_fn is None:
            raise RpcError(f"root {position} does not have a valid gradient function: it is a leaf")


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return _extension().contexts.find(context_id)


def _current_context() -> DistAutogradContext:
    context_id = current_context_id()
    if context_id is None:
        raise RpcError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with autograd_dist.context() as context_id` to generate a valid context"
        )
    return _retrieve_context(context_id)
