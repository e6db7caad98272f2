"""Leaf gradients on CUDA devices, whatever streams they are made and read on."""

from __future__ import annotations

import torch

from autograd_dist.gradients import LeafGradients
from tests.fake_streams import Gpus, gpus

__all__ = ["gpus"]


def test_a_gradient_is_ready_on_the_stream_of_who_reads_it(gpus: Gpus) -> None:
    leaves, leaf = LeafGradients(), torch.ones(2, requires_grad=True)
    with gpus.side_stream():
        leaves.add_all([(leaf, gpus.tensor())])
    with gpus.side_stream():
        assert gpus.is_usable(leaves.snapshot()[leaf])


def test_what_is_added_to_a_gradient_waits_for_it(gpus: Gpus) -> None:
    leaves, leaf = LeafGradients(), torch.ones(2, requires_grad=True)
    with gpus.side_stream():
        first = gpus.tensor()
        leaves.add_all([(leaf, first)])
    with gpus.side_stream():
        assert not gpus.is_usable(first)
        leaves.add_all([(leaf, torch.full((2,), 2.0))])
        assert gpus.is_usable(first)
    assert leaves.snapshot()[leaf].tolist() == [3.0, 3.0]
