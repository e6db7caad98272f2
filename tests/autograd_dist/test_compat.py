"""The original's private names: contexts without a block, and counters as text."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import autograd_dist
import rpc
from rpc.agent import Agent
from rpc.testing import as_worker, local_group


@pytest.fixture
def alice() -> Iterator[Agent]:
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        yield alice


def test_a_context_without_a_block_is_current_until_it_is_released(alice: Agent):
    context = autograd_dist._new_context()
    context_id = context._context_id()
    assert autograd_dist._current_context() is context
    assert autograd_dist._is_valid_context(context_id)
    autograd_dist._release_context(context_id)
    assert not autograd_dist._is_valid_context(context_id)
    with pytest.raises(RuntimeError, match="doesn't have a valid autograd context"):
        autograd_dist._current_context()


def test_a_context_without_a_block_takes_gradients(alice: Agent):
    context_id = autograd_dist._new_context()._context_id()
    x = torch.ones(2, requires_grad=True)
    loss = rpc.rpc_sync("bob", torch.mul, (x, 3)).sum()
    autograd_dist.backward(context_id, [loss])
    assert autograd_dist.get_gradients(context_id)[x].tolist() == [3, 3]
    autograd_dist._release_context(context_id)


def test_releasing_twice_is_an_error(alice: Agent):
    context_id = autograd_dist._new_context()._context_id()
    autograd_dist._release_context(context_id)
    with pytest.raises(
        RuntimeError, match=f"Could not find autograd context with id: {context_id}"
    ):
        autograd_dist._release_context(context_id)


def test_contexts_do_not_nest(alice: Agent):
    context_id = autograd_dist._new_context()._context_id()
    with pytest.raises(RuntimeError, match="Already have an autograd context id"):
        autograd_dist._new_context()
    autograd_dist._release_context(context_id)


def test_the_highest_id_still_names_its_worker():
    with local_group("alice", "bob") as (_, bob), as_worker(bob):
        assert autograd_dist._get_max_id() == (1 << 48) + 281474976710655


def test_counters_are_text(alice: Agent):
    none = {"num_autograd_contexts": "0", "num_current_backward_passes": "0"}
    assert autograd_dist._get_debug_info() == none
    with autograd_dist.context():
        assert autograd_dist._get_debug_info() == {**none, "num_autograd_contexts": "1"}


def test_init_checks_whose_worker_it_is(alice: Agent):
    autograd_dist._init(0)
    with pytest.raises(RuntimeError, match="id is 0, not 3"):
        autograd_dist._init(3)


def test_a_context_shows_what_was_sent_and_received_in_it(alice: Agent):
    with autograd_dist.context():
        x = torch.ones(2, requires_grad=True)
        plain = rpc.rpc_sync("bob", torch.mul, (torch.ones(2), 3))
        context = autograd_dist._current_context()
        assert (context._send_functions(), context._recv_functions()) == ({}, {})
        y = rpc.rpc_sync("bob", torch.mul, (x, plain))
        (sent,) = context._send_functions().values()
        assert sent.next_functions[0][0].variable is x
        assert list(context._recv_functions().values()) == [y.grad_fn]


def test_looking_at_a_context_keeps_no_graph_alive(alice: Agent):
    with autograd_dist.context():
        x = torch.ones(2, requires_grad=True)
        y = rpc.rpc_sync("bob", torch.mul, (x, 3))
        del y
        gc.collect()
        assert autograd_dist._current_context()._recv_functions() == {}
