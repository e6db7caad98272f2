"""Private names that programs took from ``torch.distributed.autograd``.

Contexts without a ``with`` block, and counters as text. What they do is the
extension's; new programs want :class:`autograd_dist.context`.
"""

from __future__ import annotations

from autograd_dist.api import _extension, refuse_nested
from autograd_dist.contexts import (
    DistAutogradContext,
    current_context_id,
    highest_context_id,
    make_current,
)
from autograd_dist.errors import UnknownContextError
from rpc.errors import RpcError
from rpc.extend import find_worker


def _init(worker_id: int) -> None:
    """Makes this worker ready for contexts, which happens by itself at their first use.

    Raises:
        RuntimeError: RPC is not initialized, or ``worker_id`` is another worker's.
    """
    me = _extension().worker_id
    if worker_id != me:
        raise RpcError(f"this worker's id is {me}, not {worker_id}")


def _new_context() -> DistAutogradContext:
    """Creates a context and makes it the running code's, until :func:`_release_context`.

    Raises:
        RuntimeError: the running code has one already, or RPC is not initialized.
    """
    extension = _extension()
    refuse_nested(extension)
    context = extension.contexts.create()
    make_current(context.context_id)
    return context


def _release_context(context_id: int) -> None:
    """Frees a context on every worker.

    Raises:
        UnknownContextError: it does not exist here.
    """
    extension = _extension()
    extension.contexts.find(context_id)
    if current_context_id() == context_id:
        make_current(None)
    extension.release(context_id)


def _is_valid_context(context_id: int) -> bool:
    """True if the context exists on this worker."""
    try:
        _extension().contexts.find(context_id)
    except UnknownContextError:
        return False
    return True


def _get_max_id() -> int:
    """The highest id that a context of this worker can have."""
    return highest_context_id(_extension().worker_id)


def _get_debug_info() -> dict[str, str]:
    """The numbers of contexts and backward passes on this worker."""
    if find_worker() is None:
        return {}
    return {name: str(count) for name, count in _extension().debug_info().items()}
