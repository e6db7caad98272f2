"""Rows move as torch's optimizers move them, bit for bit, with compiled kernels and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tensorwire.parameter_server import kernels
from tensorwire.parameter_server.declarations import rules
from tensorwire.parameter_server.declarations.initialisers import Constant, Normal
from tensorwire.parameter_server.declarations.rules import Kernel, Per, Rule, kernel_of
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec, decode
from tensorwire.parameter_server.kernels.arrays import Floats, Ints
from tensorwire.parameter_server.storage import tables
from tensorwire.parameter_server.storage.table import Part, TableShard

ROWS, DIM, STEPS = 40, 33, 200
BOTH = [kernels.kernels(), kernels.torch_only()]

Batch = tuple[np.ndarray, Tensor]


def batches(everything: bool) -> list[Batch]:
    """Ids, some twice, and a gradient for each."""
    r = np.random.default_rng(3)
    made = []
    for _ in range(STEPS):
        ids = r.integers(0, ROWS, 40)
        if everything:
            ids = np.concatenate([r.permutation(ROWS), ids])
        grad = r.standard_normal((len(ids), DIM)) * 10.0 ** r.uniform(-3, 2)
        made.append((ids, torch.from_numpy(grad.astype(np.float32))))
    return made


def summed(k, ids: np.ndarray, grad: Tensor) -> Part:
    scratch = np.full((512, 2), -1, np.int64)
    unique, inverse = np.empty_like(ids), np.empty_like(ids)
    count = k.dedup(scratch, ids, unique, inverse)
    out = np.empty((count, DIM), np.float32)
    k.segment_sum(grad.numpy(), inverse, np.zeros(count, np.uint8), out)
    return Part(unique[:count].copy(), out)


def table_after(
    k, rule: Rule, made: list[Batch], precision: Precision = Precision.FLOAT32
) -> tuple[TableShard, Tensor]:
    table = TableShard(TableSpec("t", DIM, rule, Normal(0.1, seed=4), precision=precision), k)
    for time, (ids, grad) in enumerate(made, 1):
        table.apply([summed(k, ids, grad)], time)
    out = np.empty((ROWS, DIM), np.float32)
    table.pull(np.arange(ROWS), out, STEPS)
    return table, torch.from_numpy(out)


def assert_equal(first: TableShard, second: TableShard) -> None:
    """The rows of both, and their state, are the same."""
    one, other = (table.taken(np.arange(len(table))) for table in (first, second))
    assert np.array_equal(one.ids, other.ids)
    assert one.columns.keys() == other.columns.keys()
    for name, values in one.columns.items():
        assert np.array_equal(values, other.columns[name]), name


def embedding_after(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], made: list[Batch], sparse: bool
) -> Tensor:
    begin = np.empty((ROWS, DIM), np.float32)
    Normal(0.1, seed=4).fill(begin, np.arange(ROWS), np.arange(ROWS))
    module = nn.Embedding.from_pretrained(torch.from_numpy(begin), freeze=False)
    optimizer = make(list(module.parameters()))
    for ids, grad in made:
        module.weight.grad = None
        module(torch.from_numpy(ids)).backward(grad)
        if sparse:
            module.weight.grad = only_rows(module.weight.grad, ids)
        optimizer.step()
    return module.weight.detach()


def only_rows(grad: Tensor | None, ids: np.ndarray) -> Tensor:
    """Makes a sparse tensor. Made by torch, it would add an id's gradients in another order."""
    assert grad is not None
    rows = torch.from_numpy(np.unique(ids))
    return torch.sparse_coo_tensor(rows.unsqueeze(0), grad[rows], grad.shape)


CASES: dict[str, tuple[Rule, Callable[[list[nn.Parameter]], torch.optim.Optimizer], bool, bool]] = {
    "sgd": (rules.SGD(0.05), lambda p: torch.optim.SGD(p, 0.05), False, False),
    "sgd with decay": (
        rules.SGD(0.05, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.01),
        False,
        True,
    ),
    "momentum": (
        rules.SGD(0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        False,
        True,
    ),
    "nesterov": (
        rules.SGD(0.01, 0.9, nesterov=True, weight_decay=0.003),
        lambda p: torch.optim.SGD(p, 0.01, 0.9, nesterov=True, weight_decay=0.003),
        False,
        True,
    ),
    "adagrad": (rules.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1), False, False),
    "adagrad with all": (
        rules.Adagrad(0.1, 0.01, 0.02, 0.3, 1e-6),
        lambda p: torch.optim.Adagrad(p, 0.1, 0.01, 0.02, 0.3, 1e-6),
        False,
        True,
    ),
    "adam": (rules.Adam(0.01), lambda p: torch.optim.SparseAdam(p, 0.01), True, False),
}


@pytest.mark.parametrize("k", BOTH, ids=lambda module: module.NAME)
@pytest.mark.parametrize("name", CASES)
def test_a_table_is_what_an_embedding_under_torch_s_optimizer_is(name: str, k) -> None:
    rule, make, sparse, everything = CASES[name]
    made = batches(everything)[: STEPS if k is BOTH[0] else STEPS // 8]
    assert torch.equal(table_after(k, rule, made)[1], embedding_after(make, made, sparse))


ALL = [
    *(rule for rule, _, _, _ in CASES.values()),
    rules.RowwiseAdagrad(0.1),
    rules.FTRL(0.1, 0.01, 0.02, 1.0),
]


@pytest.mark.parametrize("rule", ALL, ids=repr)
def test_compiled_kernels_and_torch_give_the_same_rows_and_state(rule: Rule) -> None:
    made = batches(everything=False)[: STEPS // 4]
    (first, rows), (second, others) = (table_after(k, rule, made) for k in BOTH)
    assert torch.equal(rows, others)
    assert_equal(first, second)


def test_rowwise_adagrad_keeps_the_mean_of_squares() -> None:
    made = batches(everything=False)
    weight, sums = torch.zeros(ROWS, DIM, dtype=torch.float64), torch.zeros(ROWS, 1)
    for ids, grad in made:
        whole = torch.zeros(ROWS, DIM).index_add_(0, torch.from_numpy(ids), grad)
        sums += whole.square().mean(1, keepdim=True)
        weight -= 0.1 * whole / (sums.sqrt() + 1e-10)
    table = TableShard(TableSpec("t", DIM, rules.RowwiseAdagrad(0.1), Constant()), BOTH[0])
    for time, (ids, grad) in enumerate(made, 1):
        table.apply([summed(BOTH[0], ids, grad)], time)
    out = np.empty((ROWS, DIM), np.float32)
    table.pull(np.arange(ROWS), out, 0)
    assert torch.allclose(torch.from_numpy(out).double(), weight, atol=1e-5)


def test_ftrl_follows_its_formula_and_makes_rows_sparse() -> None:
    rule = rules.FTRL(0.5, l1=1.5, l2=0.1, beta=1.0)
    made = [(ids, grad.clamp(-1, 1)) for ids, grad in batches(everything=False)]
    total, linear, weight = (np.zeros((ROWS, DIM)) for _ in range(3))
    for ids, grad in made:
        whole = torch.zeros(ROWS, DIM).index_add_(0, torch.from_numpy(ids), grad).double().numpy()
        sigma = (np.sqrt(total + whole**2) - np.sqrt(total)) / 0.5
        linear += whole - sigma * weight
        total += whole**2
        moved = (np.sign(linear) * 1.5 - linear) / ((1 + np.sqrt(total)) / 0.5 + 0.1)
        weight = np.where(np.abs(linear) <= 1.5, 0, moved)
    table = TableShard(TableSpec("t", DIM, rule, Constant()), BOTH[0])
    for time, (ids, grad) in enumerate(made, 1):
        table.apply([summed(BOTH[0], ids, grad)], time)
    out = np.empty((ROWS, DIM), np.float32)
    table.pull(np.arange(ROWS), out, 0)
    assert np.allclose(out, weight, atol=1e-4)
    assert (out == 0).mean() == pytest.approx((weight == 0).mean(), abs=0.01)
    assert (out == 0).any()


@dataclass(frozen=True)
class Lion(Rule):
    """The example of the docstring."""

    lr: float
    beta: float = 0.9

    state: ClassVar[Mapping[str, Per]] = {"mean": Per.COLUMN}

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        weight.sub_(state["mean"].lerp(grad, 1 - self.beta).sign_(), alpha=self.lr)
        state["mean"].lerp_(grad, 1 - self.beta)


def test_a_rule_of_the_user_s_own_moves_rows() -> None:
    table = TableShard(TableSpec("t", 2, Lion(0.5), Constant(1.0)), BOTH[0])
    table.apply([Part(np.array([7]), np.array([[3.0, -2.0]], np.float32))], 1)
    assert table.all()[1].tolist() == [[0.5, 1.5]]
    mean = table.taken(np.array([0])).columns["state.mean"]
    assert mean == pytest.approx(np.array([[0.3, -0.2]]))


@dataclass(frozen=True)
class Drift(Rule):
    """Moves rows by their gradient and by half of their last move; counts its kernel's calls."""

    lr: float
    calls: ClassVar[list[int]] = []

    state: ClassVar[Mapping[str, Per]] = {"last": Per.COLUMN, "count": Per.ROW}

    def update(self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int) -> None:
        state["count"] += step
        last = state["last"].mul_(0.5).add_(grad * self.lr)
        weight.sub_(last)

    def kernel(
        self, weight: Floats, rows: Ints, grad: Floats, state: Mapping[str, Floats], step: int
    ) -> None:
        self.calls.append(len(rows))
        last, count, lr = state["last"], state["count"], np.float32(self.lr)
        for row, slope in zip(rows.tolist(), grad, strict=True):
            count[row] += np.float32(step)
            last[row] = last[row] * np.float32(0.5) + slope * lr
            weight[row] -= last[row]


@pytest.mark.parametrize("precision", [each for each in Precision if each is not Precision.INT8])
def test_a_kernel_of_the_user_s_own_rule_is_used_and_gives_what_its_torch_code_gives(
    precision: Precision,
) -> None:
    made = batches(everything=False)[:20]
    Drift.calls.clear()
    first, _ = table_after(BOTH[0], Drift(0.1), made, precision)
    assert len(Drift.calls) == 20
    second, _ = table_after(BOTH[1], Drift(0.1), made, precision)
    assert len(Drift.calls) == 20  # without numba, torch's code is used
    assert_equal(first, second)


def test_a_rule_keeps_its_kernel_on_the_way_to_a_server() -> None:
    """Classes of the user's program travel by value."""
    spec = TableSpec("t", 2, Drift(0.5), Constant(1.0))
    table = TableShard(decode(spec.encode()), BOTH[0])
    assert kernel_of(type(table.rule)) is Kernel.OF_ONE
    table.apply([Part(np.array([7]), np.array([[3.0, -2.0]], np.float32))], 1)
    assert table.all()[1].tolist() == [[-0.5, 2.0]]


def test_many_tables_whose_rule_has_a_kernel_for_one_are_moved_one_after_the_other() -> None:
    specs = [TableSpec(name, 2, Drift(0.5), Constant(1.0)) for name in ("a", "b")]
    made = [TableShard(spec, BOTH[0]) for spec in specs]
    grad = np.array([[3.0, -2.0], [1.0, 1.0]], np.float32)
    Drift.calls.clear()
    tables.apply(BOTH[0], made, [tables.ManyParts((1, 1), np.array([7, 7]), grad)], 1)
    assert [table.all()[1].tolist() for table in made] == [[[-0.5, 2.0]], [[0.5, 0.5]]]
    assert Drift.calls == [1, 1]


def test_a_rule_that_overrides_update_leaves_the_kernel_of_its_base() -> None:
    @dataclass(frozen=True)
    class Uphill(rules.SGD):
        def update(
            self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], step: int
        ) -> None:
            weight.add_(grad, alpha=self.lr)

    @dataclass(frozen=True)
    class Renamed(rules.SGD):
        pass

    kinds = [Uphill, Renamed, Lion, Drift, rules.SGD]
    assert [kernel_of(kind) for kind in kinds] == [
        Kernel.NONE, Kernel.OF_MANY, Kernel.NONE, Kernel.OF_ONE, Kernel.OF_MANY
    ]  # fmt: skip
    table = TableShard(TableSpec("t", 2, Uphill(0.5), Constant(1.0)), BOTH[0])
    table.apply([Part(np.array([7]), np.array([[3.0, -2.0]], np.float32))], 1)
    assert table.all()[1].tolist() == [[2.5, 0.0]]


def test_hyper_parameters_travel_as_numbers() -> None:
    for rule in ALL:
        assert rule.with_hyper(rule.hyper()) == rule
    changed = rules.Adam(0.1).with_hyper((0.5, 0.8, 0.9, 1e-3))
    assert changed == rules.Adam(0.5, (0.8, 0.9), 1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rules.SGD(-1.0), "SGD: lr=-1.0 must be finite, at least 0"),
        (lambda: rules.SGD("a"), "SGD: lr='a' is a str, not a number"),  # type: ignore[arg-type]
        (lambda: rules.SGD(0.1, nesterov=True), "needs a momentum"),
        (lambda: rules.Adam(betas=(0.9, 1.0)), "at least 0 and below 1"),
        (lambda: rules.FTRL(lr=0), "lr=0 would divide by zero"),
        (lambda: rules.Adagrad(eps=float("nan")), "eps=nan must be finite"),
    ],
)
def test_a_rule_that_cannot_be_says_why(make: Callable[[], Rule], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()
