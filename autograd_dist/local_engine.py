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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, itemgetter

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from autograd_dist.border import Border, SentTensor
from autograd_dist.borrowed_grads import BorrowedGrads
from autograd_dist.engine_run import BEACON, running
from autograd_dist.grad_fields import GradFields, Use
from autograd_dist.gradients import LeafGradients, own_all
from autograd_dist.graph import (
    NO_TOKEN,
    Edge,
    Region,
    any_reaches_another,
    explore,
    gradient_edges,
    leading_to,
    recv_edges_behind,
    successors,
)
from autograd_dist.leaf_hooks import accumulation_is_observed
from autograd_dist.recv_node import Node, Origin, origin_of, refuse_plain_backward
from autograd_dist.retained import retained_is_kept_on_the_way
from rpc.extend import new_tuple

_Contributions = dict[Edge, tuple[torch.Tensor, bool]]
"""By edge, the sum of what waits there, and whether that sum is the pass's own."""

_first_of = itemgetter(0)
_next_functions_of = attrgetter("next_functions")
_variable_of = attrgetter("variable")
_origin_of = attrgetter("origin")

DeliverGradients = Callable[[Origin, list[torch.Tensor | None], bool], None]
"""Of which message, its gradients, and whether the wave will complete no other's."""


class LocalPass:
    """The local share of one distributed backward pass. Not thread-safe.

    Args:
        sends: for each message of the context sent from here, the edges of its tensors.
        leaves: where gradients of leaves are accumulated.
        deliver: called, while the engine runs, with each received message whose
            gradients are complete.
        grad_fields: of this worker.
        retain_graph: whether the graph must survive the pass.
        context_id: the context; recv nodes of another one are an error.

    Attributes:
        contributions: gradients that wait here; after a wave, for the gradient of some send.
    """

    def __init__(
        self,
        context_id: int,
        sends: Mapping[int, Sequence[SentTensor]],
        leaves: LeafGradients,
        deliver: DeliverGradients,
        grad_fields: GradFields,
        *,
        retain_graph: bool,
    ) -> None:
        self._context_id = context_id
        self._sends = dict(sends)
        self._waiting = set(sends)
        self._blockers: _Blockers | None = None
        self._sent_at: dict[Node, list[SentTensor]] = {}
        self._leaves = leaves
        self._deliver = deliver
        self._grad_fields = grad_fields
        self._use: Use | None = None
        self._is_over = False
        self._retain_graph = retain_graph
        self.contributions: _Contributions = {}
        # Nodes of Python functions die with the C++ graph; the edges given to us own it.
        self._owned_edges: list[GradientEdge] = []
        self._awaited: set[Origin] = set()
        self._delivered: set[Origin] = set()
        self._finished_leaves: set[Node] = set()

    @property
    def waiting_sends(self) -> frozenset[int]:
        """Messages sent from here whose gradient is not known yet."""
        return frozenset(self._waiting)

    def add_roots(self, edges: Iterable[GradientEdge], gradients: Iterable[torch.Tensor]) -> None:
        """Starts the pass here: gradients of the roots themselves."""
        for edge, gradient in zip(edges, gradients, strict=True):
            self._owned_edges.append(edge)
            fresh, entry = (edge.node, edge.output_nr), (gradient, False)
            if self.contributions.setdefault(fresh, entry) is not entry:
                self._contribute(fresh, gradient)

    def add_gradients(self, message_id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of a message sent from here; None for a tensor without one.

        They may have come by way of another device than that of the tensor.

        Raises:
            RuntimeError: if the message is not waiting for gradients.
        """
        sent = self._answer(message_id)
        for tensor, gradient in zip(sent, gradients, strict=True):
            if gradient is not None:
                if gradient.device != tensor.device:
                    gradient = gradient.to(tensor.device)
                edge = tensor.edge
                self._owned_edges.append(edge)
                fresh, entry = (edge.node, edge.output_nr), (gradient, False)
                if self.contributions.setdefault(fresh, entry) is not entry:
                    self._contribute(fresh, gradient)

    def resolve_without_gradient(self, message_id: int) -> None:
        """Notes that no gradient comes for a message sent from here: its output went unused."""
        self._answer(message_id)

    def run_wave(self) -> None:
        """Runs everything that the gradients known so far allow."""
        start, is_blocked = dict(self.contributions), None
        if self._waiting:
            is_blocked = self._blocked_predicate()
            start = {edge: known for edge, known in start.items() if not is_blocked(edge[0])}
        if not start:
            return
        region = explore(map(_first_of, start), is_blocked)
        if region.recvs:
            region.recvs[:] = self._undelivered(region.recvs)
            self._awaited = set(map(_origin_of, region.recvs))
        if self._finished_leaves:
            region.leaves[:] = [leaf for leaf in region.leaves if leaf not in self._finished_leaves]
        held: list[Node] = []
        if region.leaves and accumulation_is_observed(region.leaves):
            if not self._waiting:
                self._run_accumulating(start, region)
                return
            held += region.leaves
            region.leaves.clear()
        if region.stops or held:
            self._run_to_border(start, region, {*region.stops, *held})
            return
        for edge in start:
            del self.contributions[edge]
        self._read(start, region, (), self._retain_graph)

    def reach_of_stuck(self) -> dict[Origin, set[int]]:
        """Received messages that the gradients stuck here lead to, and which of their tensors."""
        return self._received_behind(self.contributions)

    def reach_of_send(self, message_id: int, positions: Iterable[int]) -> dict[Origin, set[int]]:
        """The messages and tensors that gradients of a message sent from here lead to."""
        edges = [self._sends[message_id][p].edge for p in positions]
        return self._received_behind((edge.node, edge.output_nr) for edge in edges)

    def received_gradients(self, origin: Origin, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the gradients of a received message; called as the engine executes recv nodes.

        Raises:
            RuntimeError: another run executes them, which a function or hook of this one started.
        """
        if origin not in self._awaited:
            refuse_plain_backward(origin)
        self._awaited.remove(origin)
        self._delivered.add(origin)
        self._deliver(origin, list(gradients), not self._awaited)

    def give_up(self) -> None:
        """Ends the pass: a wave does not wait for leaves that others use.

        May be called from any thread, unlike the rest.
        """
        self._is_over = True
        if self._use is not None:
            self._use.give_up()

    def _contribute(self, edge: Edge, gradient: torch.Tensor) -> None:
        known = self.contributions.get(edge)
        if known is None:
            self.contributions[edge] = gradient, False
        else:
            self.contributions[edge] = _sum(*known, gradient), True

    def _answer(self, message_id: int) -> Sequence[SentTensor]:
        if message_id not in self._waiting:
            raise RuntimeError(
                f"message {message_id} of autograd context {self._context_id} does not wait for "
                "gradients in this pass: it was answered before, or never sent from here"
            )
        self._waiting.discard(message_id)
        sent = self._sends[message_id]
        if self._blockers is not None:
            self._blockers.remove(sent)
        return sent

    def _blocked_predicate(self) -> Callable[[Node], bool]:
        """Tells which nodes are blocked."""
        if self._blockers is None:
            self._blockers = _Blockers([self._sends[message_id] for message_id in self._waiting])
        return self._blockers.block

    def _undelivered(self, recvs: Iterable[Node]) -> list[Node]:
        """Those of some recv nodes whose message has not got its gradients in this pass."""
        undelivered = []
        for recv in recvs:
            origin: Origin = recv.origin
            if origin.context_id != self._context_id:
                raise RuntimeError(
                    "the graph contains a tensor received in autograd context "
                    f"{origin.context_id}, but the backward pass runs in context "
                    f"{self._context_id}"
                )
            if origin not in self._delivered:
                undelivered.append(recv)
        return undelivered

    def _received_behind(self, edges: Iterable[Edge]) -> dict[Origin, set[int]]:
        received: dict[Origin, set[int]] = {}
        edges_behind = recv_edges_behind(edges)
        undelivered = set(self._undelivered({node for node, _ in edges_behind}))
        for node, position in edges_behind:
            if node in undelivered:
                received.setdefault(origin_of(node), set()).add(position)
        return received

    def _run_to_border(
        self, start: _Contributions, region: Region, border_nodes: set[Node]
    ) -> None:
        if any_reaches_another(border_nodes):
            self._replay(start, region, border_nodes)
            return
        roots = {key: waiting for key, waiting in start.items() if key[0] not in border_nodes}
        for key in roots:
            del self.contributions[key]
        border = Border(self, border_nodes, self._sent_from(border_nodes))
        with border.watched(region.inner):
            self._read_watched(roots, region, border_nodes, self._retain_graph)
        for edge, gradient in border.crossed:
            self._contribute(edge, gradient)

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
        with retained_is_kept_on_the_way(self, leading_to(border, region.inner)):
            self._read_watched(start, region, (), retain_graph=True)

    def _read_watched(
        self, roots: _Contributions, region: Region, border: Collection[Node], retain_graph: bool
    ) -> None:
        """Reads a run that must be told from those that hooks and functions start in it."""
        if roots:
            (node, number, *_), gradient = BEACON
            roots = {(node, number): (gradient, False), **roots}
            self._read(roots, region, (*border, node), retain_graph)

    def _read(
        self, roots: _Contributions, region: Region, border: Collection[Node], retain_graph: bool
    ) -> None:
        inputs = _ends_of(region, border)
        if not (inputs and roots):
            return
        run = running(self)
        try:
            captured: list[torch.Tensor | None] = list(
                # torch.autograd.grad itself spends tens of microseconds on checks.
                Variable._execution_engine.run_backward(
                    gradient_edges(roots),
                    tuple(map(_first_of, roots.values())),
                    retain_graph,
                    False,  # no graph of this run
                    inputs,
                    allow_unreachable=True,
                    accumulate_grad=False,
                )
            )
        finally:
            run.end()
        if self._awaited:
            self._finish_recvs(region)
        if region.leaves:
            del captured[len(region.leaves) :]
            self._finished_leaves.update(region.leaves)
            self._leaves.add_all(own_all(map(_variable_of, region.leaves), captured))

    def _run_accumulating(self, start: _Contributions, region: Region) -> None:
        variables = [leaf.variable for leaf in region.leaves]
        used = self._use = self._grad_fields.used(variables)
        if self._is_over:
            used.give_up()
        with used, BorrowedGrads(variables) as borrowed, running(self):
            torch.autograd.backward(
                gradient_edges(start),
                [gradient for gradient, _ in start.values()],
                retain_graph=self._retain_graph,
                # What leads only to leaves and messages that are finished has run, and with
                # inputs torch refuses a checkpoint that would run a backward of its own.
                inputs=_ends_of(region),
            )
            gradients = borrowed.take()
        self.contributions.clear()
        if self._awaited:
            self._finish_recvs(region)
        self._leaves.add_all(own_all(variables, gradients))

    def _finish_recvs(self, region: Region) -> None:
        for recv in region.recvs:
            if recv.origin in self._awaited:
                self.received_gradients(recv.origin, [None] * len(recv._input_metadata))


def _sum(total: torch.Tensor, is_ours: bool, gradient: torch.Tensor) -> torch.Tensor:
    """Adds a gradient to others, in place where their sum is nobody else's."""
    with torch.no_grad():
        if total.layout is not torch.strided:
            return gradient + total
        return total.add_(gradient) if is_ours else total + gradient


class _Blockers:
    """Knows which nodes unanswered sends lead to.

    Counts, for each node, the tensors that enter there and the edges from nodes that are
    blocked themselves. A node whose count comes to nothing is free, and no more blocks others.

    Args:
        sends: the tensors of each message that waits.
    """

    def __init__(self, sends: Iterable[Sequence[SentTensor]]) -> None:
        entries = [tensor.edge.node for sent in sends for tensor in sent]
        self._count = Counter(entries)
        for node in explore(entries).inner:
            self._count.update(successors(node))

    def block(self, node: Node) -> bool:
        return node in self._count

    def remove(self, sent: Sequence[SentTensor]) -> None:
        stack = [tensor.edge.node for tensor in sent]
        while stack:
            node = stack.pop()
            self._count[node] -= 1
            if not self._count[node]:
                del self._count[node]
                stack.extend(successors(node))


def _ends_of(region: Region, border: Iterable[Node] = ()) -> tuple[GradientEdge, ...]:
    """The inputs that make the engine compute what a region's leaves and recv nodes get.

    Those of the border come last.
    """
    # As an input, a recv node's anchor makes the engine execute it.
    anchors = map(_first_of, map(_next_functions_of, region.recvs))
    ends = []
    for edge in (*zip(region.leaves, repeat(0)), *anchors, *zip(border, repeat(0))):
        ends.append(new_tuple(GradientEdge, edge + NO_TOKEN))
    return tuple(ends)
