"""A followed model has each version whole, bit for bit, and modules work on it."""

from __future__ import annotations

import copy
import logging
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorwire import checkpoint
from tensorwire import parameter_server as ps
from tensorwire.checkpoint import DamagedCheckpointError, MismatchError
from tensorwire.checkpoint.following import Held
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.errors import DeclarationError, SnapshotError
from tensorwire.parameter_server.following.content import Content, initialiser_of, taken
from tensorwire.parameter_server.following.rows import TableRows
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.rows.index import Index
from tests import waiting
from tests.tensorwire.checkpoint.folders import flip
from tests.tensorwire.parameter_server.clusters import train
from tests.tensorwire.parameter_server.following.chains import (
    ITEMS,
    Published,
    random_rows,
    same,
)

_IDS = range(-20, 200)


@contextmanager
def _followed(folder: Path, max_pinned: int = 2) -> Iterator[ps.FollowedModel]:
    with ps.follow(folder, interval=0.01, max_pinned=max_pinned) as model:
        yield model


def _expected(published: Published, name: str, ids: Sequence[int]) -> torch.Tensor:
    """The rows of ids by the chain's own book; without a row, their initial values."""
    spec = next(each for each in published.tables.values() if each.name == name)
    out = np.zeros((len(ids), spec.dim), np.float32)
    spec.init.fill(out, np.arange(len(ids)), np.array(list(ids)))
    for place, each in enumerate(ids):
        if each in published.rows[name]:
            out[place] = published.rows[name][each].float().numpy()
    return torch.from_numpy(out)


def _assert_same(model: ps.FollowedModel | ps.FollowedView, published: Published) -> None:
    view = model.view() if isinstance(model, ps.FollowedModel) else model
    for name in published.rows:
        found = view.pull(name, torch.tensor(_IDS))
        torch.testing.assert_close(found, _expected(published, name, _IDS), rtol=0, atol=0)


def test_rows_are_those_of_the_newest_version(tmp_path: Path) -> None:
    with Published(tmp_path) as published:
        published.base(3, {"items": random_rows(1, range(150)), "a/b c": same(0.3, range(9), 2)})
        with _followed(tmp_path) as model:
            assert (model.version, model.step, model.tables) == (0, 3, ["a/b c", "items"])
            _assert_same(model, published)
            version = published.delta(4, {"items": random_rows(2, range(100, 180, 3))})
            model.wait_for(version.number, timeout=60)
            _assert_same(model, published)
            version = published.delta(5, {"items": random_rows(3, [7, 300])}, range(0, 120, 7))
            model.wait_for(step=5, timeout=60)
            assert model.version == version.number
            _assert_same(model, published)
            found = model.table("items").pull(torch.tensor([[7, 300], [14, 7]]))
            assert found.shape == (2, 2, 4)
            assert torch.equal(found[0, 0], found[1, 1])
            assert model.view().extra == {"step": 5}


@pytest.mark.parametrize("seed", range(3))
def test_every_version_is_exact_whatever_is_pinned_meanwhile(seed: int, tmp_path: Path) -> None:
    """Bases, deltas, evicted and reborn rows; views of older versions stay what they were."""
    dice = random.Random(seed)
    with Published(tmp_path, shards=dice.choice((1, 3))) as published:
        held: Held[Content] | None = None
        kept: list[tuple[ps.FollowedView, dict[str, torch.Tensor]]] = []
        for step in range(12):
            gone = dice.sample(range(200), dice.choice((0, 3, 40)))
            ids = dice.sample(_IDS, dice.choice((1, 10, 90)))
            users = dice.sample(_IDS, 5)
            kind = published.base if not step or dice.random() < 0.2 else published.delta
            rows = {"items": random_rows(step, ids), "a/b c": random_rows(step, users, 2)}
            version = kind(step, rows, gone)
            held = Held(version, taken(held, version))
            view = ps.FollowedView(held)
            _assert_same(view, published)
            assert held.value.tables["items"].rows.count == len(published.rows["items"])
            every = torch.tensor(_IDS)
            kept.append((view, {name: view.pull(name, every) for name in published.rows}))
            if dice.random() < 0.6:
                dice.shuffle(kept)
                del kept[dice.randrange(len(kept)) :]
            for old, expected in kept:
                for name, each in expected.items():
                    assert torch.equal(old.pull(name, every), each), f"seed {seed}, step {step}"


def test_a_delta_takes_the_memory_of_its_rows(tmp_path: Path) -> None:
    """Places of replaced rows are used again, and the index has all ids in the end."""
    count = 3000
    with Published(tmp_path, tables=(ITEMS,)) as published:
        version = published.base(0, {"items": random_rows(0, range(count))})
        held = Held(version, taken(None, version))
        rows = held.value.tables["items"].rows.rows
        for step in range(1, 12):
            ids = random.Random(step).sample(range(count), count // 100)
            version = published.delta(step, {"items": random_rows(step, ids)})
            held = Held(version, taken(held, version))
        assert rows.capacity <= count * 1.03
        view = held.value.tables["items"].rows
        index = Index(kernels())
        index.upsert(np.arange(count))
        assert rows.bytes + view.overlay.bytes <= 1.2 * (count * 4 * 4 + index.bytes)
        assert len(view.overlay.ids) == count // 100
        del view
        version = published.base(30, {"items": random_rows(99, range(50))}, [1])
        held = Held(version, taken(held, version))
        assert held.value.tables["items"].rows.rows is rows
        assert rows.capacity <= count * 1.05


def test_lookups_of_many_threads_are_each_of_one_version(tmp_path: Path) -> None:
    """All rows hold their step; no lookup may see two."""
    ids = torch.randperm(300)
    torn: list[object] = []
    seen: set[float] = set()
    over = threading.Event()
    with Published(tmp_path, tables=(ITEMS,), keep_bases=2) as published:
        published.base(0, {"items": same(0, range(300))})
        with _followed(tmp_path) as model:
            table = model.table("items")

            def read() -> None:
                while not over.is_set():
                    values = set(table.pull(ids).flatten().tolist())
                    seen.update(values)
                    if len(values) != 1:
                        torn.append(values)

            def read_pinned() -> None:
                while not over.is_set():
                    with model.pinned() as view:
                        values = {float(table.pull(ids[a : a + 50]).max()) for a in (0, 100, 200)}
                        if values != {float(view.step)}:
                            torn.append((view.step, values))

            readers = [threading.Thread(target=each) for each in (read, read, read_pinned)]
            for each in readers:
                each.start()
            for step in range(1, 8):
                kind = published.delta if step % 4 else published.base
                kind(step, {"items": same(step, range(300))})
                waiting.until(lambda step=step: step in seen, 60)  # type: ignore[misc]
            over.set()
            for each in readers:
                each.join()
    assert not torn


def test_modules_serve_from_a_followed_model(tmp_path: Path) -> None:
    with Published(tmp_path) as published:
        rows = {"items": random_rows(1, range(100)), "a/b c": random_rows(2, range(50), 2)}
        published.base(1, rows)
        with _followed(tmp_path) as model, torch.inference_mode():
            items, users = model.table("items"), model.table("a/b c")
            ids = torch.tensor([[3, 1, 3], [99, 150, 4]])
            expected = _expected(published, "items", ids.flatten().tolist()).view(2, 3, 4)
            assert torch.equal(ps.Embedding(items)(ids), expected)
            for _ in range(2):
                bag = ps.EmbeddingBag(items, mode="sum")(ids)
                torch.testing.assert_close(bag, expected.sum(1))
            bags = ps.EmbeddingBagCollection({"item": items, "other": items, "user": users})
            given = {"item": ids, "other": ids[:, :1], "user": torch.tensor([[1], [60]])}
            for _ in range(2):
                found = bags(given)
                torch.testing.assert_close(found["item"], expected.sum(1))
                user = _expected(published, "a/b c", [1, 60])
                assert torch.equal(found["user"], user)
            ids[0, 0] = 5  # in place: what was planned for these ids holds no more
            again = _expected(published, "items", ids.flatten().tolist()).view(2, 3, 4)
            torch.testing.assert_close(bags(given)["item"], again.sum(1))
            single = ps.EmbeddingCollection({"item": items})
            assert torch.equal(copy.deepcopy(single)({"item": ids})["item"], again)


def test_a_collections_lookup_in_many_tables_is_of_one_version(tmp_path: Path) -> None:
    """A newer version takes its place while the tables of one forward pass are looked up."""
    with Published(tmp_path) as published:
        published.base(0, {"items": same(0, range(9)), "a/b c": same(0, range(9), 2)})
        with _followed(tmp_path) as model:
            items, users = model.table("items"), model.table("a/b c")
            bags = ps.EmbeddingCollection({"item": items, "user": users})
            ids = torch.tensor([[1, 2]])
            newer = iter([1])

            def publish_between() -> None:
                for step in newer:
                    rows = {"items": same(step, range(9)), "a/b c": same(step, range(9), 2)}
                    published.delta(step, rows)
                    model.wait_for(step=step, timeout=60)

            fetch = ps.FollowedView.fetch

            def slowly(view: ps.FollowedView, ids: Any) -> torch.Tensor:
                found = fetch(view, ids)
                publish_between()
                return found

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ps.FollowedView, "fetch", slowly)
                assert float(bags({"item": ids, "user": ids}).values().abs().max()) == 0
            assert float(bags({"item": ids, "user": ids}).values().min()) == 1


def test_rows_of_a_followed_table_get_no_gradient(tmp_path: Path) -> None:
    with Published(tmp_path) as published:
        published.base(1, {"items": random_rows(1, range(10))})
        with _followed(tmp_path) as model:
            module = ps.EmbeddingBag(model.table("items"), mode="sum")
            assert not module(torch.tensor([[1, 2]])).requires_grad
            assert not any(each.requires_grad for each in module.parameters())


def test_dense_parameters_come_with_each_version(tmp_path: Path) -> None:
    with Published(tmp_path) as published:
        published.base(0, {"items": same(1, range(3))})
        with _followed(tmp_path) as model:
            for step in (1, 2):
                published.weights = [torch.full_like(each, step) for each in published.weights]
                published.delta(step)
                model.wait_for(step=step, timeout=60)
                net = nn.Linear(3, 2)
                model.load_into(net)
                assert all(bool((each == step).all()) for each in net.parameters())
            assert [tuple(each.shape) for each in model.dense()] == [(2, 3), (2,)]
            with pytest.raises(DeclarationError, match=r"no dense parameters 'x', but \['model'\]"):
                model.dense("x")
            with pytest.raises(ValueError, match="load_into: 'model' has parameters"):
                model.load_into(nn.Linear(4, 2))


def _copy(version: checkpoint.Version, folder: Path) -> Path:
    """Puts a copy of a version into another folder, all at once."""
    shutil.copytree(version.folder, folder.parent / "one")
    return (folder.parent / "one").rename(folder / version.folder.name)


def test_damage_and_gaps_are_refused_and_the_old_version_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied = tmp_path / "copied"
    copied.mkdir()
    with (
        Published(tmp_path / "chain", tables=(ITEMS,)) as published,
        caplog.at_level(logging.WARNING, "tensorwire"),
    ):
        _copy(published.base(0, {"items": same(0, range(80))}), copied)
        with _followed(copied) as model:
            first = published.delta(1, {"items": same(1, range(80))})
            file, _ = first.folder.glob("shard1-*.safetensors")
            flip(file, -1)
            _copy(first, copied)
            waiting.until(lambda: "its checksum is" in str(model.error))
            assert isinstance(model.error, DamagedCheckpointError)
            gone = (copied / first.folder.name).rename(copied / "aside")
            _copy(published.delta(2, {"items": same(2, range(80))}), copied)
            waiting.until(lambda: "does not have" in str(model.error))
            assert model.version == 0
            assert bool((model.table("items").pull(torch.arange(80)) == 0).all())
            with pytest.raises(TimeoutError, match="does not have"):
                model.wait_for(2, timeout=0.01)
            _copy(published.base(3, {"items": same(3, range(80))}), copied)
            model.wait_for(3, timeout=60)
            _assert_same(model, published)
        assert str(model.error) == "None"
    assert gone.exists()
    said = [each.getMessage() for each in caplog.records]
    assert sum("version 0 of" in each and "is served on" in each for each in said) == len(said) >= 2


def test_what_is_no_model_or_another_one_is_refused(tmp_path: Path) -> None:
    checkpoint.publish({"x": nn.Linear(2, 2)}, tmp_path / "weights").close()
    with pytest.raises(SnapshotError, match="is no version of a parameter server's state"):
        ps.follow(tmp_path / "weights")
    with Published(tmp_path / "a") as published:
        published.base(0, {"items": same(0, range(5))})
    with Published(tmp_path / "b") as published:
        published.base(0)
        other = published.delta(1)
    with _followed(tmp_path / "a") as model:
        _copy(other, tmp_path / "a")
        waiting.until(lambda: isinstance(model.error, MismatchError))
        assert "are of different chains" in str(model.error) or "another chain" in str(model.error)
        assert model.version == 0


def test_a_version_that_fails_half_way_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out at the second table, after the rows of the first one were written."""
    with Published(tmp_path) as published:
        version = published.base(0, {"items": same(0, range(60)), "a/b c": same(0, range(60), 2)})
        held = Held(version, taken(None, version))
        rows = held.value.tables["items"].rows.rows
        next_one = published.delta(1, {"items": same(1, range(60)), "a/b c": same(1, range(60), 2)})
        before = rows.capacity
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(TableRows, "write", _without_memory(TableRows.write))
                with pytest.raises(MemoryError):
                    taken(held, next_one)
        assert rows.capacity == before + 60
        view = ps.FollowedView(held)
        assert torch.equal(view.pull("items", torch.arange(60)), torch.zeros(60, 4))
        held = Held(next_one, taken(held, next_one))
        assert rows.capacity == before + 60
        _assert_same(ps.FollowedView(held), published)


def _without_memory(write: Any) -> Any:
    """Writes rows of tables with four columns, and has no memory for others."""

    def wrapped(rows: TableRows, values: Any) -> Any:
        if rows.dim != 4:
            raise MemoryError
        return write(rows, values)

    return wrapped


def test_a_pinned_version_holds_newer_ones_back_only_at_the_bound(tmp_path: Path) -> None:
    with Published(tmp_path, tables=(ITEMS,)) as published:
        published.base(0, {"items": same(0, range(30))})
        with _followed(tmp_path, max_pinned=2) as model:
            with model.pinned() as view:
                for step in (1, 2):
                    published.delta(step, {"items": same(step, range(30))})
                model.wait_for(step=2, timeout=60)
                assert (model.version, view.version, model.step) == (0, 0, 0)
                assert float(model.table("items").pull(torch.tensor([3])).max()) == 0
            assert model.version == 2


def test_mistakes_are_told(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="folder=3 is a int"):
        ps.follow(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="interval=0"):
        ps.follow(tmp_path, interval=0)
    with pytest.raises(ValueError, match="max_pinned=0"):
        ps.follow(tmp_path, max_pinned=0)
    with pytest.raises(TimeoutError, match="has no version after"):
        ps.follow(tmp_path / "none", timeout=0)
    with Published(tmp_path) as published:
        published.base(0)
        with _followed(tmp_path) as model:
            one = tmp_path / "0000000000.base"
            with pytest.raises(
                ValueError, match=r"is one version; follow the folder that it is in"
            ):
                ps.follow(one)
            with pytest.raises(DeclarationError, match=r"no table 'x', but \['a/b c', 'items'\]"):
                model.table("x")
            with pytest.raises(TypeError, match=r"ids are torch.int32"):
                model.table("items").pull(torch.zeros(2, dtype=torch.int32))
            assert repr(model) == "FollowedModel(version=0, step=0, tables=['a/b c', 'items'])"
            assert repr(model.table("items")) == "FollowedTable('items', dim=4)"


class _Mine(ps.Initialiser):
    def fill(self, out: object, places: object, ids: object) -> None:
        """Rows begin as they are."""


def test_initial_values_of_ones_own_are_told_and_not_made_up(tmp_path: Path) -> None:
    spec = TableSpec("items", 4, ps.SGD(lr=0.1), _Mine())
    with Published(tmp_path, tables=(spec,)) as published:
        published.base(0, {"items": same(1, range(3))})
        with _followed(tmp_path) as model:
            assert float(model.table("items").pull(torch.tensor([2])).max()) == 1
            with pytest.raises(SnapshotError, match=r"id 9 has no row .* begin with .*_Mine"):
                model.table("items").pull(torch.tensor([2, 9]))
    assert initialiser_of(repr(ps.Normal(0.5, 1.0, 3))) == ps.Normal(0.5, 1.0, 3)
    with pytest.raises(SnapshotError, match="cannot be"):
        initialiser_of("Normal(std=open())")


def test_a_follower_reads_what_a_cluster_publishes_while_it_trains(tmp_path: Path) -> None:
    """With state, so that rows have more columns than their weights; servers come and go."""
    ids = torch.arange(40)

    def go() -> torch.Tensor:
        cluster = ps.connect(["ps0", "ps1"])
        items = cluster.table("items", 4, ps.Adagrad(lr=1.0), init=ps.Uniform(0.3))
        published = cluster.publish(tmp_path, ps.Steps(1000), base_every=3, state=True)
        published.wait()
        with _followed(tmp_path) as model:
            bag = ps.EmbeddingBag(model.table("items"), mode="sum")
            for step in range(1, 7):
                items.push(ids[step::3], torch.full((len(ids[step::3]), 4), 0.5 + step))
                if step == 3:
                    cluster.resize(["ps1", "ps2"])
                wanted = items.pull(ids)
                published.take()
                published.wait()
                model.wait_for(step=step, timeout=60)
                assert torch.equal(model.table("items").pull(ids), wanted), step
                with torch.inference_mode():
                    torch.testing.assert_close(bag(ids[None]), wanted.sum(0, keepdim=True))
        published.stop()
        cluster.finish()
        return wanted

    train([go], servers=3)


def test_rows_are_followed_over_the_network(tmp_path: Path) -> None:
    """Bases and deltas, by a process that does not see the folder."""
    key = tmp_path / "reader.key"
    key.write_bytes(checkpoint.reader_key(b"the group's"))
    key.chmod(0o600)
    with (
        Published(tmp_path / "chain") as published,
        checkpoint.ChainServer(tmp_path / "chain", key.read_bytes()) as served,
    ):
        published.base(3, {"items": random_rows(1, range(150)), "a/b c": same(0.3, range(9), 2)})
        published.delta(4, {"items": random_rows(2, range(100, 180, 3))}, range(5))
        url = f"tensorwire://localhost:{served.port}"
        with ps.follow(url, key_file=key, interval=0.01) as model:
            assert (model.version, model.step) == (1, 4)
            _assert_same(model, published)
            published.delta(5, {"items": random_rows(3, [7, 300])}, range(0, 120, 7))
            model.wait_for(step=5, timeout=60)
            _assert_same(model, published)
