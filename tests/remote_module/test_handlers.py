"""The deeds of a module's owner; ``meta`` stands in for an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rpc
from remote_module.handlers import create_module, run_forward
from rpc.testing import as_worker, local_group


class Looks(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return [str(tensor.device) for tensor in (*args, *kwargs.values())]


class Returns(nn.Module):
    def forward(self, value: Any) -> Any:
        return value


@pytest.fixture(autouse=True)
def _worker() -> Iterator[None]:
    with local_group("owner") as agents, as_worker(agents[0]):
        yield


def run(module: nn.Module, device: str, device_map: bool, *args: Any, **kwargs: Any) -> Any:
    return run_forward(rpc.RRef(module), device, device_map, args, kwargs)


def test_on_the_cpu_nothing_moves() -> None:
    tensor = torch.ones(1)
    assert run(Returns(), "cpu", False, tensor) is tensor
    assert run(Looks(), "cpu", False, tensor, x=torch.ones(1, device="meta")) == ["cpu", "meta"]


@pytest.mark.parametrize("device_map", [False, True])
def test_inputs_move_to_another_device(device_map: bool) -> None:
    seen = run(Looks(), "meta", device_map, torch.ones(1), x=torch.ones(1))
    assert seen == ["meta", "meta"]


def test_results_stay_on_the_device_if_a_device_map_takes_them_on() -> None:
    result = run(Returns(), "meta", True, (torch.ones(1), 3))
    assert (type(result), result[0].device.type, result[1]) == (tuple, "meta", 3)


def test_results_are_moved_to_the_cpu_without_a_device_map() -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        run(Returns(), "meta", False, torch.ones(1))


def test_a_module_is_made_on_its_device() -> None:
    module = create_module(nn.Linear, [2], {"out_features": 3}, "meta", scripted=False)
    assert {p.device.type for p in module.parameters()} == {"meta"}


def test_what_is_no_module_is_refused_with_its_type() -> None:
    with pytest.raises(ValueError, match=r"but it returns an instance of <class 'list'>\.$"):
        create_module(list, (), {}, "cpu", scripted=False)
