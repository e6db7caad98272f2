"""A backward pass in two parts: first the gradients of the inputs, later those of the weights.

Zero-bubble schedules need this: other stages wait for the first part only. The graph is cut
at the nodes through which gradients pass on their way to the inputs and from which some also
go to weights: the first part keeps the gradient that arrives at each of these nodes, the
second continues from there to the weights. Both parts compute what the whole pass would, from
the same numbers, so the gradients are the same to the last bit.

Where a weight is used again on the way from another use to the inputs, the parts cannot be told
apart, and a Python function computes all its gradients at once. Such a graph is not split: the
first part does everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from tensorwire.pipeline.arrival import ARRIVED_NODE

_LeafNode: Final[type] = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
Gradients: TypeAlias = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A node where gradients for inputs and for weights part, and those weights.

    Args:
        edges: the node, once for each of its gradient inputs that are in use.
        leaves: the leaf tensors that are reached from it without passing another cut.
    """

    edges: list[GradientEdge]
    leaves: list[torch.Tensor]


class SplitBackward:
    """The backward pass from some outputs, in two parts.

    Args:
        outputs: where gradients come in.
        inputs: leaf tensors whose gradients others wait for.
    """

    def __init__(self, outputs: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]) -> None:
        self._outputs = list(outputs)
        self._inputs = list(inputs)
        self._cuts = _find_cuts(self._outputs, self._inputs)
        self._kept: list[tuple[_Cut, Gradients]] = []

    @property
    def is_split(self) -> bool:
        """False if the first part does everything."""
        return self._cuts is not None

    def for_inputs(self, gradients: Gradients) -> Gradients:
        """Runs the first part; returns the gradients of the inputs."""
        if self._cuts is None:
            return run_backward(self._outputs, self._inputs, gradients)
        roots, root_gradients = _with_gradient(self._outputs, gradients)
        if not self._inputs:
            return self._keep_all(roots, root_gradients)
        ends: list[Any] = [*self._inputs, *(edge for cut in self._cuts for edge in cut.edges)]
        computed = torch.autograd.grad(
            roots, ends, root_gradients, retain_graph=True, allow_unused=True
        )
        at = len(self._inputs)
        for cut in self._cuts:
            self._kept.append((cut, computed[at : at + len(cut.edges)]))
            at += len(cut.edges)
        return computed[: len(self._inputs)]

    def for_weights(self) -> None:
        """Runs the second part, which adds to the weights' ``grad``; the graph is used up."""
        for cut, gradients in self._kept:
            roots, root_gradients = _with_gradient(cut.edges, gradients)
            if roots:
                torch.autograd.backward(roots, root_gradients, inputs=cut.leaves)
        self._kept.clear()

    def _keep_all(self, roots: list[GradientEdge], gradients: Gradients) -> Gradients:
        leaves = _leaves_below(edge.node for edge in roots)
        if leaves:
            self._kept.append((_Cut(roots, leaves), gradients))
        return ()


def run_backward(
    outputs: Sequence[GradientEdge], inputs: Sequence[torch.Tensor], gradients: Gradients
) -> Gradients:
    """Runs a whole backward pass, which adds to the weights' ``grad``.

    Args:
        outputs: where gradients come in.
        inputs: leaf tensors; their ``grad`` is returned and cleared.
        gradients: one for each output; None where there is none.
    """
    roots, root_gradients = _with_gradient(outputs, gradients)
    if roots:
        torch.autograd.backward(roots, root_gradients)
    results = [each.grad for each in inputs]
    for each in inputs:
        each.grad = None
    return results


def _with_gradient(
    edges: Sequence[GradientEdge], gradients: Gradients
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if g is not None]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _find_cuts(
    outputs: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]
) -> list[_Cut] | None:
    """The nodes at which the pass is cut; None if it cannot be."""
    order = _in_order(edge.node for edge in outputs)
    if any(map(_is_of_python, order)):
        return None
    ends = {get_gradient_edge(each).node for each in inputs}
    used = _used_inputs(order, outputs)
    on_the_way = set(ends)  # to the inputs
    cuts = []
    for node in order:  # what a node leads to comes before it
        following = [each for each, _ in node.next_functions if each is not None]
        if not on_the_way.isdisjoint(following):
            on_the_way.add(node)
            leaves = _leaves_below(each for each in following if each not in on_the_way)
            cuts.append(_Cut([_edge(node, number) for number in sorted(used[node])], leaves))
    for node in {edge.node for edge in outputs} - on_the_way:
        edges = [_edge(node, number) for number in sorted(used[node])]
        cuts.append(_Cut(edges, _leaves_below([node])))
    return _merge([cut for cut in reversed(cuts) if cut.leaves])


def _is_of_python(node: Node) -> bool:
    is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
    return is_function and not isinstance(node, ARRIVED_NODE)


def _used_inputs(order: list[Node], outputs: Sequence[GradientEdge]) -> dict[Node, set[int]]:
    """The gradient inputs at which each node gets something."""
    used: dict[Node, set[int]] = {}
    for edge in outputs:
        used.setdefault(edge.node, set()).add(edge.output_nr)
    for node in order:
        for following, number in node.next_functions:
            if following is not None:
                used.setdefault(following, set()).add(number)
    return used


def _merge(cuts: list[_Cut]) -> list[_Cut] | None:
    """Joins cuts that lead to the same weights; None if one of these lies behind another."""
    merged: list[_Cut] = []
    of_leaf: dict[int, _Cut] = {}
    for cut in cuts:
        others = {
            id(of_leaf[id(leaf)]): of_leaf[id(leaf)] for leaf in cut.leaves if id(leaf) in of_leaf
        }
        for other in others.values():
            if _is_behind(cut, other):
                return None
            merged.remove(other)
            leaves = {id(leaf): leaf for leaf in [*other.leaves, *cut.leaves]}
            cut = _Cut([*other.edges, *cut.edges], list(leaves.values()))
        merged.append(cut)
        of_leaf.update((id(leaf), cut) for leaf in cut.leaves)
    return merged


def _is_behind(later: _Cut, earlier: _Cut) -> bool:
    """Says whether gradients pass some node of ``earlier`` on their way to one of ``later``."""
    behind = _in_order(
        following
        for edge in earlier.edges
        for following, _ in edge.node.next_functions
        if following is not None
    )
    return not {edge.node for edge in later.edges}.isdisjoint(behind)


def _edge(node: Node, number: int) -> GradientEdge:
    extra: tuple[Any, ...] = (None,) * (len(GradientEdge._fields) - 2)
    return GradientEdge(node, number, *extra)


def _in_order(start: Iterable[Node]) -> list[Node]:
    """All nodes below some, each after those that it leads to."""
    order: list[Node] = []
    entered: set[Node] = set()
    stack = [(node, False) for node in start]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack.extend((each, False) for each, _ in node.next_functions if each is not None)
    return order


def _leaves_below(start: Iterable[Node]) -> list[torch.Tensor]:
    return [node.variable for node in _in_order(start) if type(node) is _LeafNode]  # type: ignore[attr-defined]
