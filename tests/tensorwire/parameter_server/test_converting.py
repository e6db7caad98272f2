"""Models written for one process train on servers after one line, and come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import server_names, train

DIM, ROWS, BATCH = 4, 30, 16
KEYS = ["user", "item", "shop"]


@dataclass
class Jagged:
    """Stands for TorchRec's ``KeyedJaggedTensor``, as far as it is used."""

    ids: Tensor
    counts: Tensor

    def keys(self) -> list[str]:
        return KEYS

    def values(self) -> Tensor:
        return self.ids

    def lengths(self) -> Tensor:
        return self.counts

    def weights_or_none(self) -> None:
        return None


@dataclass
class Config:
    """Stands for TorchRec's ``EmbeddingBagConfig``."""

    name: str
    feature_names: list[str]
    pooling: str = "SUM"
    embedding_dim: int = DIM
    num_embeddings: int = ROWS


class Bags(nn.Module):
    """Stands for TorchRec's ``EmbeddingBagCollection``: two tables for three features."""

    def __init__(self) -> None:
        super().__init__()
        self.configs = [Config("t_user", ["user"], "MEAN"), Config("t_item", ["item", "shop"])]
        self.embedding_bags = nn.ModuleDict({
            c.name: nn.EmbeddingBag(ROWS, DIM, mode=c.pooling.lower(), include_last_offset=True)
            for c in self.configs
        })  # fmt: skip

    def embedding_bag_configs(self) -> list[Config]:
        return self.configs

    def is_weighted(self) -> bool:
        return False

    def forward(self, features: Jagged) -> ps.KeyedTensor:
        lengths = features.lengths().view(len(KEYS), -1)
        parts = features.values().split(lengths.sum(1).tolist())
        where = {name: c.name for c in self.configs for name in c.feature_names}
        found = [
            self.embedding_bags[where[key]](ids, torch.cat((own.new_zeros(1), own.cumsum(0))))
            for key, ids, own in zip(KEYS, parts, lengths, strict=True)
        ]
        return ps.KeyedTensor(KEYS, found)


class Dlrm(nn.Module):
    """A small DLRM: dense features, bags, and all products of two vectors."""

    def __init__(self, bags: Callable[[], nn.Module] = Bags) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.sparse = bags()
        self.bottom = nn.Sequential(nn.Linear(3, DIM), nn.ReLU())
        self.top = nn.Linear(DIM + 6, 1)

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        bottom = self.bottom(dense)
        found = self.sparse(features).to_dict()
        vectors = torch.stack((bottom, *(found[key] for key in KEYS)), 1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat((bottom, products[:, first, second]), 1)).squeeze(1)


def batches(steps: int = 6) -> list[tuple[Tensor, Jagged, Tensor]]:
    r = torch.Generator().manual_seed(5)
    made = []
    for _ in range(steps):
        lengths = torch.randint(0, 4, (3 * BATCH,), generator=r)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=r)
        dense = torch.randn(BATCH, 3, generator=r)
        clicked = torch.randint(0, 2, (BATCH,), generator=r).float()
        made.append((dense, Jagged(ids, lengths), clicked))
    return made


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, given: Any) -> list[float]:
    losses = []
    for dense, features, clicked in given:
        optimizer.zero_grad()
        found = model(dense, features)
        loss = nn.functional.binary_cross_entropy_with_logits(found, clicked)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_dlrm_trains_on_servers_with_one_line_changed_and_comes_back(tmp_path: Path) -> None:
    local = Dlrm()
    wanted = fit(local, torch.optim.SGD(local.parameters(), lr=0.5), batches())

    def go() -> list[float]:
        model = Dlrm()
        cluster = ps.connect(server_names(2))
        ps.convert(model, cluster, ps.SGD(lr=0.5), copy=True)
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.5)
        given = ps.prefetch(batches(), model, ids=lambda batch: batch[1])
        losses = fit(model, optimizer, given)
        cluster.snapshot(tmp_path / "one").wait(30)
        return losses

    (losses,) = train([go], servers=2)
    assert losses == pytest.approx(wanted, rel=1e-5)

    back = Dlrm()
    for parameter in back.parameters():
        nn.init.zeros_(parameter)
    assert ps.extract(back, tmp_path / "one") is back
    for mine, theirs in zip(back.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_torchrecs_own_collection_is_converted() -> None:
    torchrec = pytest.importorskip("torchrec")

    def bags() -> nn.Module:
        made = torchrec.EmbeddingBagCollection(tables=[
            torchrec.EmbeddingBagConfig(
                name=c.name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=c.feature_names,
                pooling=torchrec.PoolingType[c.pooling],
            )
            for c in Bags().configs
        ])  # fmt: skip
        assert isinstance(made, nn.Module)
        return made

    def keyed(batch: tuple[Tensor, Jagged, Tensor]) -> tuple[Tensor, Any, Tensor]:
        ids = torchrec.KeyedJaggedTensor(KEYS, batch[1].ids, lengths=batch[1].counts)
        return batch[0], ids, batch[2]

    given = [keyed(batch) for batch in batches()]
    local = Dlrm(bags)
    wanted = fit(local, torch.optim.SGD(local.parameters(), lr=0.5), given)

    def go() -> list[float]:
        model = Dlrm(bags)
        cluster = ps.connect(server_names(1))
        ps.convert(model, cluster, ps.SGD(lr=0.5), copy=True)
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.SGD, lr=0.5)
        return fit(model, optimizer, ps.prefetch(given, model, ids=lambda batch: batch[1]))

    (losses,) = train([go])
    assert losses == pytest.approx(wanted, rel=1e-5)


class Plain(nn.Module):
    """Embeddings of torch's own, two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.same = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.same.weight = self.words.weight
        self.inner = nn.ModuleDict({"bags": nn.EmbeddingBag(ROWS, DIM, mode="max")})
        self.frozen = nn.Embedding(ROWS, DIM).requires_grad_(False)


def test_embeddings_are_converted_by_name_with_their_weights_options_and_rules() -> None:
    every = torch.arange(ROWS)

    def go() -> None:
        cluster = ps.connect(server_names(2))
        local, model = Plain(), Plain()
        rules = {"words": ps.Adam(lr=0.1), "inner.bags": ps.SGD(lr=0.2)}
        names = ["words", "same", "inner.bags"]
        assert ps.convert(model, cluster, rules, only=names, copy=True) is model

        words, bags, same = model.words, model.inner["bags"], model.same
        assert isinstance(words, ps.Embedding)
        assert isinstance(bags, ps.EmbeddingBag)
        assert isinstance(same, ps.Embedding)
        assert isinstance(model.frozen, nn.Embedding)
        assert same.table is words.table
        assert (words.padding_idx, bags.mode) == (0, "max")
        assert (words.table.rule, bags.table.rule) == (rules["words"], rules["inner.bags"])
        assert torch.equal(words(every), local.words(every))
        assert torch.equal(bags(every.view(-1, 3)), local.inner["bags"](every.view(-1, 3)))

        ps.convert(model, cluster, lambda name: ps.SGD(lr=1.0), only=lambda n, _: n == "frozen")
        assert isinstance(model.frozen, ps.Embedding)
        assert not model.frozen.rows.requires_grad

    train([go], servers=2)


def test_rows_that_are_there_already_stay_when_a_late_trainer_copies() -> None:
    def go() -> None:
        cluster = ps.connect(server_names(2))
        table = cluster.table("items", DIM, ps.SGD(lr=1.0), precision=ps.Precision.BFLOAT16)
        ids = torch.arange(10)
        table.fill(ids, torch.ones(10, DIM))
        table.push(ids[:3], torch.ones(3, DIM))
        table.fill(torch.arange(12), torch.full((12, DIM), 5.0))
        found = table.pull(torch.arange(12))[:, 0]
        assert found.tolist() == [0.0] * 3 + [1.0] * 7 + [5.0] * 2
        with pytest.raises(ValueError, match="all different"):
            table.fill(torch.tensor([1, 1]), torch.ones(2, DIM))
        assert cluster.step == 1

    train([go], servers=2)


def test_what_cannot_be_converted_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def go() -> None:
        cluster = ps.connect(server_names(1))
        rule = ps.SGD(lr=0.1)
        with pytest.raises(ValueError, match="there is no nn"):
            ps.convert(nn.Linear(2, 2), cluster, rule)
        with pytest.raises(ValueError, match="only has 'word', which is no embedding in it"):
            ps.convert(Plain(), cluster, rule, only=["word"])
        with pytest.raises(TypeError, match=r"give \['words'\]"):
            ps.convert(Plain(), cluster, rule, only="words")
        with pytest.raises(ValueError, match="optimizer has no rule for table 'words'"):
            ps.convert(Plain(), cluster, {"other": rule})
        with pytest.raises(TypeError, match=r"optimizer=0\.1 is a float, not a rule"):
            ps.convert(Plain(), cluster, 0.1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"max_norm=2\.0, which tables on servers do not have"):
            ps.convert(nn.Sequential(nn.Embedding(3, 2, max_norm=2.0)), cluster, rule)
        table = cluster.table("0", 2, rule)
        table.push(torch.tensor([7]), torch.ones(1, 2))
        cluster.snapshot(tmp_path / "one").wait(30)
        with pytest.raises(ValueError, match="table '0' has id 7, and the model's has 3 rows"):
            ps.extract(nn.Sequential(nn.Embedding(3, 2)), tmp_path / "one")
        with pytest.raises(ValueError, match="has dim=2 in the snapshot, but 5 in the model"):
            ps.extract(nn.Sequential(nn.Embedding(9, 5)), tmp_path / "one")

    train([go])
