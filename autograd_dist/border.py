"""The border between the nodes of one engine run and nodes that must wait.

The engine computes a gradient for a border node only if that node is an input
of the run, but what it captures there has been through the hooks of the border
tensor, which must see the whole gradient and not the part of it that this run
brings. So the raw gradients are read off the nodes they come from, and hooks of
border tensors that can be reached (those of leaves and of sent tensors) are kept
quiet for the length of the run, as is what tensors retain. A hook on another
tensor of the border is also called with the part; its result is ignored, and
the whole gradient passes through it later.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from autograd_dist.engine_run import EngineRun, innermost_run
from autograd_dist.graph import Edge, edge_of, edges_own_graph, is_leaf
from autograd_dist.recv_node import Node
from autograd_dist.retained import retained_is_kept

Hook = Callable[[torch.Tensor], torch.Tensor | None]
Hooks = MutableMapping[int, Hook]

_quiet_lock = threading.Lock()
"""Guards which hooks of any tensor are quiet: runs of many passes meet at one tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class SentTensor:
    """A tensor as it was when it was sent: where gradients for it enter the graph.

    Attributes:
        edge: its place in the autograd graph.
        hooks: the tensor's hooks, present and future; of a leaf, its node knows them.
        device: where its gradients have to be.
        owner: keeps the graph alive where an edge does not: of a sparse tensor, and in older
            releases of torch, where not even a node of a Python function does.
    """

    edge: GradientEdge
    hooks: Hooks
    device: torch.device
    owner: torch.Tensor | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> SentTensor:
        """Describes a tensor that requires grad."""
        if torch.is_inference_mode_enabled():  # a leaf's node is found by using the leaf
            with torch.inference_mode(False):
                return cls.of(tensor)
        if tensor.is_leaf and _is_constant(tensor):
            constant = _constant_like(tensor)
            return cls(edge_of(constant), {}, tensor.device, constant)
        if not tensor.is_sparse and (edges_own_graph or tensor.is_leaf):
            return cls(edge_of(tensor), _hooks_of(tensor), tensor.device)
        owner = _user_of(tensor)
        return cls(_edge_behind(owner), _hooks_of(tensor), tensor.device, owner)


def _hooks_of(tensor: torch.Tensor) -> Hooks:
    if tensor.is_leaf:
        return {}
    hooks: Hooks | None = tensor._backward_hooks
    if hooks is not None:
        return hooks
    # Made with a tensor's first hook, and then that of all its hooks to come.
    if type(tensor) is not torch.Tensor:
        tensor.register_hook(_change_nothing).remove()  # type: ignore[no-untyped-call]
        hooks = tensor._backward_hooks
        return {} if hooks is None else hooks
    made = tensor._backward_hooks = OrderedDict()  # what that comes to, without a hook
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]
    return made


def _is_constant(leaf: torch.Tensor) -> bool:
    """True if torch computes with a leaf that requires grad as with one that does not.

    So it is with what was made in inference mode, and with views of what requires grad that were
    made under ``no_grad``.
    """
    return leaf.is_inference() or (leaf._is_view() and _edge_behind(_user_of(leaf)).node is None)


class _Constant(torch.autograd.Function):
    """A node at which gradients end that nobody asked for."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        """A tensor of that shape, of which no memory is used but for one element."""
        return leaf.new_empty((), layout=torch.strided).expand(leaf.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        """Does nothing, as nothing is behind it."""


def _constant_like(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor to whose place gradients may come, and no further."""
    with torch.enable_grad():
        constant: torch.Tensor = _Constant.apply(leaf)  # type: ignore[no-untyped-call]
    return constant


class _User(torch.autograd.Function):
    """Uses a tensor of any layout, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Returns any tensor."""
        return torch.empty((), device="cpu")


def _user_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that keeps the graph alive."""
    with torch.enable_grad():
        user: torch.Tensor = _User.apply(tensor)  # type: ignore[no-untyped-call]
    return user


def _edge_behind(owner: torch.Tensor) -> GradientEdge:
    """The edge by which gradients enter; torch asks for a view, which not all layouts have."""
    user: Node = owner.grad_fn
    return GradientEdge(*user.next_functions[0])


class Border:
    """The border of one engine run.

    Args:
        run: the run; nodes may execute for another one at the same time.
        nodes: the nodes on the far side.
        sent: tensors whose hooks are known, and whose gradients enter at those nodes.
    """

    def __init__(self, run: EngineRun, nodes: set[Node], sent: Iterable[SentTensor]) -> None:
        self._run = run
        self._nodes = nodes
        self._hooks = _hooks_at(nodes, sent) if nodes else []
        self.crossed: list[tuple[Edge, torch.Tensor]] = []

    def watched(self, nodes: Iterable[Node]) -> AbstractContextManager[object]:
        """Notes in ``crossed`` what the given nodes pass over the border inside the block."""
        stack = ExitStack()
        if not self._nodes:
            return stack
        for hooks in self._hooks:
            for key in list(hooks):
                _quieten(hooks, key, self._run)
                stack.callback(_let_speak, hooks, key, self._run)
        stack.enter_context(retained_is_kept(self._run, self._nodes))
        for node in nodes:
            edges = node.next_functions
            if any(successor in self._nodes for successor, _ in edges):
                handle = node.register_hook(partial(self._note, edges))
                stack.callback(handle.remove)
        return stack

    def _note(
        self,
        edges: Sequence[Edge],
        outgoing: Sequence[torch.Tensor | None],
        _: Sequence[torch.Tensor | None],
    ) -> None:
        if innermost_run() is not self._run:
            return
        for (successor, number), gradient in zip(edges, outgoing, strict=False):
            if gradient is not None and successor in self._nodes:
                self.crossed.append(((successor, number), gradient))


def _hooks_at(nodes: set[Node], sent: Iterable[SentTensor]) -> list[Hooks]:
    of_leaves = [node.variable._backward_hooks for node in nodes if is_leaf(node)]
    of_sent = [tensor.hooks for tensor in sent]
    distinct = {id(hooks): hooks for hooks in (*of_leaves, *of_sent) if hooks}
    return list(distinct.values())


class _Quiet:
    """A hook that is not called in some runs, which may overlap in any way.

    Args:
        hook: the user's.
    """

    __slots__ = ("hook", "runs")

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.runs: list[EngineRun] = []

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return None if innermost_run() in self.runs else self.hook(gradient)


def users_hooks(hooks: Hooks) -> list[Hook]:
    """A tensor's hooks as they were registered, though some may be quiet now."""
    return [hook.hook if isinstance(hook, _Quiet) else hook for hook in list(hooks.values())]


def _quieten(hooks: Hooks, key: int, run: EngineRun) -> None:
    with _quiet_lock:
        hook = hooks.get(key)
        if hook is None:  # another thread has removed it
            return
        if not isinstance(hook, _Quiet):
            hook = hooks[key] = _Quiet(hook)
        hook.runs.append(run)


def _let_speak(hooks: Hooks, key: int, run: EngineRun) -> None:
    with _quiet_lock:
        quiet = hooks.get(key)
        if isinstance(quiet, _Quiet):
            quiet.runs.remove(run)
            if not quiet.runs:
                hooks[key] = quiet.hook


def _change_nothing(_: torch.Tensor) -> None:
    return None
