"""Which leaves must have their gradients accumulated by torch itself.

Reading a leaf's gradient off the engine is enough unless something hangs on the
accumulation: a post-accumulate hook, a hook on the AccumulateGrad node, a reducer
such as DistributedDataParallel's, or a hook on several tensors, which must see them
all in one run, and refuses one that reads leaves. This module finds that out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed
from torch.utils.hooks import RemovableHandle

from autograd_dist.border import Hook, users_hooks
from autograd_dist.recv_node import Node


def accumulation_is_observed(leaves: Sequence[Node]) -> bool:
    """Whether anything would notice if torch did not accumulate these leaves' gradients."""
    if not leaves:
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # DistributedDataParallel hangs on the nodes from C++, out of sight.
        return True
    return any(map(_has_accumulation_hooks, leaves))


def _has_accumulation_hooks(leaf: Node) -> bool:
    variable = leaf.variable
    hooks = variable._backward_hooks
    return bool(
        variable._post_accumulate_grad_hooks
        or (hooks and any(map(_is_of_several, users_hooks(hooks))))
        or _has_other_hooks(leaf.register_hook)
        or _has_other_hooks(leaf.register_prehook)
    )


def _is_of_several(hook: Hook) -> bool:
    """Whether ``torch.autograd.graph.register_multi_grad_hook`` made a tensor's hook."""
    return getattr(hook, "__module__", None) == torch.autograd.graph.__name__


def _has_other_hooks(register: Callable[[Callable[..., None]], RemovableHandle]) -> bool:
    """Looks into a node's hooks, which only the handle of a new one gives access to."""
    handle = register(_do_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return bool(hooks)


def _do_nothing(*_: object) -> None:
    return None
