"""All hooks on the accumulation of a leaf's gradient are found, and left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

from autograd_dist.leaf_hooks import accumulation_is_observed


def leaf() -> tuple[torch.Tensor, Any]:
    tensor = torch.ones(2, requires_grad=True)
    return tensor, get_gradient_edge(tensor).node


Register = Callable[[torch.Tensor, Any, Callable[..., None]], Any]

OBSERVERS: dict[str, Register] = {
    "a hook after accumulation": lambda x, node, f: x.register_post_accumulate_grad_hook(f),
    "a hook of the node": lambda x, node, f: node.register_hook(f),
    "a hook before the node": lambda x, node, f: node.register_prehook(f),
    "a hook of several tensors": lambda x, node, f: register_multi_grad_hook([x, leaf()[0]], f),
}


@pytest.mark.parametrize("kind", OBSERVERS)
def test_what_observes_accumulation_is_found_until_it_is_removed(kind: str) -> None:
    (plain, plain_node), (x, node) = leaf(), leaf()
    handle = OBSERVERS[kind](x, node, lambda *_: None)
    assert accumulation_is_observed([plain_node, node])
    assert accumulation_is_observed([node])
    handle.remove()
    assert not accumulation_is_observed([node])
    assert not accumulation_is_observed([plain_node])
    assert plain.requires_grad


def test_a_hook_of_the_leaf_alone_does_not_count() -> None:
    x, node = leaf()
    x.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert not accumulation_is_observed([node])


@pytest.mark.parametrize("kind", ["a hook of the node", "a hook before the node"])
def test_hooks_are_called_as_before_after_the_look(kind: str) -> None:
    called: list[str] = []
    x, node = leaf()
    accumulation_is_observed([node])
    OBSERVERS[kind](x, node, lambda *_: called.append("first"))
    accumulation_is_observed([node])
    OBSERVERS[kind](x, node, lambda *_: called.append("second"))
    accumulation_is_observed([node])
    (x * 3).sum().backward()
    assert called == ["first", "second"]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_no_leaves_are_not_observed() -> None:
    assert not accumulation_is_observed([])
