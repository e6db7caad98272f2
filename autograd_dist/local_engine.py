"""One backward pass on one worker: turns arriving gradients into departing ones.

It decides which part of the local graph may run and lets torch's own engine run
it. It knows sends and recv nodes but no other worker: who sends the gradients it
hands out, and when a pass ends, is decided in ``passes``.

Theory of operation. Gradients wait on graph edges as *contributions*. A node is
*blocked* while a send whose gradient is still to come leads to it. A *wave* runs
every node that contributions reach and that is not blocked. Where it borders on
blocked nodes, the contributions that cross the border are noted and wait, summed,
for a later wave; so each node runs once, on its whole gradient. With no send to
wait for, which is the common case, one wave is one plain engine run.

Noting what crosses the border needs the border nodes to be inputs of the engine
run, and the engine runs an input that leads to another input. Where one border
node leads to another, the wave is therefore *replayed*: it only computes the
gradients that leave the worker and the finished leaves, keeps its contributions,
and what it could not finish is computed again in a later wave: hooks and functions
on the way to both run twice. Leaves, and what tensors retain, get a gradient once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from autograd_dist.border import Border, SentTensor
from autograd_dist.engine_run import running
from autograd_dist.gradients import LeafGradients, own_all
from autograd_dist.graph import (
    Edge,
    Region,
    any_reaches_another,
    explore,
    leading_to,
    recv_edges_behind,
    successors,
)
from autograd_dist.leaf_hooks import accumulation_is_observed
from autograd_dist.recv_node import Node, Origin, origin_of
from autograd_dist.retained import retained_is_kept_on_the_way

DeliverGradients = Callable[[Origin, list[torch.Tensor | None], bool], None]
"""Of which message, its gradients, and whether the wave will complete no other's."""


class LocalPass:
    """The local share of one distributed backward pass. Not thread-safe.

    Args:
        sends: for each message of the context sent from here, the edges of its tensors.
        leaves: where gradients of leaves are accumulated.
        deliver: called, while the engine runs, with each received message whose
            gradients are complete.
        grad_fields: lock held while leaves' ``.grad`` is borrowed.
        retain_graph: whether the graph must survive the pass.
        context_id: the context; recv nodes of another one are an error.
    """

    def __init__(
        self,
        context_id: int,
        sends: Mapping[int, Sequence[SentTensor]],
        leaves: LeafGradients,
        deliver: DeliverGradients,
        grad_fields: AbstractContextManager[object],
        *,
        retain_graph: bool,
    ) -> None:
        self._context_id = context_id
        self._sends = dict(sends)
        self._waiting = set(sends)
        self._blockers = _Blockers()
        self._sent_at: dict[Node, list[SentTensor]] = {}
        self._leaves = leaves
        self._deliver = deliver
        self._grad_fields = grad_fields
        self._retain_graph = retain_graph
        self._contributions: dict[Edge, _Sum] = {}
        # Nodes of Python functions die with the C++ graph; the edges given to us own it.
        self._owned_edges: list[GradientEdge] = []
        self._delivered: set[Origin] = set()
        self._to_deliver = 0
        self._finished_leaves: set[Node] = set()
        self._has_replayed = False

    @property
    def is_stuck(self) -> bool:
        """Whether gradients wait here for the gradient of some send."""
        return bool(self._contributions)

    @property
    def waiting_sends(self) -> frozenset[int]:
        """Messages sent from here whose gradient is not known yet."""
        return frozenset(self._waiting)

    def add_roots(self, edges: Iterable[GradientEdge], gradients: Iterable[torch.Tensor]) -> None:
        """Starts the pass here: gradients of the roots themselves."""
        for edge, gradient in zip(edges, gradients, strict=True):
            self._contribute(edge, gradient)

    def add_gradients(self, message_id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The gradients of a message sent from here arrived; None for a tensor without one.

        They may have come by way of another device than that of the tensor.

        Raises:
            RuntimeError: if the message is not waiting for gradients.
        """
        sent = self._answer(message_id)
        for tensor, gradient in zip(sent, gradients, strict=True):
            if gradient is not None:
                if gradient.device != tensor.device:
                    gradient = gradient.to(tensor.device)
                self._contribute(tensor.edge, gradient)

    def resolve_without_gradient(self, message_id: int) -> None:
        """No gradient will come for a message sent from here: its output went unused."""
        self._answer(message_id)

    def run_wave(self) -> None:
        """Runs everything that the gradients known so far allow."""
        is_blocked = self._blocked_predicate()
        start = dict(self._contributions)
        if is_blocked is not None:
            start = {key: waiting for key, waiting in start.items() if not is_blocked(key[0])}
        if not start:
            return
        region = explore([node for node, _ in start], is_blocked)
        region.recvs = [node for node in region.recvs if self._is_undelivered(node)]
        region.leaves = [leaf for leaf in region.leaves if leaf not in self._finished_leaves]
        self._to_deliver = len(region.recvs)
        if not accumulation_is_observed(region.leaves):
            self._run_reading_leaves(start, region, held_leaves=[])
        elif self._waiting:
            held, region.leaves = region.leaves, []
            self._run_reading_leaves(start, region, held_leaves=held)
        else:
            self._run_accumulating(start, region)

    def reach_of_stuck(self) -> dict[Origin, set[int]]:
        """Received messages that the gradients stuck here lead to, and which of their tensors."""
        return self._received_behind(self._contributions)

    def reach_of_send(self, message_id: int, positions: Iterable[int]) -> dict[Origin, set[int]]:
        """The same for gradients of some of the tensors of a message sent from here."""
        edges = [self._sends[message_id][p].edge for p in positions]
        return self._received_behind((edge.node, edge.output_nr) for edge in edges)

    def received_gradients(self, origin: Origin, gradients: Sequence[torch.Tensor | None]) -> None:
        """Called by recv nodes as the engine executes them."""
        if origin not in self._delivered:
            self._delivered.add(origin)
            self._to_deliver -= 1
            self._deliver(origin, list(gradients), not self._to_deliver)

    def _contribute(self, edge: GradientEdge, gradient: torch.Tensor) -> None:
        self._owned_edges.append(edge)
        self._contributions.setdefault((edge.node, edge.output_nr), _Sum()).add(gradient)

    def _answer(self, message_id: int) -> Sequence[SentTensor]:
        if message_id not in self._waiting:
            raise RuntimeError(
                f"message {message_id} of autograd context {self._context_id} does not wait for "
                "gradients in this pass: it was answered before, or never sent from here"
            )
        self._waiting.discard(message_id)
        sent = self._sends[message_id]
        self._blockers.remove(sent)
        return sent

    def _blocked_predicate(self) -> Callable[[Node], bool] | None:
        """Tells which nodes are blocked; None if no node is."""
        if not self._waiting:
            return None
        self._blockers.ensure(self._sends[message_id] for message_id in self._waiting)
        return self._blockers.block

    def _is_undelivered(self, recv: Node) -> bool:
        origin = origin_of(recv)
        if origin.context_id != self._context_id:
            raise RuntimeError(
                f"the graph contains a tensor received in autograd context {origin.context_id}, "
                f"but the backward pass runs in context {self._context_id}"
            )
        return origin not in self._delivered

    def _received_behind(self, edges: Iterable[Edge]) -> dict[Origin, set[int]]:
        received: dict[Origin, set[int]] = {}
        for node, position in recv_edges_behind(edges):
            if self._is_undelivered(node):
                received.setdefault(origin_of(node), set()).add(position)
        return received

    def _run_reading_leaves(
        self, start: _Contributions, region: Region, held_leaves: list[Node]
    ) -> None:
        border_nodes = {*region.stops, *held_leaves}
        if not border_nodes:
            for key in start:
                del self._contributions[key]
            self._read(start, region, (), self._retain_graph)
            return
        if any_reaches_another(border_nodes):
            self._replay(start, region, border_nodes)
            return
        roots = {key: waiting for key, waiting in start.items() if key[0] not in border_nodes}
        for key in roots:
            del self._contributions[key]
        border = Border(self, border_nodes, self._sent_from(border_nodes))
        with border.watched(region.inner):
            self._read(roots, region, border_nodes, self._retain_graph)
        for key, gradient in border.crossed:
            self._contributions.setdefault(key, _Sum()).add(gradient)

    def _sent_from(self, nodes: Iterable[Node]) -> list[SentTensor]:
        """The tensors of sent messages whose gradients enter at some nodes."""
        if not self._sent_at:
            for tensor in chain.from_iterable(self._sends.values()):
                self._sent_at.setdefault(tensor.edge.node, []).append(tensor)
        return [tensor for node in nodes for tensor in self._sent_at.get(node, ())]

    def _replay(self, start: _Contributions, region: Region, border: set[Node]) -> None:
        # Only gradients that leave the worker are progress worth computing twice for.
        if not region.recvs:
            return
        self._has_replayed = True
        with retained_is_kept_on_the_way(self, leading_to(border, region.inner)):
            self._read(start, region, (), retain_graph=True)

    def _read(
        self, roots: _Contributions, region: Region, border: Iterable[Node], retain_graph: bool
    ) -> None:
        inputs = _ends_of(region)
        inputs += [GradientEdge(node, 0) for node in border]
        if not (inputs and roots):
            return
        with running(self):
            captured: list[torch.Tensor | None] = list(
                # torch.autograd.grad itself spends tens of microseconds on checks.
                Variable._execution_engine.run_backward(
                    tuple([GradientEdge(*key) for key in roots]),
                    tuple([waiting.total for waiting in roots.values()]),
                    retain_graph,
                    False,  # no graph of this run
                    tuple(inputs),
                    allow_unreachable=True,
                    accumulate_grad=False,
                )
            )
        del captured[len(region.leaves) :]
        self._finish_recvs(region)
        self._finished_leaves.update(region.leaves)
        for leaf, gradient in own_all([node.variable for node in region.leaves], captured):
            self._leaves.add(leaf, gradient)

    def _run_accumulating(self, start: _Contributions, region: Region) -> None:
        variables = [leaf.variable for leaf in region.leaves]
        with self._grad_fields, _BorrowedGrads(variables) as borrowed, running(self):
            torch.autograd.backward(
                [GradientEdge(*key) for key in start],
                [waiting.total for waiting in start.values()],
                retain_graph=self._retain_graph,
                # What leads only to leaves and messages that are finished has run.
                inputs=_ends_of(region) if self._has_replayed else None,
            )
            gradients = borrowed.take()
        self._contributions.clear()
        self._finish_recvs(region)
        for leaf, gradient in own_all(variables, gradients):
            self._leaves.add(leaf, gradient)

    def _finish_recvs(self, region: Region) -> None:
        for recv in region.recvs:
            self.received_gradients(origin_of(recv), [None] * len(recv._input_metadata))


class _Sum:
    """Gradients waiting on one edge, added up as they come."""

    __slots__ = ("_is_ours", "_total")

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None
        self._is_ours = False

    @property
    def total(self) -> torch.Tensor:
        assert self._total is not None
        return self._total

    def add(self, gradient: torch.Tensor) -> None:
        if self._total is None:
            self._total = gradient
            return
        with torch.no_grad():
            if self._is_ours and self._total.layout is torch.strided:
                self._total.add_(gradient)
            elif self._total.layout is torch.strided:
                self._total = self._total + gradient
            else:
                self._total = gradient + self._total
        self._is_ours = True


_Contributions = Mapping[Edge, _Sum]


class _Blockers:
    """Knows which nodes unanswered sends lead to.

    Counts, for each node, the tensors that enter there and the edges from nodes that are
    blocked themselves. A node whose count comes to nothing is free, and no more blocks others.
    """

    def __init__(self) -> None:
        self._count: Counter[Node] | None = None

    def ensure(self, sends: Iterable[Sequence[SentTensor]]) -> None:
        """Counts once, when something has to wait for the first time."""
        if self._count is not None:
            return
        entries = [tensor.edge.node for sent in sends for tensor in sent]
        self._count = Counter(entries)
        for node in explore(entries).inner:
            self._count.update(successors(node))

    def block(self, node: Node) -> bool:
        return self._count is not None and node in self._count

    def remove(self, sent: Sequence[SentTensor]) -> None:
        if self._count is None:
            return
        stack = [tensor.edge.node for tensor in sent]
        while stack:
            node = stack.pop()
            self._count[node] -= 1
            if not self._count[node]:
                del self._count[node]
                stack.extend(successors(node))


class _BorrowedGrads:
    """Leaves with their ``.grad`` set aside, put back whatever happens."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._leaves = leaves
        self._set_aside: list[torch.Tensor | None] = []

    def __enter__(self) -> _BorrowedGrads:
        self._set_aside = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        return self

    def take(self) -> list[torch.Tensor | None]:
        """What accumulated in the meantime."""
        taken = [leaf.grad for leaf in self._leaves]
        for leaf in self._leaves:
            leaf.grad = None
        return taken

    def __exit__(self, *_: object) -> None:
        for leaf, gradient in zip(self._leaves, self._set_aside, strict=True):
            leaf.grad = gradient


def _ends_of(region: Region) -> list[GradientEdge]:
    """The inputs that make the engine compute what a region's leaves and recv nodes get."""
    ends = [GradientEdge(leaf, 0) for leaf in region.leaves]
    return ends + [_anchor_of(recv) for recv in region.recvs]


def _anchor_of(recv: Node) -> GradientEdge:
    # As an input, the anchor makes the engine execute the recv node.
    return GradientEdge(*recv.next_functions[0])
