"""Modules on tables give the bits of torch's own, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client.distinct import distinct
from tensorwire.parameter_server.client.embedding import Embedding, EmbeddingBag, tables_of
from tensorwire.parameter_server.client.gradient import RowGradient
from tests.tensorwire.parameter_server.client.local_rows import dense_gradient

ROWS, DIM = 50, 7


class LocalTable:
    """A table in this process that counts what is fetched."""

    def __init__(self, weight: Tensor) -> None:
        self.name, self.dim = "items", weight.shape[1]
        self.gradient = RowGradient(self.dim)
        self.weight = weight
        self.fetched: list[Tensor] = []

    def fetch(self, ids: Tensor) -> Tensor:
        self.fetched.append(ids)
        return self.weight[ids].clone()

    def gradient_of_all(self) -> Tensor:
        return dense_gradient(self.gradient, self.weight)


def table(padding: int | None = None) -> LocalTable:
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    if padding is not None:
        weight[padding] = 0
    return LocalTable(weight)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(seed))


def plain(kind: Callable[..., nn.Module], weight: Tensor, **options: object) -> nn.Module:
    made = kind(ROWS, DIM, _weight=weight.clone(), **options)
    assert isinstance(made, nn.Module)
    return made


def weigh(output: Tensor) -> Tensor:
    """A loss with a different gradient for every element."""
    return (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum()


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("shape", [(400,), (20, 30), (0,), (2, 0)])
def test_embedding_is_torchs(shape: tuple[int, ...], padding: int | None) -> None:
    ours = table(padding)
    theirs = plain(nn.Embedding, ours.weight, padding_idx=padding)
    ids = numbers(*shape)

    mine, other = Embedding(ours, padding)(ids), theirs(ids)
    weigh(mine).backward()
    weigh(other).backward()

    assert torch.equal(mine, other)
    assert torch.equal(ours.gradient_of_all(), theirs.weight.grad)


BAGS = {
    "offsets": lambda: (numbers(200), torch.tensor([0, 5, 5, 60, 199])),
    "end given": lambda: (numbers(200), torch.tensor([0, 5, 5, 60, 199, 200])),
    "rectangle": lambda: (numbers(9, 20), None),
    "nothing": lambda: (numbers(0), torch.tensor([0, 0])),
}


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("bags", BAGS)
def test_embedding_bag_is_torchs(bags: str, mode: str, padding: int | None) -> None:
    ours = table(padding)
    end = bags == "end given"
    theirs = plain(
        nn.EmbeddingBag, ours.weight, mode=mode, padding_idx=padding, include_last_offset=end
    )
    ids, offsets = BAGS[bags]()

    mine = EmbeddingBag(ours, mode, end, padding)(ids, offsets)
    other = theirs(ids, offsets)
    weigh(mine).backward()
    weigh(other).backward()

    assert torch.equal(mine, other)
    assert torch.equal(ours.gradient_of_all(), theirs.weight.grad)


def test_weights_of_samples_get_torchs_gradient() -> None:
    ours = table()
    theirs = plain(nn.EmbeddingBag, ours.weight, mode="sum")
    ids, offsets = numbers(60), torch.tensor([0, 20, 20])
    mine, other = (torch.linspace(0, 1, 60).requires_grad_() for _ in range(2))

    weigh(EmbeddingBag(ours, "sum")(ids, offsets, mine)).backward()
    weigh(theirs(ids, offsets, other)).backward()

    torch.testing.assert_close(mine.grad, other.grad)  # a dot product; its bits depend on addresses
    assert torch.equal(ours.gradient_of_all(), theirs.weight.grad)


def test_jagged_ids_are_bags_or_sequences() -> None:
    parts = [numbers(4), numbers(0), numbers(9, seed=1)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ours = table()

    rows = Embedding(ours)(jagged)
    sums = EmbeddingBag(ours, "sum")(jagged)

    for part, found in zip(parts, rows.unbind(), strict=True):
        assert torch.equal(found, ours.weight[part])
    wanted = plain(nn.EmbeddingBag, ours.weight, mode="sum")(
        torch.cat(parts), torch.tensor([0, 4, 4])
    )
    assert torch.equal(sums, wanted)


def test_nested_weights_belong_to_the_ids_of_their_own_bag() -> None:
    ours = EmbeddingBag(table(), "sum")
    ids, starts = torch.arange(12).view(3, 4), torch.tensor([0, 1, 0])

    def narrowed(whole: Tensor, *lengths: int) -> Tensor:
        return torch.nested.narrow(whole, 1, starts, torch.tensor(lengths), layout=torch.jagged)

    weights = torch.rand(3, 4)
    flat = [torch.tensor([0, 1, 5, 6, 7, 8]), torch.tensor([0, 2, 5])]
    expected = ours(*flat, per_sample_weights=weights.view(-1)[flat[0]])
    gapped = narrowed(weights, 2, 3, 1)
    assert torch.equal(ours(narrowed(ids, 2, 3, 1), per_sample_weights=gapped), expected)
    with pytest.raises(ValueError, match=r"'items': weights have other numbers .*"):
        ours(narrowed(ids, 2, 2, 2), per_sample_weights=gapped)


def test_each_id_is_fetched_once_and_padding_never() -> None:
    ours = table()

    Embedding(ours, padding_idx=3)(torch.tensor([[4, 3, 4], [9, 9, 3]]))

    assert [ids.tolist() for ids in ours.fetched] == [[4, 9]]


def test_several_passes_before_one_step_add_up_as_in_torch() -> None:
    ours = table()
    theirs = plain(nn.Embedding, ours.weight)
    module = Embedding(ours)
    first, second, third = (numbers(90, seed=seed) for seed in range(3))

    for model in (module, theirs):
        (weigh(model(first)) + weigh(model(second)) * 3).backward()
        (weigh(model(third)) / 7).backward()

    assert torch.equal(ours.gradient_of_all(), theirs.weight.grad)


def test_modules_share_a_table_and_its_gradient() -> None:
    ours = table()
    theirs = plain(nn.Embedding, ours.weight)
    model = nn.ModuleList([Embedding(ours), EmbeddingBag(ours, "sum")])
    ids = numbers(12, 3)

    (weigh(model[0](ids)) + weigh(model[1](ids))).backward()
    (weigh(theirs(ids)) + weigh(theirs(ids).sum(1))).backward()

    assert tables_of(model) == [ours]
    assert len(list(model.parameters())) == 1
    torch.testing.assert_close(ours.gradient_of_all(), theirs.weight.grad)


def test_clipping_by_the_global_norm_counts_rows() -> None:
    ours = table()
    theirs = plain(nn.Embedding, ours.weight)
    models = [nn.Sequential(each, nn.Linear(DIM, 2)) for each in (Embedding(ours), theirs)]
    models[1][1].load_state_dict(models[0][1].state_dict())
    ids = numbers(30)

    for model in models:
        weigh(model(ids)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    torch.testing.assert_close(ours.gradient_of_all(), theirs.weight.grad)
    torch.testing.assert_close(models[0][1].weight.grad, models[1][1].weight.grad)


def test_nothing_is_left_of_passes_without_backward() -> None:
    ours = table()
    module = Embedding(ours)

    module(numbers(5))
    with torch.no_grad():
        assert not module(numbers(5)).requires_grad

    assert ours.gradient.take() is None


def test_a_gradient_set_to_none_is_gone() -> None:
    ours = table()
    module = Embedding(ours)
    weigh(module(numbers(5))).backward()

    module.zero_grad()

    assert ours.gradient.take() is None


def test_rows_are_no_part_of_a_models_state() -> None:
    model = nn.Sequential(Embedding(table()), nn.Linear(DIM, 1))

    assert set(model.state_dict()) == {"1.weight", "1.bias"}
    model.load_state_dict(model.state_dict())


def test_what_was_found_beforehand_is_used_for_just_that_tensor() -> None:
    ours = table()
    module = Embedding(ours)
    ids = torch.tensor([4, 4, 8])

    assert module.needed(ids).tolist() == [4, 8]
    ids[0] = 8

    assert torch.equal(module(ids), ours.weight[ids])


def test_ids_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="table 'items': ids must be an int64 tensor"):
        Embedding(table())(torch.zeros(3))
    with pytest.raises(ValueError, match="mode='most' must be one of"):
        EmbeddingBag(table(), mode="most")
    with pytest.raises(TypeError, match="padding_idx='a' is not an id"):
        Embedding(table(), padding_idx="a")  # type: ignore[arg-type]


def test_different_ids_come_in_the_order_of_a_batch() -> None:
    unique, places = distinct(torch.tensor([[7, -1], [7, 1 << 62]]))

    assert unique.tolist() == [7, -1, 1 << 62]
    assert places.tolist() == [[0, 1], [0, 2]]
