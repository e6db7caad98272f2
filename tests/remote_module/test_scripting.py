"""A remote module compiled with TorchScript: its methods, errors, gradients and lifetime."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import autograd_dist
import rpc
from remote_module import RemoteModule, _RemoteModule
from remote_module.scripting import scriptable_class
from rpc.agent import Agent
from rpc.testing import as_worker, local_group

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Scaling:
    def forward(self, tensor: torch.Tensor, factor: int = 3) -> tuple[torch.Tensor, int]:
        pass


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, tensor: torch.Tensor, factor: int = 3) -> tuple[torch.Tensor, int]:
        if factor == 0:
            raise ValueError("nothing would be left")
        return self.weight * tensor * factor, factor


class Uses(nn.Module):
    """Has a remote module, and is compiled with it."""

    def __init__(self, remote: nn.Module) -> None:
        super().__init__()
        self.remote = remote

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        first = self.remote.forward_async(tensor, 2)
        scaled, factor = self.remote.forward(tensor)
        waited, two = torch.jit.wait(first)
        return scaled + waited + factor * two


class NoForward:
    pass


class Variable:
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        raise AssertionError


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    with local_group("here", "there") as group, as_worker(group[0]):
        yield group


@pytest.fixture
def remote(agents: list[Agent]) -> _RemoteModule:
    made = _RemoteModule("there", Scale, _module_interface_cls=torch.jit.interface(Scaling))
    made.get_module_rref()._get_future().wait()  # it is compiled there; not two at once in here
    return made


def test_a_compiled_handle_calls_the_module_with_its_defaults(remote: _RemoteModule) -> None:
    scripted = torch.jit.script(remote)
    tensor, factor = scripted(torch.ones(2))
    assert (tensor.tolist(), factor) == ([3, 3], 3)
    tensor, factor = scripted.forward_async(torch.ones(2), 5).wait()
    assert (tensor.tolist(), factor) == ([5, 5], 5)


def test_torchscript_code_computes_with_what_the_module_returns(remote: _RemoteModule) -> None:
    scripted = torch.jit.script(Uses(remote))
    assert scripted(torch.ones(2)).tolist() == [3 + 2 + 3 * 2] * 2


def test_errors_of_the_module_reach_torchscript(remote: _RemoteModule) -> None:
    scripted = torch.jit.script(remote)
    for call in (scripted.forward, lambda *args: scripted.forward_async(*args).wait()):
        with pytest.raises(RuntimeError, match="nothing would be left"):
            call(torch.ones(2), 0)


def test_gradients_flow_through_a_compiled_handle(remote: _RemoteModule) -> None:
    scripted = torch.jit.script(Uses(remote))
    inputs = torch.ones(2, requires_grad=True)
    with autograd_dist.context() as context:
        autograd_dist.backward(context, [scripted(inputs).sum()])
        assert autograd_dist.get_gradients(context)[inputs].tolist() == [5, 5]


def test_a_compiled_handle_says_where_it_is_and_keeps_the_reference(remote: _RemoteModule) -> None:
    scripted = torch.jit.script(remote)
    assert (scripted.on, scripted.device) == ("there", "cpu")
    assert scripted.module_rref is remote.module_rref


def test_nothing_is_left_of_a_compiled_handle_that_went(remote: _RemoteModule) -> None:
    scripted = torch.jit.script(remote)
    calls = weakref.ref(scripted.calls)
    del scripted
    gc.collect()
    assert calls() is None


def test_a_compiled_handle_is_neither_sent_nor_copied(remote: _RemoteModule) -> None:
    scripted = torch.jit.script(remote)
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not suppor"):
        rpc.rpc_sync("there", type, (scripted,))
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        copy.deepcopy(scripted)


def test_a_handle_without_an_interface_is_not_compiled_and_says_why(agents: list[Agent]) -> None:
    handle = RemoteModule("there", Scale)
    for module in (handle, nn.Sequential(handle)):
        with pytest.raises(RuntimeError, match="only if it was made with its TorchScript inter"):
            torch.jit.script(module)


@pytest.mark.parametrize("interface", [Scale, int, "Scaling"])
def test_what_is_no_interface_is_refused_at_once(agents: list[Agent], interface: object) -> None:
    with pytest.raises(ValueError, match=r"decorated by @torch\.jit\.interface"):
        _RemoteModule("there", Scale, _module_interface_cls=interface)
    module_rref = RemoteModule("there", Scale).get_module_rref()
    with pytest.raises(ValueError, match=r"decorated by @torch\.jit\.interface"):
        RemoteModule.init_from_module_rref("there", module_rref, interface)


def test_an_interface_must_have_a_forward_with_plain_parameters() -> None:
    with pytest.raises(TypeError, match="NoForward has no forward"):
        scriptable_class(NoForward)
    with pytest.raises(TypeError, match="positional parameters only"):
        scriptable_class(Variable)
