"""Random graphs cut into virtual workers must give single-process torch's gradients.

One seed builds one random expression twice: once as a plain graph, once cut up
among several workers, where every use of another worker's value is a message.
Gradient messages are then delivered in random order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from autograd_dist.border import SentTensor
from autograd_dist.grad_fields import GradFields
from autograd_dist.gradients import LeafGradients
from autograd_dist.local_engine import LocalPass
from autograd_dist.pass_driver import PassDriver
from autograd_dist.passes import Ack, Participant, PassId, Request, Returned
from autograd_dist.recv_node import Origin, attach_recv

CONTEXT = 99 << 48  # of a worker that takes no part itself
SIZE = 3


class SaveAndScale(torch.autograd.Function):
    """A custom function with saved tensors and two outputs."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx, grad_product, grad_sum):
        a, b = ctx.saved_tensors
        return grad_product * b + grad_sum, grad_product * a + grad_sum


@dataclass(eq=False)
class Value:
    """A value on one worker and its twin in the plain graph."""

    home: int
    here: torch.Tensor
    plain: torch.Tensor


@dataclass
class Worker:
    sends: dict[int, list[SentTensor]] = field(default_factory=dict)
    leaves: LeafGradients = field(default_factory=LeafGradients)
    known: set[int] = field(default_factory=set)


def clipped(gradient):
    return None if gradient is None else gradient.clamp(-2.0, 2.0)


def modified_in_place(a, b):
    copy = a * 1.0
    (copy * b).sum()
    copy.mul_(0.5).add_(b)
    return copy


def view_modified_in_place(a, b):
    copy = a + 0.0
    copy[0].mul_(b[1])
    return copy


BINARY: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    torch.add,
    torch.mul,
    torch.matmul,
    lambda a, b: a + b[0],
    lambda a, b: torch.cat([a, b])[1 : 1 + SIZE],
    lambda a, b: sum(a.unbind(0)) * b,
    lambda a, b: SaveAndScale.apply(a, b)[0],
    lambda a, b: SaveAndScale.apply(a, b)[1],
    lambda a, b: (a.detach() + b).tanh(),
    lambda a, b: torch.view_as_real(torch.complex(a, b) * (1 + 2j)).sum(-1),
    modified_in_place,
    view_modified_in_place,
]
UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.sin,
    torch.tanh,
    torch.t,
    lambda a: a.reshape(-1).view(SIZE, SIZE),
    lambda a: a.chunk(SIZE)[1].expand(SIZE, SIZE),
    lambda a: a,
]


class Builder:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.workers = [Worker() for _ in range(self.rng.randint(1, 4))]
        self.params: list[Value] = []
        self.values: list[Value] = []
        self.retained: list[Value] = []
        self.messages = 0
        self.is_wasteful = self.rng.random() < 0.4

    def build(self) -> list[Value]:
        for _ in range(self.rng.randint(2, 6)):
            self.add_param()
        for _ in range(self.rng.choice([10, 25, 60])):
            self.add_step()
        return [self.root() for _ in range(self.rng.choice([1, 1, 1, 2]))]

    def add_param(self) -> None:
        here = torch.randn(SIZE, SIZE, dtype=torch.float64, requires_grad=True)
        plain = here.detach().clone().requires_grad_()
        if self.rng.random() < 0.3:
            for leaf in (here, plain):
                leaf.register_hook(clipped)
        if self.rng.random() < 0.1:
            for leaf in (here, plain):
                leaf.register_post_accumulate_grad_hook(lambda p: None)
        value = Value(self.rng.randrange(len(self.workers)), here, plain)
        self.params.append(value)
        self.values.append(value)

    def pick(self) -> Value:
        return self.rng.choice(self.values[-8:] + self.params)

    def add_step(self) -> None:
        kind = self.rng.random()
        if kind < 0.45:
            home = self.rng.randrange(len(self.workers))
            a, b = self.fetch([self.pick(), self.pick()], home)
            op = self.rng.choice(BINARY)
            self.keep(home, op(a.here, b.here), op(a.plain, b.plain))
        elif kind < 0.7:
            a = self.pick()
            op1 = self.rng.choice(UNARY)
            self.keep(a.home, op1(a.here), op1(a.plain))
        elif kind < 0.8:
            self.add_lookup(self.rng.choice(self.params))
        elif self.is_wasteful:
            home = self.rng.randrange(len(self.workers))
            self.fetch([self.pick() for _ in range(self.rng.randint(1, 3))], home)

    def add_lookup(self, table: Value) -> None:
        index = torch.tensor([self.rng.randrange(SIZE) for _ in range(SIZE)])
        sparse = not table.plain._backward_hooks and self.rng.random() < 0.5
        (table,) = self.fetch([table], self.rng.randrange(len(self.workers)))
        here = torch.nn.functional.embedding(index, table.here, sparse=sparse)
        self.keep(table.home, here, torch.nn.functional.embedding(index, table.plain))

    def keep(self, home: int, here: torch.Tensor, plain: torch.Tensor) -> None:
        is_new = all(plain is not value.plain for value in self.values)
        if is_new and here.requires_grad and self.rng.random() < 0.2:
            here.register_hook(clipped)
            plain.register_hook(clipped)
        self.values.append(Value(home, here, plain))
        if is_new and here.requires_grad and self.rng.random() < 0.2:
            here.retain_grad()
            plain.retain_grad()
            self.retained.append(self.values[-1])

    def fetch(self, values: Sequence[Value], home: int) -> list[Value]:
        """The values on worker ``home``; what lives elsewhere comes in one message each worker."""
        result = list(values)
        for sender in {v.home for v in values if v.home != home}:
            positions = [i for i, v in enumerate(values) if v.home == sender]
            copies = self.send([values[i] for i in positions], home)
            for position, copy in zip(positions, copies, strict=True):
                result[position] = copy
        self.values.extend(v for v in result if v not in values)
        return result

    def send(self, values: list[Value], home: int) -> list[Value]:
        sender = values[0].home
        self.workers[sender].known.add(home)
        self.workers[home].known.add(sender)
        tracked = [v for v in values if v.here.requires_grad]
        arrived = {id(v): v.here.detach().clone() for v in values}
        if tracked:
            self.messages += 1
            sent = [SentTensor.of(v.here) for v in tracked]
            self.workers[sender].sends[self.messages] = sent
            received = attach_recv(
                Origin(CONTEXT, sender, self.messages), [arrived[id(v)].clone() for v in tracked]
            )
            arrived.update({id(v): t for v, t in zip(tracked, received, strict=True)})
        return [Value(home, arrived[id(v)], v.plain) for v in values]

    def root(self) -> Value:
        """A scalar at worker 0 that requires grad."""
        (value,) = self.fetch([self.rng.choice(self.values[-4:])], 0)
        (param,) = self.fetch([self.rng.choice(self.params)], 0)
        return Value(
            0, (value.here * param.here).sin().sum(), (value.plain * param.plain).sin().sum()
        )


@dataclass(frozen=True)
class Token:
    """An arrived request: who to acknowledge it to."""

    sender: PassDriver


class Network:
    """Drivers of one pass, between which requests and acknowledgements overtake each other."""

    def __init__(self, workers: list[Worker], rng: random.Random, retain_graph: bool) -> None:
        self.rng = rng
        self.workers = workers
        self.retain_graph = retain_graph
        self.drivers: dict[int, PassDriver] = {}
        self.under_way: list[Callable[[], None]] = []
        self.outcome: list[str | None] = []
        self.kinds: Counter[type] = Counter()
        self.depth = 0
        self.steps = 0

    def driver(self, worker: int) -> PassDriver:
        if worker not in self.drivers:
            self.drivers[worker] = PassDriver(
                PassId(CONTEXT, 0, 1),
                worker,
                Participant(worker, 0, lambda: sorted(self.workers[worker].known)),
                lambda deliver: self.local_pass(worker, deliver),
                self,
                self.outcome.append,
                retain_graph=self.retain_graph,
            )
        return self.drivers[worker]

    def local_pass(self, worker: int, deliver: Callable[..., None]) -> LocalPass:
        sends, leaves = self.workers[worker].sends, self.workers[worker].leaves
        retain = self.retain_graph
        return LocalPass(CONTEXT, sends, leaves, deliver, GradFields(), retain_graph=retain)

    def send(self, driver: PassDriver, to: int, request: Request, payload: object) -> None:
        self.kinds[type(request)] += 1
        asker = next(number for number, each in self.drivers.items() if each is driver)
        self.under_way.append(
            lambda: self.driver(to).received(Token(driver), request, payload, asker)
        )
        # The calling worker is in the middle of an engine run, while others go on.
        while self.under_way and self.depth < 3 and self.rng.random() < 0.2:
            self.depth += 1
            self.step()
            self.depth -= 1

    def acknowledge(self, token: Token, ack: Ack, returned: Returned | None) -> None:
        self.kinds[type(returned)] += 1
        self.under_way.append(lambda: token.sender.acknowledged(ack, returned))

    def later(self, work: Callable[[], None]) -> None:
        self.under_way.append(work)

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 20_000, "the pass goes round for ever"
        self.under_way.pop(self.rng.randrange(len(self.under_way)))()

    def run(self, roots: list[torch.Tensor]) -> str | None:
        self.driver(0).start(roots)
        while self.under_way:
            assert not self.outcome, "the pass ended while something was under way"
            self.step()
        (outcome,) = self.outcome
        return outcome


def check_seed(seed: int) -> Counter[type]:
    builder = Builder(seed)
    roots = builder.build()
    kinds: Counter[type] = Counter()
    passes = builder.rng.choice([1, 1, 2])
    for number in range(passes):
        retain = number + 1 < passes
        torch.autograd.backward([r.plain for r in roots], retain_graph=retain)
        network = Network(builder.workers, builder.rng, retain)
        assert network.run([r.here for r in roots]) is None
        kinds += network.kinds
    for position, param in enumerate(builder.params):
        gradients = builder.workers[param.home].leaves.snapshot()
        actual = gradients.get(param.here)
        assert (actual is None) == (param.plain.grad is None), f"param {position}"
        if actual is not None:
            torch.testing.assert_close(actual.to_dense(), param.plain.grad)
        assert param.here.grad is None
    for position, value in enumerate(builder.retained):
        assert (value.here.grad is None) == (value.plain.grad is None), f"retained {position}"
        if value.here.grad is not None:
            torch.testing.assert_close(value.here.grad, value.plain.grad)
    return kinds


@pytest.mark.parametrize("block", range(10))
def test_gradients_equal_single_process_torch(block):
    for seed in range(block * 50, block * 50 + 50):
        try:
            check_seed(seed)
        except Exception as error:
            raise AssertionError(f"reproduce with check_seed({seed})") from error
