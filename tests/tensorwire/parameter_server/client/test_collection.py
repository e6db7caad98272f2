"""Collections give the bits of one module a feature, forward and backward, with fewer fetches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorwire.parameter_server import KeyedTensor
from tensorwire.parameter_server.client.collection import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    Feature,
)
from tensorwire.parameter_server.client.embedding import Embedding, EmbeddingBag, tables_of
from tensorwire.parameter_server.client.gradient import RowGradient
from tensorwire.parameter_server.messaging.messages import TableIds
from tests.tensorwire.parameter_server.client.local_rows import dense_gradient

ROWS, BATCH = 50, 300


class LocalRows:
    """Tables in this process; counts what is fetched."""

    def __init__(self) -> None:
        self.rows = self
        self.tables: dict[str, LocalTable] = {}
        self.fetched: list[TableIds] = []

    def fetch_all(self, ids: Sequence[TableIds]) -> list[Tensor]:
        return [self._fetch(each) for each in ids]

    def _fetch(self, ids: TableIds) -> Tensor:
        self.fetched.append(ids)
        own = zip(ids.tables, ids.ids.split(list(ids.sizes)), strict=True)
        return torch.cat([self.tables[name].weight[each] for name, each in own])


class LocalTable:
    """One of them."""

    def __init__(self, cluster: LocalRows, name: str, dim: int = 7) -> None:
        self.name, self.dim, self.cluster = name, dim, cluster
        self.gradient = RowGradient(dim)
        self.kind, self.order = (dim,), ""
        self.weight = torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(len(name)))
        cluster.tables[name] = self

    def fetch(self, ids: Tensor) -> Tensor:
        return self.weight[ids].clone()

    def gradient_of_all(self) -> Tensor:
        return dense_gradient(self.gradient, self.weight)


@dataclass(frozen=True)
class JaggedOfMany:
    """Has the interface of TorchRec's ``KeyedJaggedTensor`` that is used."""

    names: list[str]
    ids: Tensor
    counts: Tensor
    weights: Tensor | None = None

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> Tensor:
        return self.ids

    def lengths(self) -> Tensor:
        return self.counts

    def weights_or_none(self) -> Tensor | None:
        return self.weights


def tables(*dims: int) -> list[LocalTable]:
    cluster = LocalRows()
    return [LocalTable(cluster, "t" * (place + 1), dim) for place, dim in enumerate(dims)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def jagged(seed: int, batch: int = BATCH) -> Tensor:
    """Bags of none to six ids."""
    lengths = numbers(batch, seed=seed) % 7
    parts = [numbers(int(n), seed=seed + place) for place, n in enumerate(lengths)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def weigh(output: Tensor) -> Tensor:
    """A loss with a different gradient for every element."""
    return (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum()


INPUTS: dict[str, Callable[[], list[Tensor]]] = {
    "one id": lambda: [numbers(BATCH, 1, seed=s) for s in range(4)],
    "several ids": lambda: [numbers(BATCH, 1 + 2 * s, seed=s) for s in range(4)],
    "jagged": lambda: [jagged(seed=10 * s) for s in range(4)],
    "no ids": lambda: [numbers(0, 3) for _ in range(4)],
    "32 bits": lambda: [numbers(BATCH, 2, seed=s).int() for s in range(4)],
    "as many as torch sorts otherwise": lambda: [numbers(16384, 2, seed=s) for s in range(4)],
}


@pytest.mark.parametrize("shared", [False, True], ids=["a table each", "shared tables"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("given", INPUTS)
def test_bags_have_the_bits_of_modules(given: str, mode: str, shared: bool) -> None:
    ours, theirs = tables(7, 16, 7, 16), tables(7, 16, 7, 16)
    use = [0, 1, 0, 0] if shared else [0, 1, 2, 3]
    batch = {f"f{place}": ids for place, ids in enumerate(INPUTS[given]())}

    collection = EmbeddingBagCollection({f: ours[use[k]] for k, f in enumerate(batch)}, mode)  # type: ignore[misc]
    modules = [EmbeddingBag(theirs[k], mode) for k in use]
    mine = collection(batch)
    others = [module(ids) for module, ids in zip(modules, batch.values(), strict=True)]
    weigh(mine.values()).backward()
    weigh(torch.cat(others, 1)).backward()

    assert torch.equal(mine.values(), torch.cat(others, 1))
    for name, other in zip(batch, others, strict=True):
        assert torch.equal(mine[name], other)
    for one, other_table in zip(ours, theirs, strict=True):
        assert torch.equal(one.gradient_of_all(), other_table.gradient_of_all())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_without_ids_are_zeros(mode: str) -> None:
    ours = tables(7, 7)
    module = EmbeddingBagCollection({"a": ours[0], "b": ours[1]}, mode)  # type: ignore[dict-item]
    found = module({"a": numbers(5, 0), "b": numbers(5, 0)}).values()
    found.sum().backward()
    assert torch.equal(found, torch.zeros(5, 14))


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_weighted_bags_have_the_bits_of_modules(learned: bool) -> None:
    ours, theirs = tables(7, 7), tables(7, 7)
    ids, weights = numbers(BATCH, 4), torch.rand(BATCH, 4)
    mine, other = (weights.clone().requires_grad_(learned) for _ in range(2))

    collection = EmbeddingBagCollection(
        {"plain": ours[0], "weighted": Feature(ours[1], weighted=True)}  # type: ignore[dict-item, arg-type]
    )
    found = collection({"plain": ids, "weighted": (ids, mine)}).values()
    wanted = torch.cat(
        (EmbeddingBag(theirs[0], "sum")(ids), EmbeddingBag(theirs[1], "sum")(ids, None, other)), 1
    )
    weigh(found).backward()
    weigh(wanted).backward()

    assert torch.equal(found, wanted)
    for one, another in zip(ours, theirs, strict=True):
        assert torch.equal(one.gradient_of_all(), another.gradient_of_all())
    if learned:
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("shared", [False, True], ids=["a table each", "shared tables"])
@pytest.mark.parametrize("given", ["several ids", "jagged"])
def test_rows_of_ids_have_the_bits_of_modules(given: str, shared: bool) -> None:
    ours, theirs = tables(7, 16, 7, 16), tables(7, 16, 7, 16)
    use = [0, 1, 0, 0] if shared else [0, 1, 2, 3]
    batch = {f"f{place}": ids for place, ids in enumerate(INPUTS[given]())}

    found = EmbeddingCollection({f: ours[use[k]] for k, f in enumerate(batch)})(batch)  # type: ignore[misc]
    others = {f: Embedding(theirs[use[k]])(ids) for k, (f, ids) in enumerate(batch.items())}
    for outputs in (found.to_dict(), others):
        losses = [weigh(each.values() if each.is_nested else each) for each in outputs.values()]
        torch.stack(losses).sum().backward()

    for name, other in others.items():
        mine = found[name]
        assert mine.shape == other.shape or mine.is_nested
        assert torch.equal(*(e.values() if e.is_nested else e for e in (mine, other)))
    for one, another in zip(ours, theirs, strict=True):
        assert torch.equal(one.gradient_of_all(), another.gradient_of_all())


def keyed(order: Mapping[str, Tensor], weights: Tensor | None = None) -> JaggedOfMany:
    parts = list(order.values())
    lengths = [each.offsets().diff() for each in parts]  # type: ignore[operator]
    values = torch.cat([each.values() for each in parts])
    return JaggedOfMany(list(order), values, torch.cat(lengths), weights)


def test_a_keyed_jagged_tensor_is_taken_in_any_order_of_keys() -> None:
    ours, theirs = tables(7, 16), tables(7, 16)
    batch = {"a": jagged(3), "b": jagged(8)}
    turned = keyed({"other": jagged(1), "b": batch["b"], "a": batch["a"]})

    mine, other = (
        EmbeddingBagCollection({"a": some[0], "b": some[1]})  # type: ignore[dict-item]
        for some in (ours, theirs)
    )
    assert torch.equal(mine(turned).values(), other(batch).values())
    with pytest.raises(KeyError, match="no ids for feature 'b'; the batch has 'a'"):
        mine(keyed({"a": batch["a"]}))


def test_the_weights_of_a_keyed_jagged_tensor_are_those_of_weighted_features() -> None:
    ours = tables(7, 7)
    batch = {"a": jagged(3), "b": jagged(8)}
    whole = keyed(batch)
    weights = torch.rand(len(whole.ids))
    split = weights.split([len(each.values()) for each in batch.values()])
    module = EmbeddingBagCollection({"a": ours[0], "b": Feature(ours[1], weighted=True)})  # type: ignore[dict-item, arg-type]

    found = module(JaggedOfMany(whole.names, whole.ids, whole.counts, weights))
    wanted = module({"a": batch["a"], "b": (batch["b"], split[1])})

    assert torch.equal(found.values(), wanted.values())
    with pytest.raises(TypeError, match="the batch has no weights"):
        module(whole)


def test_torchrecs_own_keyed_jagged_tensor_is_taken() -> None:
    torchrec = pytest.importorskip("torchrec")
    ours, batch = tables(7, 16), {"a": jagged(3), "b": jagged(8)}
    module = EmbeddingBagCollection({"a": ours[0], "b": ours[1]})  # type: ignore[dict-item]
    whole = keyed(batch)

    found = module(torchrec.KeyedJaggedTensor(whole.names, whole.ids, lengths=whole.counts))

    assert torch.equal(found.values(), module(batch).values())


def test_tables_of_one_width_are_fetched_together_and_each_id_once() -> None:
    ours = tables(7, 16, 7)
    module = EmbeddingBagCollection({"a": ours[0], "b": ours[1], "c": ours[2], "d": ours[0]})  # type: ignore[dict-item]

    module({n: torch.tensor([[4, 9], [9, 4]]) for n in "abcd"}).values().sum().backward()

    (both, wide) = ours[0].cluster.fetched
    assert (both.tables, both.sizes, both.ids.tolist()) == (("t", "ttt"), (2, 2), [4, 9, 4, 9])
    assert (wide.tables, wide.sizes) == (("tt",), (2,))
    assert tables_of(module) == [ours[0], ours[2], ours[1]]
    assert len(list(module.parameters())) == 3
    assert ours[0].gradient_of_all()[4].tolist() == [4.0] * 7
    assert module.state_dict() == {}


def test_clipping_by_the_global_norm_and_scaling_reach_the_whole_gradient() -> None:
    ours, theirs = tables(7, 7), tables(7, 7)
    ids = {"a": numbers(30, 2), "b": numbers(30, 3)}
    collection = EmbeddingBagCollection({"a": ours[0], "b": ours[1]})  # type: ignore[dict-item]
    modules = nn.ModuleDict(
        {"a": EmbeddingBag(theirs[0], "sum"), "b": EmbeddingBag(theirs[1], "sum")}
    )

    weigh(collection(ids).values()).backward()
    weigh(torch.cat([modules[n](ids[n]) for n in ids], 1)).backward()
    for model in (collection, modules):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(3)

    whole = ours[0].gradient.whole
    assert whole is not None
    assert torch.equal(whole.grad[: whole.ids.sizes[0]], ours[0].gradient.parameter.grad)
    for one, another in zip(ours, theirs, strict=True):
        assert torch.equal(one.gradient_of_all(), another.gradient_of_all())


def test_several_passes_before_one_step_add_up_as_those_of_modules() -> None:
    ours, theirs = tables(7, 7), tables(7, 7)
    collection = EmbeddingBagCollection({"a": ours[0], "b": ours[1]})  # type: ignore[dict-item]
    modules = {"a": EmbeddingBag(theirs[0], "sum"), "b": EmbeddingBag(theirs[1], "sum")}
    for seed in range(3):
        ids = {"a": numbers(30, 2, seed=seed), "b": numbers(30, 3, seed=seed + 5)}
        weigh(collection(ids).values()).backward()
        weigh(torch.cat([modules[n](ids[n]) for n in ids], 1)).backward()
    for one, another in zip(ours, theirs, strict=True):
        assert torch.equal(one.gradient_of_all(), another.gradient_of_all())


def test_a_gradient_of_the_gradient_is_that_of_modules() -> None:
    ours, theirs = tables(3, 3), tables(3, 3)
    ids = {"a": numbers(4, 2), "b": numbers(4, 3)}
    collection = EmbeddingBagCollection({"a": ours[0], "b": ours[1]}, "mean")  # type: ignore[dict-item]
    modules = {"a": EmbeddingBag(theirs[0], "mean"), "b": EmbeddingBag(theirs[1], "mean")}
    scales = [torch.ones(4, 6, requires_grad=True) for _ in range(2)]
    found = []
    for scale, output in (
        (scales[0], collection(ids).values()),
        (scales[1], torch.cat([modules[n](ids[n]) for n in ids], 1)),
    ):
        (first,) = torch.autograd.grad((output * scale).pow(2).sum(), scale, create_graph=True)
        first.pow(2).sum().backward()
        found.append(scale.grad)
    torch.testing.assert_close(found[0], found[1])


def test_what_was_found_beforehand_is_used_for_just_those_tensors() -> None:
    ours = tables(7, 7)
    module = EmbeddingBagCollection({"a": ours[0], "b": ours[1]})  # type: ignore[dict-item]
    ids = {"a": torch.tensor([[4, 4]]), "b": torch.tensor([[8]])}
    fetched = ours[0].cluster.fetched

    (wanted,) = module.wanted(ids)
    module(dict(ids))  # another dict of the same tensors
    assert fetched.pop() is wanted

    module.wanted(ids)
    ids["b"][0, 0] = 9
    module(ids)
    assert fetched.pop().ids.tolist() == [4, 9]


@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_batches_that_come_again_before_they_are_used_are_found_each_time(kind: Any) -> None:
    (table,) = tables(7)
    module = kind({"a": table})
    one, other = {"a": numbers(BATCH, 2)}, {"a": numbers(BATCH, 2, seed=1)}
    plain = {id(each): kind({"a": table})(each)["a"] for each in (one, other)}
    module.batches_known = 4

    turns = [one, one, other, one]
    wanted = [module.wanted(each)[0] for each in turns]
    for ids, each in zip(turns, wanted, strict=True):
        assert torch.equal(module(ids)["a"], plain[id(ids)])
        assert table.cluster.fetched.pop() is each
    module(one)
    assert table.cluster.fetched.pop() is not wanted[0]


def test_values_of_features_of_different_lengths_are_refused() -> None:
    found = KeyedTensor(["a", "b"], [torch.ones(2, 3, 4), torch.ones(2, 5, 4)])
    assert found.keys() == ["a", "b"]
    with pytest.raises(ValueError, match="different numbers of ids"):
        found.values()
    with pytest.raises(KeyError, match="no feature 'c'; there are 'a', 'b'"):
        found["c"]
    assert KeyedTensor(["a", "b"], [torch.ones(2, 3)] * 2).values().shape == (2, 6)


@pytest.mark.parametrize(
    ("made", "kind", "wanted"),
    [
        (lambda t: EmbeddingBagCollection({}), TypeError, "features={} must be a dict"),
        (lambda t: EmbeddingBagCollection({"a": 3}), TypeError, "feature 'a' is a int"),
        (lambda t: EmbeddingBagCollection({"a": t}, "most"), ValueError, "mode='most' must be one"),
        (
            lambda t: EmbeddingBagCollection({"a": Feature(t, "mean", weighted=True)}),
            ValueError,
            "feature 'a' is weighted, so its mode must be 'sum', not 'mean'",
        ),
        (lambda t: EmbeddingCollection({"a": Feature(t, "sum")}), ValueError, "has a mode"),
        (
            lambda t: EmbeddingBagCollection({"a": t, "b": tables(7)[0]}),
            ValueError,
            "tables are of several clusters",
        ),
    ],
)
def test_a_collection_that_cannot_be_is_refused(
    made: Callable[[Any], object], kind: type[Exception], wanted: str
) -> None:
    with pytest.raises(kind, match=wanted):
        made(tables(7)[0])


@pytest.mark.parametrize(
    ("ids", "kind", "wanted"),
    [
        ({"a": numbers(3, 1)}, KeyError, "no ids for feature 'b'"),
        ({"a": numbers(3, 1), "b": numbers(4, 1)}, ValueError, "'b' has 4 bags, and 'a' has 3"),
        ({"a": numbers(3, 1), "b": numbers(3)}, ValueError, r"shape \(3,\), not \(batch, n\)"),
        ({"a": numbers(3, 1), "b": torch.ones(3, 1)}, TypeError, "'b': ids must be an int64"),
        (numbers(3, 1), TypeError, "ids are a Tensor, neither a dict"),
    ],
)
def test_ids_that_do_not_fit_are_refused_before_anything_is_fetched(
    ids: Any, kind: type[Exception], wanted: str
) -> None:
    ours = tables(7, 7)
    module = EmbeddingBagCollection({"a": ours[0], "b": ours[1]})  # type: ignore[dict-item]
    with pytest.raises(kind, match=wanted):
        module(ids)
    assert not ours[0].cluster.fetched


def nested(*sizes: int) -> Tensor:
    return torch.nested.nested_tensor([numbers(n) for n in sizes], layout=torch.jagged)


def with_gaps() -> Tensor:
    """Bags of two and one of the eight ids that a tensor has."""
    begins, lengths = torch.tensor([0, 4, 8]), torch.tensor([2, 1])
    return torch.nested.nested_tensor_from_jagged(torch.arange(8), begins, lengths)


def test_a_nested_tensor_with_gaps_has_the_ids_that_it_shows() -> None:
    (table,) = tables(7)
    whole = torch.nested.nested_tensor([torch.arange(2), torch.tensor([4])], layout=torch.jagged)
    modules = [
        lambda ids: EmbeddingBagCollection({"a": table})({"a": ids})["a"],
        EmbeddingBag(table, "sum"),
        lambda ids: Embedding(table)(ids).values(),
    ]
    for module in modules:
        assert torch.equal(module(with_gaps()), module(whole))
    keyed = EmbeddingBagCollection({"a": Feature(table, weighted=True)})
    assert torch.equal(
        keyed({"a": (with_gaps(), torch.ones(3))})["a"], EmbeddingBag(table, "sum")(whole)
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_another_layout_is_refused() -> None:
    (table,) = tables(7)
    ids = torch.nested.nested_tensor([numbers(2), numbers(1)])
    for ask in (
        lambda: Embedding(table)(ids),
        lambda: EmbeddingBagCollection({"a": table})({"a": ids}),
    ):
        with pytest.raises(ValueError, match=r"layout torch\.strided; make it with layout="):
            ask()


def _keyed(ids: int, lengths: list[int], weights: Tensor | None = None) -> JaggedOfMany:
    return JaggedOfMany(["a", "b"], numbers(ids), torch.tensor(lengths), weights)


@pytest.mark.parametrize(
    ("ids", "kind", "wanted"),
    [
        (
            (numbers(2, 2), torch.ones(2, 2).long()),
            TypeError,
            "must be a float32 tensor, not torch",
        ),
        ((numbers(2, 2), [1.0]), TypeError, "'a': weights must be a float32 tensor, not list"),
        ((numbers(2, 2), torch.ones(2, 1)), ValueError, r"shape \(2, 1\), and ids \(2, 2\)"),
        ((nested(2, 1), torch.ones(5)), ValueError, r"weights have shape \(5,\), and ids \(3,\)"),
        (
            (nested(2, 1), nested(1, 2).float()),
            ValueError,
            "other numbers of elements than the bag",
        ),
        (_keyed(3, [1, 1, 1], torch.ones(3)), ValueError, "3 lengths are not as many for each of"),
        (_keyed(3, [1, 1, 1, 1], torch.ones(3)), ValueError, "name all of 3 ids; they name 4"),
        (_keyed(2, [1, -1, 1, 1], torch.ones(2)), ValueError, "lengths must be at least 0"),
        (_keyed(2, [1, 1], torch.ones(3)), ValueError, r"weights have shape \(3,\), and ids"),
        (_keyed(2, [1, 1], torch.ones(2).double()), TypeError, "float32 tensor, not torch.float64"),
    ],
)
def test_weights_and_lengths_that_do_not_fit_are_refused_before_anything_is_fetched(
    ids: Any, kind: type[Exception], wanted: str
) -> None:
    ours = tables(7, 7)
    module = EmbeddingBagCollection(
        {"a": Feature(ours[0], weighted=True), "b": ours[1]}  # type: ignore[dict-item, arg-type]
    )
    with pytest.raises(kind, match=wanted):
        module(ids if isinstance(ids, JaggedOfMany) else {"a": ids, "b": numbers(2, 1)})
    assert not ours[0].cluster.fetched


def test_keys_with_batches_of_different_sizes_are_refused() -> None:
    class Varying(JaggedOfMany):
        def variable_stride_per_key(self) -> bool:
            return True

    (table,) = tables(7)
    module = EmbeddingBagCollection({"a": table, "b": table})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="the Varying has batches of different sizes for its keys"):
        module(Varying(["a", "b"], numbers(4), torch.ones(4).long()))
    assert not table.cluster.fetched
