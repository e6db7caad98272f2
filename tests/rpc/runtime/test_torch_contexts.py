"""Torch's own autograd contexts, which know nothing of our calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch.distributed.autograd

from rpc.runtime import torch_contexts


@pytest.fixture(autouse=True)
def _in_use() -> Iterator[None]:
    torch_contexts.use()
    yield
    torch_contexts.stop_using()


def enter() -> None:
    with (
        contextlib.suppress(RuntimeError),  # torch refuses where its own autograd was not begun
        torch.distributed.autograd.context(),
    ):
        pass


def test_one_that_is_entered_by_mistake_says_so() -> None:
    with pytest.warns(UserWarning, match="use autograd_dist.context()"):
        enter()


def test_afterwards_torch_is_as_it_was() -> None:
    torch_contexts.stop_using()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enter()
