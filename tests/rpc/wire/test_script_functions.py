"""TorchScript functions as targets: what is checked, and where."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc as torch_rpc

import rpc
from rpc.agent import Agent
from rpc.testing import as_worker, local_group
from rpc.wire.script_functions import check_arguments, explained

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @torch.jit.script
    def scale(tensor: torch.Tensor, factor: int = 3) -> torch.Tensor:
        return tensor * factor

    @torch.jit.script
    def _not_a_future() -> torch.Tensor:
        return torch.zeros(2)

    @torch.jit.script
    def _forked(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        return torch.jit.fork(scale, tensor, 2)

    @torch.jit.script
    def calling(tensor: torch.Tensor) -> torch.Tensor:
        return torch_rpc.rpc_sync("there", scale, (tensor,))


not_a_future = rpc.functions.async_execution(_not_a_future)
forked = rpc.functions.async_execution(_forked)

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Doubling(torch.nn.Module):
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


def apply_saved(saved: bytes, tensor: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.jit.load(io.BytesIO(saved))(tensor)
    return result


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    with local_group("here", "there") as group, as_worker(group[0]):
        yield group


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((1, 2, 3), {}, r"scale\(\) expected at most 2 argument\(s\) but received 3 argument"),
        ((1,), {"tensor": 2}, "unexpected argument 'tensor'"),
        ((1,), {"size": 2}, "unexpected argument 'size'"),
        ((), {"factor": 2}, "missing value for argument 'tensor'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        check_arguments(scale, args, kwargs)


def test_arguments_that_fit_are_not(agents: list[Agent]) -> None:
    check_arguments(scale, (1,), {})
    check_arguments(scale, (), {"tensor": 1, "factor": 2})
    assert rpc.remote("there", scale, (torch.ones(1),)).to_here().item() == 3


def test_a_reference_to_what_cannot_be_made_is_refused_at_once(agents: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="expected at most"):
        rpc.remote("there", scale, (1, 2, 3))


def test_an_asynchronous_script_function_must_return_a_future(agents: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="must return an IValue of Future type, but got Tensor"):
        rpc.rpc_sync("there", not_a_future)


def test_what_an_asynchronous_script_function_forks_is_the_result(agents: list[Agent]) -> None:
    assert rpc.rpc_sync("there", forked, (torch.ones(1),)).item() == 2


def test_script_functions_travel_by_qualified_name(agents: list[Agent]) -> None:
    assert rpc.rpc_sync("there", scale, (torch.ones(1), 4)).item() == 4
    assert rpc.rpc_sync("there", lambda: scale).qualified_name == scale.qualified_name


def test_script_modules_travel_as_values_and_as_what_save_wrote(agents: list[Agent]) -> None:
    module = torch.jit.script(Doubling())
    assert rpc.rpc_sync("there", module, (torch.ones(1),)).item() == 2
    assert rpc.rpc_sync("there", lambda m: m, (module,))(torch.ones(1)).item() == 2
    file = io.BytesIO()
    torch.jit.save(module, file)
    saved = file.getvalue()
    assert rpc.rpc_sync("there", apply_saved, (saved, torch.ones(1))).item() == 2


def test_a_function_that_makes_calls_in_torchscript_fails_and_names_the_backend_it_needs(
    agents: list[Agent],
) -> None:
    with pytest.raises(rpc.RpcError, match=r"over TENSORPIPE only.* set RPC_BACKEND=TENSORPIPE"):
        rpc.rpc_sync("there", calling, (torch.ones(2),))
    reference = rpc.remote("there", calling, (torch.ones(2),))
    with pytest.raises(RuntimeError, match=r"set RPC_BACKEND=TENSORPIPE for every worker"):
        reference.to_here()


def test_another_error_of_a_torchscript_function_stays_what_it_is() -> None:
    error = RuntimeError("shape '[3]' is invalid for input of size 2")
    assert explained(error) is error
