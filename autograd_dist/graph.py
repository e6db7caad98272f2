"""Reads torch's autograd graph: what leads where. Changes nothing, runs nothing.

Three kinds of node matter to a distributed backward: leaves (where gradients
end), recv nodes (where they leave for another worker) and everything else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autograd_dist.recv_node import Node, RecvNode
from rpc.errors import EncodeError
from rpc.extend import new_tuple

Edge = tuple[Node, int]
"""A node and which of its gradient inputs is meant."""

_LeafNode: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


edges_own_graph: Final = "ownership_token" in GradientEdge._fields
"""True if torch's edges keep the graph alive."""

NO_TOKEN: Final = (None,) if edges_own_graph else ()


def edge_of(tensor: torch.Tensor) -> GradientEdge:
    """The edge of ``get_gradient_edge``, which spends most of its time on what few tensors need.

    Raises:
        EncodeError: a leaf's place can't be found out inside one of torch.func's transforms.
    """
    node: Node = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        if node is None and torch._C._functorch.peek_interpreter_stack() is not None:
            raise EncodeError(
                f"a tensor of shape {tuple(tensor.shape)} that requires grad can't be in a call's "
                "graph inside torch.func.vmap, grad and jvp; make the call outside of these"
            )
        return get_gradient_edge(tensor)
    return new_tuple(GradientEdge, (node, tensor.output_nr, *NO_TOKEN))


def gradient_edges(edges: Iterable[Edge]) -> tuple[GradientEdge, ...]:
    """Edges as torch's engine takes them."""
    made = []
    for edge in edges:
        made.append(new_tuple(GradientEdge, edge + NO_TOKEN))
    return tuple(made)


def is_leaf(node: Node) -> bool:
    """True if gradients that reach the node belong to a leaf tensor."""
    return type(node) is _LeafNode


class Region(NamedTuple):
    """The nodes that gradients can flow through from some edges until they meet a stop.

    Attributes:
        inner: nodes that compute something.
        recvs: recv nodes reached.
        leaves: leaf nodes reached.
        stops: nodes that were reached but must not be entered.
    """

    inner: list[Node]
    recvs: list[Node]
    leaves: list[Node]
    stops: list[Node]


def explore(start: Iterable[Node], must_stop: Callable[[Node], bool] | None = None) -> Region:
    """Sorts every node reachable from ``start``, without passing a stop, by its kind."""
    inner: list[Node] = []
    recvs: list[Node] = []
    leaves: list[Node] = []
    stops: list[Node] = []
    stack = list(dict.fromkeys(start))
    seen = set(stack)
    while stack:
        node = stack.pop()
        kind = type(node)
        if must_stop is not None and must_stop(node):
            stops.append(node)
        elif kind is _LeafNode:
            leaves.append(node)
        elif kind is RecvNode:
            recvs.append(node)
        else:
            inner.append(node)
            for successor, _ in node.next_functions:
                if successor is not None and successor not in seen:
                    seen.add(successor)
                    stack.append(successor)
    region: Region = new_tuple(Region, (inner, recvs, leaves, stops))
    return region


def successors(node: Node) -> list[Node]:
    """The nodes to which gradients go from a node on this worker, once for each edge."""
    if _ends(node):
        return []
    return [successor for successor, _ in node.next_functions if successor is not None]


def leading_to(targets: Iterable[Node], nodes: Iterable[Node]) -> set[Node]:
    """Those of ``nodes`` from which a path through them leads to one of the targets."""
    before: defaultdict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        for successor in successors(node):
            before[successor].append(node)
    ancestors: set[Node] = set()
    stack = list(targets)
    while stack:
        for node in before.get(stack.pop(), ()):
            if node not in ancestors:
                ancestors.add(node)
                stack.append(node)
    return ancestors


def recv_edges_behind(start: Iterable[Edge]) -> set[Edge]:
    """The edges into recv nodes that gradients entering at ``start`` can reach."""
    behind: set[Edge] = set()
    seen: set[Node] = set()
    stack = list(start)
    while stack:
        node, number = stack.pop()
        if type(node) is RecvNode:
            behind.add((node, number))
        elif node not in seen and type(node) is not _LeafNode:
            seen.add(node)
            stack.extend(edge for edge in node.next_functions if edge[0] is not None)
    return behind


def any_reaches_another(nodes: Iterable[Node]) -> bool:
    """True if some path leads from one of the nodes to another of them."""
    targets = set(nodes)
    if len(targets) < 2:
        return False
    seen: set[Node] = set()
    stack = [node for node in targets if not _ends(node)]
    while stack:
        for successor, _ in stack.pop().next_functions:
            if successor in targets:
                return True
            if successor is None or successor in seen:
                continue
            seen.add(successor)
            if not _ends(successor):
                stack.append(successor)
    return False


def _ends(node: Node) -> bool:
    return type(node) is _LeafNode or type(node) is RecvNode
