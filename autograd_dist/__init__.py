"""Distributed autograd: a backward pass that crosses workers.

Owns the public functions; the successor of ``torch.distributed.autograd``.

Example::

    with autograd_dist.context() as context_id:
        hidden = rpc.rpc_sync("server", embed, (words,))
        loss = model(hidden).sum()
        autograd_dist.backward(context_id, [loss])
        gradients = autograd_dist.get_gradients(context_id)
"""

from autograd_dist.api import _current_context as _current_context
from autograd_dist.api import _retrieve_context as _retrieve_context
from autograd_dist.api import backward, context, get_gradients, grad_fields, is_available
from autograd_dist.compat import _get_debug_info as _get_debug_info
from autograd_dist.compat import _get_max_id as _get_max_id
from autograd_dist.compat import _init as _init
from autograd_dist.compat import _is_valid_context as _is_valid_context
from autograd_dist.compat import _new_context as _new_context
from autograd_dist.compat import _release_context as _release_context
from autograd_dist.contexts import DistAutogradContext
from autograd_dist.errors import (
    BackwardError,
    UnknownContextError,
    WorkerLostInBackwardError,
)
from autograd_dist.extension import AutogradExtension

RPC_EXTENSION = AutogradExtension

__all__ = [
    "BackwardError",
    "DistAutogradContext",
    "UnknownContextError",
    "WorkerLostInBackwardError",
    "backward",
    "context",
    "get_gradients",
    "grad_fields",
    "is_available",
]
