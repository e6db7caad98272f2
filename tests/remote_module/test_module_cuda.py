"""A remote module on a GPU that is called with, and answers with, tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from rpc.testing import as_worker, local_group

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class Devices(nn.Module):
    """Says where its inputs are, and returns them."""

    def forward(self, tensor: torch.Tensor, **others: Any) -> Any:
        return str(tensor.device), {name: str(t.device) for name, t in others.items()}, [tensor]


def device_of(module: rpc.RRef[nn.Module]) -> str:
    return str(next(module.local_value().parameters()).device)


@pytest.fixture(autouse=True)
def _worker() -> Iterator[None]:
    with local_group("here", "there") as agents, as_worker(agents[0]):
        yield


@pytest.mark.parametrize("place", ["there/cuda:0", "rank:1/cuda:0"])
def test_the_module_is_made_on_its_device(place: str) -> None:
    module = RemoteModule(place, nn.Linear, (2, 2))
    assert rpc.rpc_sync("there", device_of, (module.module_rref,)) == "cuda:0"


def test_inputs_move_to_the_device_and_results_back() -> None:
    module = RemoteModule("there/cuda:0", Devices)
    first, others, (returned,) = module(torch.ones(1), word=torch.ones(2))
    assert (first, others) == ("cuda:0", {"word": "cuda:0"})
    assert returned.device.type == "cpu"
    assert module.forward_async(torch.ones(1)).wait()[2][0].device.type == "cpu"


def test_a_device_that_does_not_exist_is_reported_at_the_first_call() -> None:
    module = RemoteModule("there/cuda:100", nn.Linear, (2, 2))
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        module(torch.ones(1, 2))
