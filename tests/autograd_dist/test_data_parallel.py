"""DistributedDataParallel inside a context: its reducer sees whole gradients, once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.futures import Future

import autograd_dist
import rpc
from rpc.testing import as_worker, local_group


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """One for the module, because gloo keeps file descriptors for good."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def square(x):
    return x * x


@pytest.mark.parametrize("as_views", [False, True])
def test_data_parallel_modules_reduce_into_the_context(as_views):
    torch.manual_seed(0)
    reduced = []
    linear = torch.nn.Linear(2, 2)
    reference = copy.deepcopy(linear)
    module = torch.nn.parallel.DistributedDataParallel(linear, gradient_as_bucket_view=as_views)

    def halve(_, bucket):
        reduced.append(bucket.index())
        done = Future()
        done.set_result(bucket.buffer() / 2)
        return done

    module.register_comm_hook(None, halve)
    inputs = torch.randn(3, 2)
    with local_group("alice", "bob") as group, as_worker(group[0]):
        for step in range(3):
            with autograd_dist.context() as context_id:
                hidden = module(inputs)
                y = rpc.rpc_sync("bob", square, (hidden,)) + hidden
                autograd_dist.backward(context_id, [y.sum()])
                gradients = autograd_dist.get_gradients(context_id)
            hidden = reference(inputs)
            expected = torch.autograd.grad(
                (hidden * hidden + hidden).sum(), list(reference.parameters())
            )
            for parameter, gradient in zip(linear.parameters(), expected, strict=True):
                torch.testing.assert_close(gradients[parameter], gradient / 2)
                assert parameter.grad is None
            assert len(reduced) == step + 1
