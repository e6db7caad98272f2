"""Finds the leaves whose gradients torch itself must accumulate.

Reading a leaf's gradient off the engine is enough unless something hangs on the
accumulation: a post-accumulate hook, a hook on the AccumulateGrad node, a reducer
such as DistributedDataParallel's, or a hook on several tensors, which must see them
all in one run, and refuses one that reads leaves. This module finds that out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed

from autograd_dist.border import Hook, users_hooks
from autograd_dist.recv_node import Node

_world = torch.distributed.distributed_c10d._world if torch.distributed.is_available() else None
"""State that ``torch.distributed.is_initialized()`` looks at through three functions."""


def accumulation_is_observed(leaves: Sequence[Node]) -> bool:
    """True if anything would notice that torch did not accumulate these leaves' gradients."""
    if _world is not None and _world.default_pg is not None:
        # There is a process group, so that DistributedDataParallel may hang on the nodes from
        # C++, out of sight.
        return True
    for leaf in leaves:
        variable = leaf.variable
        if variable._post_accumulate_grad_hooks:
            return True
        hooks = variable._backward_hooks
        if hooks and any(map(_is_of_several, users_hooks(hooks))):
            return True
        # A node's hooks are seen only from the handle of a new one.
        for register in (leaf.register_hook, leaf.register_prehook):
            handle = register(_do_nothing)
            hooks_of_node = handle.hooks_dict_ref()
            hooks_of_node.pop(handle.id, None)
            if hooks_of_node:
                return True
    return False


def _is_of_several(hook: Hook) -> bool:
    """True if ``torch.autograd.graph.register_multi_grad_hook`` made a tensor's hook."""
    return getattr(hook, "__module__", None) == torch.autograd.graph.__name__


def _do_nothing(*_: object) -> None:
    return None
