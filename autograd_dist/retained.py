"""Retained gradients (``retain_grad``) when a run brings a part of a gradient, or repeats one.

torch adds to a retained gradient whatever reaches the tensor, from C++: after the hooks of
all tensors of the node, before those of the node itself. So a hook like that of a tensor
lets only zeros through, and one of the node, if it executes, puts the gradient back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from autograd_dist.engine_run import EngineRun, innermost_run
from autograd_dist.graph import is_leaf
from autograd_dist.recv_node import Node

_KEY = "tensorwire.autograd_dist.retained"


def retained_is_kept(run: EngineRun, nodes: Iterable[Node]) -> ExitStack:
    """While this is entered, a run adds zeros to what tensors of nodes retain.

    Args:
        run: the run.
        nodes: do not execute, or execute with zeros.
    """
    stack = ExitStack()
    for node in nodes:
        if not is_leaf(node):  # which retains nothing
            screen = _screen_of(node)
            screen.hidden[run] = {}
            stack.callback(screen.hidden.pop, run)
    return stack


def retained_is_kept_on_the_way(run: EngineRun, nodes: Iterable[Node]) -> ExitStack:
    """Does so for nodes that execute with what would have been retained."""
    known = list(nodes)
    stack = retained_is_kept(run, known)
    for node in known:
        if not is_leaf(node):
            stack.callback(node.register_prehook(_screen_of(node).give_back).remove)
    return stack


class _Screen:
    """Stands between the gradients that reach a node and what its tensors retain.

    Attributes:
        hidden: for runs at work, the gradients that reached the node, by their number.
    """

    __slots__ = ("hidden",)

    def __init__(self) -> None:
        self.hidden: dict[EngineRun | None, dict[int, torch.Tensor]] = {}

    def hide(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Called like a hook of a tensor."""
        hidden = self.hidden.get(innermost_run())
        if hidden is None or gradient is None:
            return None
        hidden[number] = gradient
        if gradient.layout is not torch.strided:
            return torch.zeros_like(gradient)
        return gradient.new_zeros(()).expand_as(gradient)

    def give_back(
        self, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Called like a hook of the node, before it executes."""
        hidden = self.hidden.get(innermost_run())
        if not hidden:
            return None
        return tuple(hidden.get(number, each) for number, each in enumerate(gradients))


def _screen_of(node: Node) -> _Screen:
    """The screen of a node, made at the first use: torch never removes such a hook."""
    known: _Screen | None = node.metadata.get(_KEY)
    if known is not None:
        return known
    screen = _Screen()
    for number in range(len(node._input_metadata)):
        likeness = _output_of_a_node(number)
        likeness.register_hook(partial(screen.hide, number))  # type: ignore[no-untyped-call]
        node._register_hook_dict(likeness)
    node.metadata[_KEY] = screen
    return screen


def _output_of_a_node(number: int) -> torch.Tensor:
    """A tensor that is the ``number``-th output of its node, by which torch knows its hooks."""
    with torch.inference_mode(False), torch.enable_grad():
        outputs = torch.zeros(number + 1, device="cpu", requires_grad=True).unbind()
    return outputs[number]
