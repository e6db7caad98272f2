"""One small program for each reason why a test of torch's need not pass: it shows the reason.

``torch_suite/exemptions.py`` names them. Each runs here in one process; what ours does
better is tested where it is made, and named there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import autograd_dist
import rpc
from remote_module import RemoteModule
from rpc.agent import Agent
from rpc.testing import as_worker, local_group

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch.distributed.autograd as torch_autograd
    import torch.distributed.rpc as torch_rpc

    @torch.jit.script
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    @torch.jit.script
    def fetch(reference: torch_rpc.RRef[torch.Tensor]) -> torch.Tensor:
        return reference.to_here()

    @torch.jit.script
    def call_inside(to: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch_rpc.rpc_sync(to, double, (tensor,))

    @torch.jit.script
    def gradients_inside(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
        return torch_autograd.get_gradients(context_id)


@pytest.fixture
def group() -> Iterator[list[Agent]]:
    with local_group("here", "there") as agents, as_worker(agents[0]):
        yield agents


def test_shutdown_has_other_steps_and_there_is_no_private_server_profiler() -> None:
    assert hasattr(torch_rpc.api, "_broadcast_to_followers")
    assert not hasattr(rpc.api, "_broadcast_to_followers")
    assert not hasattr(rpc, "_server_process_global_profile")


def test_torchscript_does_not_take_our_references_but_takes_their_values(
    group: list[Agent],
) -> None:
    reference = rpc.remote("there", torch.ones, (2,))
    with pytest.raises(RuntimeError, match=r"fetch\(\)|RRef"):
        fetch(reference)
    assert rpc.rpc_sync("there", double, (reference.to_here(),)).tolist() == [2, 2]


def test_calls_inside_torchscript_go_to_torchs_own_agent(group: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match=r"[Aa]gent"):
        call_inside("there", torch.ones(1))
    assert rpc.rpc_sync("there", double, (torch.ones(1),)).item() == 2


def test_torchscript_looks_for_contexts_in_torchs_own_table(group: list[Agent]) -> None:
    with autograd_dist.context() as context, pytest.raises(RuntimeError):
        gradients_inside(context)


def test_a_remote_module_refuses_what_torchs_does_but_five_methods(group: list[Agent]) -> None:
    from torch.distributed.nn.api.remote_module import _RemoteModule as TorchsRemoteModule

    ours = RemoteModule("there", torch.nn.Linear, (2, 2))
    work = {"state_dict", "load_state_dict", "to", "half", "requires_grad_"}
    refused = set()
    for name, method in vars(TorchsRemoteModule).items():
        code = getattr(method, "__code__", None)
        if code is not None and "_raise_not_supported" in code.co_names:
            if name in work:
                continue
            refused.add(name)
            with pytest.raises(ValueError, match=f"Method ``{name}`` not supported"):
                getattr(ours, name)()
    assert len(refused) > 20
    assert ours.half().to(torch.float64).requires_grad_(False).state_dict()["bias"].shape == (2,)
