"""Tables and servers' dense parameters in a program that also uses distributed autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autograd_dist
from optim_dist import DistributedOptimizer
from remote_module import RemoteModule
from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import train
from tests.tensorwire.parameter_server.habits import IDS, local_like, on_servers, same_rows


def test_a_step_in_a_context_has_all_gradients_or_is_refused() -> None:
    def go() -> None:
        cluster, model = on_servers()
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=1.0)
        local = local_like(model)
        far = RemoteModule("ps0", nn.Linear, (1, 1), seed=1)
        with autograd_dist.context() as context_id:
            autograd_dist.backward(context_id, [far(model(IDS)).sum()])
            with pytest.raises(RuntimeError, match="parameter 0 of 'model' has no grad, as autogr"):
                optimizer.step()
            for parameter, grad in autograd_dist.get_gradients(context_id).items():
                parameter.grad = grad
            optimizer.step()
        (far.state_dict()["weight"] * local(IDS)).sum().backward()
        torch.optim.SGD(local.parameters(), lr=1.0).step()
        assert same_rows(model, local)
        assert torch.equal(model.top.weight, local.top.weight)

    train([go])


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = on_servers()[1]

    def freeze(self) -> None:
        self.model.rows.requires_grad_(False)


def test_rows_are_refused_by_a_distributed_optimizer_unless_they_are_frozen() -> None:
    def go() -> None:
        stage = RemoteModule("ps0", _Stage)
        with pytest.raises(
            ValueError, match="DistributedOptimizer: the rows of table 'rows' are o"
        ):
            DistributedOptimizer(torch.optim.SGD, stage.remote_parameters(), lr=0.1)
        stage.get_module_rref().rpc_sync().freeze()
        DistributedOptimizer(torch.optim.SGD, stage.remote_parameters(), lr=0.1)

    train([go])
