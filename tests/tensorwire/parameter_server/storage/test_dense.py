"""An optimizer whose parameters are cut into pieces on several shards does what it does locally."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from operator import itemgetter

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tensorwire.parameter_server.decisions.slots import SLOTS, evenly, moved
from tensorwire.parameter_server.declarations.dense_spec import (
    DenseSpec,
    PieceData,
    Spread,
    describe,
    hyper_of,
    joined_state,
    parameters_of,
    require_step,
    spread_of,
    state_of_piece,
)
from tensorwire.parameter_server.storage.dense import DensePart, DenseShard

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.05),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.05),
}


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(37, 301), nn.Tanh(), nn.Linear(301, 173), nn.Linear(173, 3))


def backward(module: nn.Module, step: int) -> None:
    r = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 37, generator=r), torch.randn(16, 3, generator=r)
    nn.functional.mse_loss(module(x), y).backward()


class Servers:
    """An optimizer on several shards, without any network."""

    def __init__(self, optimizer: Optimizer, slots: tuple[int, ...]) -> None:
        self.spec = describe("d", optimizer, spread_of(optimizer))
        self.mine = parameters_of(optimizer)
        self.optimizer = optimizer
        self.slots = slots
        self.shards = {n: DenseShard(self.spec, slots, n) for n in sorted(set(slots))}
        for shard in self.shards.values():
            shard.load({place: self.data(place) for place in shard.pieces}, 0)

    def data(self, place: int) -> PieceData:
        piece = self.spec.pieces[place]
        mine = self.mine[piece.parameter]
        state = self.optimizer.state.get(mine, {})
        if self.spec.spread is Spread.ELEMENTS:
            state = state_of_piece(state, piece, mine.shape)
        return PieceData(mine.detach().reshape(-1)[piece.start : piece.stop].clone(), state)

    def part(self, shard: DenseShard) -> DensePart:
        absent = frozenset(n for n, each in enumerate(self.mine) if each.grad is None)
        grads: dict[torch.dtype, list[Tensor]] = {}
        for place in shard.pieces:
            piece = self.spec.pieces[place]
            grad = self.mine[piece.parameter].grad
            if grad is not None:
                cut = grad.reshape(-1)[piece.start : piece.stop]
                grads.setdefault(grad.dtype, []).append(cut)
        hyper = [hyper_of(group) for group in self.optimizer.param_groups]
        return DensePart({d: torch.cat(each) for d, each in grads.items()}, absent, hyper)

    def step(self) -> None:
        for shard in self.shards.values():
            shard.apply([self.part(shard)], None)
            begins = dict.fromkeys(shard.values(), 0)
            for place in shard.pieces:
                piece = self.spec.pieces[place]
                mine = self.mine[piece.parameter]
                begin = begins[mine.dtype]
                begins[mine.dtype] = begin + len(piece)
                new = shard.values()[mine.dtype][begin : begin + len(piece)]
                mine.detach().view(-1)[piece.start : piece.stop] = new

    def state(self) -> dict[int, dict[str, object]]:
        pieces: dict[int, list] = {}
        for shard in self.shards.values():
            for place, data in shard.data(shard.pieces).items():
                pieces.setdefault(self.spec.pieces[place].parameter, []).append((place, data.state))
        return {
            number: joined_state(
                [
                    (self.spec.pieces[place], state)
                    for place, state in sorted(parts, key=itemgetter(0))
                ],
                self.spec.shapes[number],
            )
            if self.spec.spread is Spread.ELEMENTS
            else parts[0][1]
            for number, parts in pieces.items()
        }

    def resize(self, slots: tuple[int, ...]) -> None:
        new = {
            n: self.shards.get(n) or DenseShard(self.spec, (-1,) * SLOTS, n)
            for n in sorted(set(slots))
        }
        for shard in self.shards.values():
            for place, data in shard.leave(slots).items():
                new[slots[self.spec.pieces[place].slot]].enter({place: data}, shard.steps)
        self.shards, self.slots = new, slots


UNEVEN = tuple(0 if slot < 100 else 1 if slot < 611 else 2 for slot in range(SLOTS))


def both(make: Make, slots: tuple[int, ...]) -> tuple[nn.Module, Optimizer, nn.Module, Servers]:
    local, remote = network(), network()
    return local, make(local.parameters()), remote, Servers(make(remote.parameters()), slots)


def assert_equal(local: nn.Module, remote: nn.Module) -> None:
    for one, two in zip(local.parameters(), remote.parameters(), strict=True):
        assert torch.equal(one, two)


def train(
    local: nn.Module, optimizer: Optimizer, remote: nn.Module, servers: Servers, step: int
) -> None:
    for module in (local, remote):
        module.zero_grad()
        backward(module, step)
        if step % 3 == 2:
            module[2].weight.grad = None  # as if it had not been used
    servers.optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
    optimizer.step()
    servers.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_uneven_shards_give_the_bits_of_one_process(name: str) -> None:
    local, optimizer, remote, servers = both(OPTIMIZERS[name], UNEVEN)
    for step in range(12):
        train(local, optimizer, remote, servers, step)
        assert_equal(local, remote)
    for number, parameter in enumerate(local.parameters()):
        for key, value in optimizer.state[parameter].items():
            other = servers.state()[number][key]
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


@pytest.mark.parametrize("name", ["adam", "adafactor"])
def test_pieces_move_to_other_shards_and_training_does_not_notice(name: str) -> None:
    local, optimizer, remote, servers = both(OPTIMIZERS[name], evenly((0, 1)))
    for step, shards in enumerate([(0, 1), (0, 1, 2), (2,), (2, 3)]):
        servers.resize(moved(servers.slots, shards))
        train(local, optimizer, remote, servers, step)
        assert_equal(local, remote)


def test_an_optimizer_that_has_run_is_taken_over_with_its_state() -> None:
    local, remote = network(), network()
    optimizer = torch.optim.Adam(local.parameters(), 0.01)
    other = torch.optim.Adam(remote.parameters(), 0.01)
    for module, each in ((local, optimizer), (remote, other)):
        backward(module, 0)
        each.step()
    servers = Servers(other, UNEVEN)
    train(local, optimizer, remote, servers, 1)
    assert_equal(local, remote)


def test_gradients_of_trainers_are_added_in_order_and_divided() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], 1.0)
    spec = describe("d", optimizer, Spread.ELEMENTS)
    shard = DenseShard(spec, (0,) * SLOTS, 0)
    shard.load({0: PieceData(torch.ones(3))}, 0)
    hyper = [hyper_of(optimizer.param_groups[0])]
    grads = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3.0, 2.0, 0.0])]
    before = copy.deepcopy(grads)
    shard.apply([DensePart({torch.float32: g}, frozenset(), hyper) for g in grads], 2)
    assert shard.values()[torch.float32].tolist() == [-1.0, -1.0, -0.5]
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


def test_what_needs_a_closure_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        spread_of(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))


def test_what_cannot_step_on_a_server_is_refused_before_anything_is_declared() -> None:
    parameters = [nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3))]
    for optimizer, why in (
        (torch.optim.SparseAdam(parameters), "SparseAdam .* does not support dense gradients"),
        (torch.optim.Adam(parameters, capturable=True), "Adam .* capturable"),
    ):
        with pytest.raises(ValueError, match=f"(?s){why}"):
            require_step(describe("d", optimizer, spread_of(optimizer)))


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.NAdam, torch.optim.Adam])
def test_a_step_that_is_tried_leaves_the_optimizer_as_it_was(make: Make) -> None:
    optimizer = make([nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(3))])
    require_step(describe("d", optimizer, spread_of(optimizer)))
    assert not optimizer.state
    assert all(torch.equal(p, torch.ones_like(p)) for p in parameters_of(optimizer))


def test_large_parameters_are_cut_and_those_of_other_optimizers_stay_whole() -> None:
    module = nn.Linear(1000, 1000)
    cut = describe("d", torch.optim.Adam(module.parameters()), Spread.ELEMENTS)
    assert max(len(piece) for piece in cut.pieces) == 1 << 14
    assert sum(len(piece) for piece in cut.pieces) == 1_001_000
    loads = [sum(len(cut.pieces[p]) for p in cut.kept_by(evenly((0, 1)), n)) for n in (0, 1)]
    assert max(loads) - min(loads) <= 1 << 15
    whole = describe("d", torch.optim.Adafactor(module.parameters()), Spread.PARAMETERS)
    assert [len(piece) for piece in whole.pieces] == [1_000_000, 1000]


def test_declarations_that_differ_say_in_what() -> None:
    def spec(width: int, make: Make) -> DenseSpec:
        return describe("d", make(nn.Linear(width, 2).parameters()), Spread.ELEMENTS)

    one = spec(3, OPTIMIZERS["adam"])
    assert one.differences(spec(3, OPTIMIZERS["adam"])) == []
    assert "shapes=((2, 4), (2,)), not ((2, 3), (2,))" in one.differences(
        spec(4, OPTIMIZERS["adam"])
    )
    assert len(one.differences(spec(3, OPTIMIZERS["sgd"]))) == 1
