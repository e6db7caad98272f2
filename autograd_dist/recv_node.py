"""The autograd node through which received tensors enter the local graph.

It knows which message the tensors came in and, during a distributed backward,
hands their gradients to the run that executes it. It never sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from autograd_dist.engine_run import current_run

# What the types of torch call it differs between releases; a node is a node.
Node = Any


class Origin(NamedTuple):
    """The message in which tensors arrived: where their gradients go.

    Attributes:
        context_id: the autograd context the message was sent in.
        sender: worker id of the sender.
        message_id: the sender's number for this message, unique in the context.
    """

    context_id: int
    sender: int
    message_id: int


class Receive(torch.autograd.Function):
    """Has the tensors of one message as outputs and nothing real as input."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, origin: Origin, tensors: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Turns freshly received tensors into outputs of this node."""
        ctx.materialize_grads = False
        ctx.origin = origin
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None]:
        """Hands the gradients to the distributed backward that executes the node."""
        run = current_run()
        if run is None:
            refuse_plain_backward(ctx.origin)
        run.received_gradients(ctx.origin, gradients)
        return None, None, None


with torch.inference_mode(False):  # the import may happen in anybody's
    _ANCHOR = torch.empty((), device="cpu")
"""Memory for the anchors of all nodes, which nothing reads or writes."""

_apply: Any = super(torch.autograd.Function, Receive).apply
"""The rest of ``apply`` when no ``torch.func`` is at work, for which it looks far and wide."""

RecvNode: Any = Receive._backward_cls
"""The type of the autograd nodes that `attach_recv` makes."""
# Called by the engine; torch's own looks for what this class does not have, and calls that.
RecvNode.apply = Receive.backward
# What graphs and profiles show; programs look for torch's name.
RecvNode.__name__ = "torch::distributed::autograd::RecvRpcBackward"


def refuse_plain_backward(origin: Origin) -> NoReturn:
    """Says that a run that is no part of a pass came to a received tensor.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "backward() reached a tensor that was received from worker "
        f"{origin.sender} inside autograd context {origin.context_id}; a local backward cannot "
        "cross workers. Use autograd_dist.backward(context_id, [loss]) instead."
    )


def attach_recv(origin: Origin, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes received tensors part of the local autograd graph.

    Args:
        origin: the message they came in.
        tensors: what arrived, floating point or complex, in the sender's order.

    Returns:
        The tensors, each requiring grad, with one common node behind them.
    """
    plain = list(map(_detached, tensors))
    # Each message has its own anchor: a shared one would tie all recv nodes
    # together wherever the engine works out which nodes lead where.
    anchor = _ANCHOR.detach().requires_grad_()
    apply = Receive.apply if torch._C._are_functorch_transforms_active() else _apply
    if torch.is_grad_enabled():  # as mostly; the block runs three functions of Python
        return list(apply(anchor, origin, plain))
    with torch.enable_grad():
        return list(apply(anchor, origin, plain))


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is neither a leaf of a graph nor a view.

    torch refuses to modify in place a view that a custom function returned.
    """
    if type(tensor) is torch.Tensor and not (tensor._is_view() or tensor.requires_grad):
        return tensor
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.layout is not torch.strided:
        return plain
    alias = torch.empty(0, dtype=plain.dtype, device=plain.device)
    return alias.set_(plain.untyped_storage(), plain.storage_offset(), plain.size(), plain.stride())


def origin_of(node: Node) -> Origin:
    """The message behind a recv node."""
    origin: Origin = node.origin
    return origin
