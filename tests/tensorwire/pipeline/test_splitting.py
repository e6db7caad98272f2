"""A model is split into stages that compute and learn what the whole does."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from tensorwire.pipeline import Pipeline
from tensorwire.pipeline.balance import costs_of, even_cuts
from tests.tensorwire.pipeline.reference import gradients, group

_TOKENS, _TARGETS = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def _sequential() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 6),
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Linear(6, 11, bias=False),
    )
    model[4].weight = model[0].weight
    return model


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class _Skipping(nn.Module):
    """Sends what the first stage makes to the last, and the mask to all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([_Block() for _ in range(4)])
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) * mask
        output: torch.Tensor = self.head(x + first)
        return output


def _require_same(pipe: Pipeline, model: nn.Module) -> None:
    """Checks names, values and gradients, after one step of both."""
    state = pipe.state_dict()
    wanted = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in wanted.items() if name in state)
    assert set(state) <= set(wanted)
    own = dict(model.named_parameters(remove_duplicate=False))
    for stage in pipe.stages:
        for name, gradient in zip(stage.state_dict(), gradients(stage), strict=False):
            expected = own[name].grad
            assert gradient is not None
            assert expected is not None
            assert torch.allclose(gradient, expected, atol=1e-6), name


def test_a_sequential_model_is_sliced_and_shared_weights_stay_tied() -> None:
    model = _sequential()
    untouched = copy.deepcopy(model)
    with group("a", "b", "c"):
        pipe = Pipeline.split(
            model, workers=["a", "b", "c"], at=["2", "4"], example=_TOKENS[:2],
            schedule="gpipe", microbatches=2, loss=_loss,
        )  # fmt: skip
        assert set(pipe.stages[1].state_dict()) == {"3.weight", "3.bias"}
        loss = pipe.train_step(_TOKENS, target=_TARGETS)
        whole = _loss(untouched(_TOKENS), _TARGETS)
        whole.backward()  # type: ignore[no-untyped-call]
        assert torch.allclose(loss, whole)
        _require_same(pipe, untouched)
        assert model[0].weight.grad is None
        pipe.load_state_dict({name: each + 1 for name, each in model.state_dict().items()})
        assert torch.equal(pipe.stages[2].state_dict()["4.weight"], model[0].weight + 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning")  # torch's own
def test_any_other_model_is_traced_with_its_skip_connections(no_monitor: None) -> None:
    torch.manual_seed(0)
    model = _Skipping()
    mask = torch.rand(4, 5, 1)
    with group("a", "b", "c"):
        pipe = Pipeline.split(
            model, workers=["a", "b", "c"], at=["blocks.1", "blocks.3"],
            example=(_TOKENS[:2], mask[:2]), schedule="1f1b", microbatches=2, loss=_loss,
        )  # fmt: skip
        loss = pipe.train_step(_TOKENS, mask, target=_TARGETS)
        whole = _loss(model(_TOKENS, mask), _TARGETS)
        whole.backward()  # type: ignore[no-untyped-call]
        assert torch.allclose(loss, whole)
        _require_same(pipe, model)
        assert torch.allclose(pipe.eval_step(_TOKENS, mask), model(_TOKENS, mask), atol=1e-6)


def test_layers_are_measured_and_cut_evenly() -> None:
    model = nn.Sequential(
        *(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 400), nn.Linear(400, 4)
    )
    costs = costs_of(model, (torch.ones(2, 4),), "memory")
    assert costs[0] == costs[1] < costs[3]
    assert costs_of(model, (torch.ones(2, 4),), "time")[4] > 0
    with group("a", "b"):
        pipe = Pipeline.split(model, workers=["a", "b"], example=torch.ones(2, 4), balance="memory")
        assert set(pipe.stages[1].state_dict()) == {"4.weight", "4.bias"}


def test_cuts_are_as_even_as_can_be() -> None:
    def costliest(costs: list[float], cuts: list[int]) -> float:
        bounds = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    assert even_cuts([1, 1, 1, 1], 2) == [2]
    assert even_cuts([5, 1, 1, 1], 3) in ([1, 2], [1, 3])
    dice = random.Random(3)
    for _ in range(50):
        costs = [dice.random() for _ in range(dice.randint(3, 7))]
        found = even_cuts(costs, 3)
        n = len(costs)
        least = min(costliest(costs, [i, j]) for i in range(1, n) for j in range(i + 1, n))
        assert sorted(set(found)) == found
        assert costliest(costs, found) == pytest.approx(least)


def test_splits_that_cannot_be_are_named() -> None:
    model = _sequential()
    with group("a", "b"):
        for at, message in [
            (["2", "4"], r"makes 3 stages, but there are 2 workers"),
            (["9"], "the model has no module '9'"),
        ]:
            with pytest.raises(ValueError, match=message):
                Pipeline.split(model, workers=["a", "b"], at=at, example=_TOKENS)
        with pytest.raises(ValueError, match=r"only an nn\.Sequential can be cut evenly"):
            Pipeline.split(_Skipping(), workers=["a", "b"], example=_TOKENS)
        with pytest.raises(ValueError, match="balance='size' must be"):
            Pipeline.split(model, workers=["a", "b"], example=_TOKENS, balance="size")  # type: ignore[arg-type]
