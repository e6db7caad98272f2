"""Values that programs set, and copies that they make, of models whose parameters servers keep."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
import torch.utils.checkpoint
from torch import Tensor, nn

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import server_names, train
from tests.tensorwire.parameter_server.habits import (
    IDS,
    Model,
    in_a_cluster,
    local_like,
    on_servers,
    same_rows,
)


def _set_clamped(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.data.clamp_(max=0.0).add_(values)


def _set_data(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.data = values.clone()


def _set_by_vector(layer: nn.Linear, values: Tensor) -> None:
    vector = torch.cat([values.flatten(), layer.bias.detach()])
    nn.utils.vector_to_parameters(vector, layer.parameters())


def _set_through_numpy(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.detach().numpy()[:] = values.numpy()


def _set_storage(layer: nn.Linear, values: Tensor) -> None:
    with torch.no_grad():
        layer.weight.set_(values.clone())


def _set_by_foreach(layer: nn.Linear, values: Tensor) -> None:
    torch._foreach_copy_([layer.weight.data], [values])


def _set_one_element(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.data[:, :3] = values[:, :3]
    layer.weight.data[0, 3] = values[0, 3]


def _set_by_state(layer: nn.Linear, values: Tensor) -> None:
    layer.load_state_dict({"weight": values, "bias": layer.bias.detach()})


def _set_by_init(layer: nn.Linear, values: Tensor) -> None:
    nn.init.constant_(layer.weight, float(values[0, 0]))


_SETTERS = [
    _set_clamped,
    _set_data,
    _set_by_vector,
    _set_through_numpy,
    _set_storage,
    _set_by_foreach,
    _set_one_element,
    _set_by_state,
    _set_by_init,
]


@pytest.mark.parametrize("pushing", ps.Pushing)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_that_are_set_here_in_any_way_are_set_at_the_servers(
    pushing: ps.Pushing, dtype: torch.dtype
) -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        layer = nn.Linear(4, 1, bias=True, dtype=dtype)
        view = layer.weight.data  # taken before anybody knows of servers
        optimizer = ps.Optimizer(cluster, layer, torch.optim.SGD, lr=1.0, pushing=pushing)
        x = torch.ones(1, 4, dtype=dtype)

        def stepped() -> Tensor:
            optimizer.zero_grad()
            layer(x).sum().backward()
            optimizer.step()
            return layer.weight.detach()

        stepped()
        view.copy_(torch.full((1, 4), 8.0))
        assert torch.equal(stepped(), torch.full((1, 4), 7.0, dtype=dtype))
        for setter in _SETTERS:
            if setter is _set_through_numpy and dtype is torch.bfloat16:
                continue  # NumPy has no such numbers
            layer.weight.data.zero_()
            values = torch.full((1, 4), 5.0, dtype=dtype)
            setter(layer, values)
            assert torch.equal(stepped(), values - 1), setter
        layer.weight.data.neg_()
        assert torch.equal(stepped(), torch.full((1, 4), -5.0, dtype=dtype))

    train([go])


@in_a_cluster
def test_a_model_that_changes_its_dtype_under_its_optimizer_is_refused() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
    model.double()
    with pytest.raises(
        ValueError, match=r"parameter 0 of 'model' became torch.float64 .* keep torch"
    ):
        optimizer.step()
    assert cluster.step == 0


# --- copies


@in_a_cluster
def test_a_copy_reads_the_same_rows_and_is_frozen_by_itself() -> None:
    cluster, model = on_servers()
    optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
    target = copy.deepcopy(model).requires_grad_(False)
    assert torch.equal(target(IDS), model(IDS))
    assert model.rows.rows.requires_grad
    for _ in range(2):
        optimizer.zero_grad()
        (model(IDS) - target(IDS).detach() - 1).square().sum().backward()
        optimizer.step()
    assert torch.equal(target.rows(IDS), model.rows(IDS))
    assert not torch.equal(target.top.weight, model.top.weight)


def _through_pickle(model: Model) -> Any:
    return pickle.loads(pickle.dumps(model))


def _through_save(model: Model) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _through_pickle, _through_save])
def test_a_model_that_was_copied_or_pickled_trains_the_same_rows(copied: Any) -> None:
    def go() -> None:
        cluster, model = on_servers()
        model.again = model.rows
        other = copied(model)
        assert other.again is other.rows
        assert other.rows.table is model.rows.table
        assert len(list(other.parameters())) == len(list(model.parameters()))
        optimizer = ps.Optimizer(cluster, other, torch.optim.SGD, lr=0.1)
        local = local_like(other)
        plain = torch.optim.SGD([{"params": local.rows.parameters(), "lr": 1.0},
                                 {"params": local.top.parameters()}], lr=0.1)  # fmt: skip
        for each, step in ((other, optimizer), (local, plain)):
            each(IDS).sum().backward()
            step.step()
        assert same_rows(other, local)
        assert torch.equal(other.top.weight, local.top.weight)

    train([go])


def test_what_was_pickled_says_which_cluster_it_needs() -> None:
    pickled = []

    def go() -> None:
        pickled.append(pickle.dumps(on_servers()[1]))

    def load() -> None:
        with pytest.raises(ps.ParameterServerError, match=r"call ps.connect\(..., name='default'"):
            pickle.loads(pickled[0])
        on_servers()
        assert pickle.loads(pickled[0])(IDS).shape == (3, 1)

    train([go])
    train([load])


@pytest.mark.parametrize(
    "averaging",
    [
        {},
        {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)},
        {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.9), "use_buffers": True},
    ],
    ids=["mean", "ema", "ema with buffers"],
)
def test_averaged_models_average_dense_parameters_and_read_rows_as_they_are(averaging: Any) -> None:
    def go() -> None:
        cluster, model = on_servers()
        optimizer = ps.Optimizer(cluster, model, torch.optim.SGD, lr=0.1)
        local = local_like(model)
        plain = torch.optim.SGD([{"params": local.rows.parameters(), "lr": 1.0},
                                 {"params": local.top.parameters()}], lr=0.1)  # fmt: skip
        average, wanted = (
            torch.optim.swa_utils.AveragedModel(each, **averaging) for each in (model, local)
        )
        for _ in range(3):
            for each, step, kept in ((model, optimizer, average), (local, plain, wanted)):
                step.zero_grad()
                each(IDS).sum().backward()
                kept.update_parameters(each)  # with gradients there, as some do
                step.step()
                kept.update_parameters(each)
        assert torch.equal(average.module.top.weight, wanted.module.top.weight)
        assert torch.equal(average.module.rows(IDS), model.rows(IDS))
        torch.optim.swa_utils.update_bn([IDS], average)

    train([go])
