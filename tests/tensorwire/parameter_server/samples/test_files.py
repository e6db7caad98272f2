"""Files of which each record counts once: trainers and servers in one process."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from rpc.testing import MemoryHub, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.client.positions import LARGEST_POSITION
from tensorwire.parameter_server.decisions import tasks
from tests.tensorwire.parameter_server.clusters import run, train
from tests.waiting import until

SUM = ps.BSP(reduce=ps.Reduce.SUM)
under_each = pytest.mark.parametrize("under", [SUM, ps.SSP(1), ps.Async()], ids=str)

Source = tuple[int, int]
"""A file: the id of its first record, and how many it has."""


def sources(*lengths: int) -> list[Source]:
    """Files of so many records each, whose ids follow on each other."""
    return [(sum(lengths[:n]), length) for n, length in enumerate(lengths)]


LENGTHS = (7, 0, 12, 1, 5, 20, 3)


class Records(IterableDataset[int]):
    """The ids of the records of files."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            first, length = file.source
            yield from file.counted(range(first, first + length))


class Resumable(Records):
    """The same, with a state of its own, as torchdata's loader asks for."""

    def __init__(self, files: Any) -> None:
        super().__init__(files)
        self.place = 0
        self.begin = 0

    def __iter__(self) -> Iterator[int]:
        self.place, self.begin = self.begin, 0
        for file in self.files:
            first, length = file.source
            for each in range(first + self.place, first + length):
                self.place += 1
                yield each

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


class Listed:
    """A loader of one's own that keeps its place; batches of some records."""

    def __init__(self, dataset: IterableDataset[int], size: int) -> None:
        self.dataset, self.size, self.place, self.begin = dataset, size, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        records = iter(self.dataset)
        self.place, self.begin = self.begin, 0
        for _ in islice(records, self.place):
            pass
        while batch := list(islice(records, self.size)):
            self.place += len(batch)
            yield torch.tensor(batch)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["place"]


def with_workers(workers: int, how: str = "fork") -> Callable[[Any], Iterable[Tensor]]:
    def made(files: Any) -> Iterable[Tensor]:
        context = {"multiprocessing_context": how} if workers else {}
        return DataLoader(Records(files), batch_size=2, num_workers=workers, **context)

    return made


def stateful(dataset: Any, workers: int = 0) -> Callable[[Any], Iterable[Tensor]]:
    def made(files: Any) -> Iterable[Tensor]:
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")
        context = {"multiprocessing_context": "fork"} if workers else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # which it calls
            loader: Iterable[Tensor] = torchdata.StatefulDataLoader(
                dataset(files), batch_size=2, num_workers=workers, **context
            )
        return loader

    return made


def of_ones_own(files: Any) -> Iterable[Tensor]:
    return Listed(Records(files), 2)


LOADERS = {
    "in the process": with_workers(0),
    "in two workers": with_workers(2),
    "of ones own": of_ones_own,
    "torchdata": stateful(Records),
    "torchdata, with a state": stateful(Resumable),
}
with_each = pytest.mark.parametrize(
    ("loader", "under"),
    [(each, SUM) for each in LOADERS.values()]
    + [(with_workers(0), u) for u in (ps.SSP(1), ps.Async())],
    ids=[*LOADERS, "SSP", "Async"],
)


class Counting:
    """A trainer whose table counts how often each record was trained."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS, **connect: Any) -> None:
        options = {"servers": ["ps0"], "consistency": SUM, **connect}
        self.cluster = ps.connect(**options)
        self.table = self.cluster.table("counts", 1, ps.SGD(lr=1.0))
        self.lengths = lengths
        self.batches: list[list[int]] = []

    def files(self, **how: Any) -> ps.Files:
        return self.cluster.samples(files=sources(*self.lengths), **how)

    def push(self, ids: Tensor) -> None:
        self.table.push(ids, -torch.ones(len(ids), 1))
        self.batches.append(ids.tolist())

    def train(
        self,
        data: ps.Files,
        loader: Callable[[Any], Iterable[Tensor]] = LOADERS["in the process"],
        before: Callable[[int], object] = lambda _: None,
        most: int = 1_000_000,
    ) -> Counting:
        """Trains all, or so many batches."""
        for ids in islice(data.track(loader(data)), most):
            before(len(self.batches))
            self.push(ids)
        return self

    @property
    def counts(self) -> list[float]:
        return self.table.pull(torch.arange(sum(self.lengths))).flatten().tolist()

    @property
    def trained(self) -> list[int]:
        return [each for batch in self.batches for each in batch]


ALL = [1.0] * sum(LENGTHS)


class TestOneTrainer:
    @with_each
    def test_trains_each_record_once_an_epoch(self, under: Any, loader: Any) -> None:
        def go() -> tuple[list[float], ps.Progress]:
            it = Counting(consistency=under)
            data = it.files(epochs=2, shuffle=True, seed=3)
            assert len(data) == 14
            it.train(data, loader)
            return it.counts, data.progress

        ((counts, progress),) = train([go])
        assert counts == [2.0] * len(ALL)
        assert progress == ps.Progress(2, 14, 0, 0)

    @with_each
    def test_goes_on_from_the_last_push_when_the_loop_was_left(
        self, under: Any, loader: Any
    ) -> None:
        """Records that were read and not pushed come again, and none that were pushed."""

        def go() -> list[int]:
            it = Counting(consistency=under)
            data = it.files()
            for most in (1, 3, 4, 100):
                it.train(data, loader, most=most)
                for _ in data.track(loader(data)):
                    break
            assert it.counts == ALL
            return it.trained

        (trained,) = train([go])
        assert sorted(trained) == list(range(len(ALL)))

    def test_goes_on_in_workers_that_have_a_state(self) -> None:
        def go() -> list[int]:
            it, loader = Counting((5, 4)), stateful(Resumable, 2)
            data = it.files()
            it.train(data, loader, most=1)
            it.train(data, loader)
            return it.trained

        assert train([go]) == [list(range(9))]

    def test_accumulates_gradients_over_files(self, caplog: pytest.LogCaptureFixture) -> None:
        def go() -> tuple[list[float], ps.Progress]:
            it = Counting((5, 4, 6))
            data, some = it.files(), []
            for ids in data.track(LOADERS["in the process"](data)):
                some.append(ids)
                if len(some) == 3:
                    it.push(torch.cat(some))
                    some = []
            assert len(some) == 2
            it.push(torch.cat(some))
            return it.counts, data.progress

        assert train([go]) == [([1.0] * 15, ps.Progress(1, 3, 0, 0))]
        assert any("the last 2 batches were given out and not" in told for told in caplog.messages)

    def test_trains_one_epoch_at_a_time(self) -> None:
        def go() -> list[list[int]]:
            it, orders = Counting((3, 3, 3)), []
            data = it.files(shuffle=True, seed=1, epochs=3)
            for epoch in range(3):
                it.batches = []
                data.set_epoch(epoch)
                assert len(data) == 3
                it.train(data)
                orders.append(it.trained)
            return orders

        (orders,) = train([go])
        assert all(sorted(each) == list(range(9)) for each in orders)
        assert len({tuple(each) for each in orders}) > 1


class TestSeveralTrainers:
    def test_get_the_same_files_in_every_run(self) -> None:
        def go() -> tuple[int, list[list[int]]]:
            it = Counting(trainers=2)
            it.train(it.files(shuffle=True, seed=5, epochs=2))
            assert it.counts == [2.0] * len(ALL)
            return it.cluster.number, it.batches

        one, two = sorted(train([go] * 2)), sorted(train([go] * 2))
        assert one == two

    def test_get_files_of_who_has_long_ones(self) -> None:
        """The first trainer is dealt the long files; the other takes some as it has none left."""

        def go() -> int:
            it = Counting((40, 1, 40, 1, 40, 1, 40, 1), trainers=2)
            it.train(it.files())
            assert it.counts == [1.0] * 164
            return len(it.trained)

        assert all(62 <= each <= 102 for each in train([go] * 2))

    @under_each
    def test_go_on_in_files_of_who_joins_leaves_and_dies(self, under: Any) -> None:
        hub, left, died = MemoryHub(), threading.Event(), threading.Event()
        lengths = (20, 2, 15, 17, 1, 14)

        def stays() -> list[float]:
            it = Counting(lengths, trainers=2, consistency=under)

            def wait(step: int) -> None:
                if step == 5:
                    assert left.wait(60)
                    until(lambda: len(it.cluster.stats()["trainers"]) == 2, 60)
                if step == 12 and under is not SUM:
                    assert died.wait(60)

            return it.train(it.files(epochs=2), before=wait).counts

        def leaves() -> list[float]:
            it = Counting(lengths, trainers=2, consistency=under)
            it.train(it.files(epochs=2), most=3)
            it.cluster.finish()
            left.set()
            return []

        def dies() -> list[float]:
            assert left.wait(60)
            it = Counting(lengths, trainers=2, consistency=under)
            data = it.files(epochs=2)
            for ids in data.track(LOADERS["in the process"](data)):
                if len(it.batches) == 3:
                    break
                it.push(ids)
            hub.cut(3)
            died.set()
            return []

        with local_group("ps0", "trainer0", "trainer1", "trainer2", hub=hub) as agents:
            found = run(agents[1:], [stays, leaves, dies])
        assert found[0] == [2.0] * sum(lengths)

    @under_each
    def test_keep_to_a_static_assignment(self, under: Any) -> None:
        def go(rank: int) -> Callable[[], list[int]]:
            def train_share() -> list[int]:
                it = Counting((4, 9, 2, 3), trainers=2, consistency=under)
                data = it.files(assignment="static", rank=rank, num_replicas=2)
                assert it.train(data).counts == [1.0] * 18
                return it.trained

            return train_share

        assert train([go(0), go(1)]) == [[*range(4), 13, 14], [*range(4, 13), 15, 16, 17]]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> MemoryHub:
    """A network in which nobody waits for servers that do not come back."""
    monkeypatch.setattr(tasks, "PATIENCE", 0.05)
    return MemoryHub()


class TestTheCluster:
    @pytest.mark.parametrize(
        ("loader", "prefetches", "under", "assignment"),
        [
            ("in the process", False, SUM, "dynamic"),
            ("in two workers", True, SUM, "dynamic"),
            ("of ones own", True, ps.SSP(1), "dynamic"),
            ("in the process", True, ps.Async(), "dynamic"),
            ("in two workers", False, SUM, "static"),
            ("in the process", True, ps.Async(), "static"),
        ],
        ids=str,
    )
    def test_goes_back_and_the_same_loop_goes_on(
        self,
        tmp_path: Path,
        impatient: MemoryHub,
        loader: str,
        prefetches: bool,
        under: Any,
        assignment: str,
    ) -> None:
        hub, cut, lengths = impatient, threading.Lock(), (13, 1, 10, 8, 0, 12)

        def go() -> tuple[list[float], int]:
            it = Counting(lengths, servers=["ps0", "ps1"], trainers=2, consistency=under)
            model = ps.Embedding(it.table)
            optimizer = ps.Optimizer(it.cluster, model)
            share = {"rank": it.cluster.number, "num_replicas": 2}
            how = {"assignment": assignment, **(share if assignment == "static" else {})}
            data = it.files(shuffle=True, epochs=2, **how)
            batches: Any = data.track(LOADERS[loader](data))
            if prefetches:
                batches = ps.prefetch(batches, model, ids=lambda batch: batch)
            for ids in batches:
                try:
                    (-model(ids)).sum().backward()
                    optimizer.step()
                    if it.cluster.step == 8 and not it.cluster.session.rollbacks:
                        it.cluster.snapshot(tmp_path / "8").wait(60)
                    if it.cluster.step == 13 and cut.acquire(blocking=False):
                        hub.cut(1)
                except ps.RolledBack:
                    pass
                except ps.SnapshotError:
                    assert under is not SUM  # the other has cut a server off before its own step 8
                optimizer.zero_grad()
            assert data.progress == ps.Progress(2, 12, 0, 0)
            return it.counts, it.cluster.session.rollbacks

        with local_group("ps0", "ps1", "trainer0", "trainer1", hub=hub) as agents:
            found = run(agents[2:], [go, go])
        assert found == [([2.0] * sum(lengths), 1)] * 2

    @pytest.mark.parametrize("trainers", [1, 3])
    def test_is_restored_into_another_number_of_trainers(
        self, tmp_path: Path, trainers: int
    ) -> None:
        lengths = (21, 9, 14, 3)

        def begin() -> list[int]:
            it = Counting(lengths, trainers=2)
            for ids in (data := it.files()).track(LOADERS["in the process"](data)):
                it.push(ids)
                if it.cluster.step == 4:
                    it.cluster.snapshot(tmp_path / "4").wait(60)
                    break
            return it.trained

        def go_on() -> tuple[list[int], list[float]]:
            it = Counting(lengths, trainers=trainers, restore=tmp_path / "4")
            with pytest.raises(ps.DeclarationError, match="declared otherwise before: files of"):
                it.cluster.samples(files=[(0, 21), (21, 9), (30, 14), (44, 4)])
            with pytest.raises(ps.DeclarationError, match="4 files, not 1"):
                it.cluster.samples(files=[(0, 47)])
            with pytest.raises(ps.DeclarationError, match="seed=0, not 1"):
                it.files(seed=1)
            with pytest.raises(ps.DeclarationError, match="files, not a length"):
                it.cluster.samples(4, batch_size=1)
            it.train(it.files())
            return it.trained, it.counts

        before = [each for some in train([begin] * 2) for each in some]
        after = train([go_on] * trainers)
        assert len(before) == 16
        assert sorted([*before, *(n for found, _ in after for n in found)]) == list(range(47))
        assert all(counts == [1.0] * 47 for _, counts in after)

    @under_each
    def test_is_resized_and_loses_a_head(self, under: Any) -> None:
        hub, lengths = MemoryHub(), (25, 2, 25, 20, 1, 23)

        def go() -> list[float]:
            it = Counting(lengths, servers=["ps0", "ps1"], backups=1, trainers=2, consistency=under)

            def disturb(step: int) -> None:
                if it.cluster.number == 0 and step == 5:
                    it.cluster.resize(["ps1", "ps2"])
                if it.cluster.number == 0 and step == 15:
                    hub.cut(1)

            it.train(it.files(), before=disturb)
            assert it.cluster.session.rollbacks == 0
            return it.counts

        with local_group("ps0", "ps1", "ps2", "trainer0", "trainer1", hub=hub) as agents:
            assert run(agents[3:], [go, go]) == [[1.0] * sum(lengths)] * 2

    def test_tells_how_far_all_are(self) -> None:
        def go() -> None:
            it = Counting((6, 4, 4))
            data = it.files()
            it.train(data, most=5)  # the end of the first file came with the fourth
            stats, state = it.cluster.stats(), data.state_dict()
            told = {"epoch": 0, "trained": 1, "in_flight": 1, "left": 1}
            assert stats["samples"] == {"samples": told}
            (shard,) = stats["servers"]["ps0"]["shards"].values()
            assert (shard["batches"], shard["begun"]) == ({"samples": 1}, {"samples": 1})
            assert state["trained"] == [[0, 1]]
            assert [each[:2] for each in state["begun"]] == [[1, 2]]
            data.load_state_dict(state)
            data.load_state_dict({**state, "trained": [], "begun": []})
            ahead = [[1, 3, state["begun"][0][2]], [2, 1, state["begun"][0][2]]]
            with pytest.raises(ValueError, match="2 files of sampler 'samples' that were trained"):
                data.load_state_dict({**state, "begun": ahead})
            with pytest.raises(ValueError, match="is not of state_dict"):
                data.load_state_dict({**state, "begun": [[1, 3, "no base64"]]})
            it.train(data)
            data.load_state_dict({**state, "begun": ahead})

        train([go])


class Reporting(IterableDataset[int]):
    """A data set that says of each record what a test has it say."""

    def __init__(self, files: Any, positions: list[Any]) -> None:
        self.files, self.positions = files, positions

    def __iter__(self) -> Iterator[int]:
        kept = []
        for file in self.files:
            for number in range(2):
                if self.positions:
                    file.position = self.positions[number]
                yield number
            kept.append(file)
            if len(kept) == 2:
                kept[0].position = 1


class TestMistakes:
    @pytest.mark.parametrize(
        ("positions", "error", "said"),
        [
            ([], RuntimeError, "which says no position; its data set must"),
            ([5, 4], ValueError, "position=4 in file 'a' is less than 5"),
            ([lambda: 0] * 2, TypeError, "file 'a' cannot be kept, as it has a function, which"),
            (["x" * LARGEST_POSITION] * 2, ValueError, "'a' has .* bytes, and must have at most"),
            ([1, 2], RuntimeError, "file 'a' is another trainer's, or done"),
        ],
    )
    def test_in_positions_are_one_clear_error_each(
        self, positions: list[Any], error: type[Exception], said: str
    ) -> None:
        def go() -> None:
            it = Counting()
            data = it.cluster.samples(files=["a", "b"])
            batches = data.track(DataLoader(Reporting(data, positions), batch_size=1))
            with pytest.raises(error, match=said):
                list(map(it.push, batches))

        train([go])

    def test_are_one_clear_error_each(self) -> None:
        def go() -> None:
            it = Counting()
            data = it.files()
            for how, error, said in [
                ({"length": 3}, ValueError, "length=3 is given beside files="),
                ({"batch_size": 3}, ValueError, "batch_size=3 is given beside files="),
                ({"drop_last": True}, ValueError, "drop_last=True is given beside files="),
                ({"files": []}, ValueError, r"files=\[\] must have at least one source"),
                ({"files": "a"}, TypeError, "files='a' is a str, not a list of sources"),
                ({"files": bytearray(b"a")}, TypeError, "is a bytearray, not a list of sources"),
                ({"files": ["a", "b", "./a"]}, ValueError, r"files\[2\]='./a' is files\[0\]='a'"),
                ({"name": ""}, ValueError, "samples: name='' must have at least one character"),
                ({"files": [threading.Lock()]}, TypeError, r"files\[0\]=.* cannot be pickled"),
            ]:
                with pytest.raises(error, match=said):
                    it.cluster.samples(**{"files": ["a"], "name": "others", **how})
            with pytest.raises(TypeError, match="must both be given, or files= in their place"):
                it.cluster.samples(5)
            with pytest.raises(ps.DeclarationError, match="files, not a length"):
                it.cluster.samples(5, batch_size=5)
            records = Records(data)
            for loader, error, said in [
                (5, TypeError, "loader=5 is a int, not a DataLoader"),
                ([1], TypeError, r"nobody can tell how far .*loader=\[1\].*torchdata"),
                (DataLoader([1, 2]), TypeError, "nobody can tell how far"),
                (DataLoader(records, drop_last=True), ValueError, "made with drop_last=True"),
                (
                    DataLoader(records, num_workers=1, persistent_workers=True),
                    ValueError,
                    "made with persistent_workers=True",
                ),
            ]:
                with pytest.raises(error, match=said):
                    data.track(loader)
            with pytest.raises(RuntimeError, match=r"iterate over data.track\(loader\)"):
                list(records)

        train([go])

    def test_in_data_sets_are_one_clear_error_each(self) -> None:
        class Others(Records):
            def __iter__(self) -> Iterator[int]:
                yield 5

        class Twice(Records):
            def __iter__(self) -> Iterator[int]:
                yield from super().__iter__()
                yield from super().__iter__()

        class Changing(DataLoader[int]):
            def __iter__(self) -> Any:
                yield from super().__iter__()

        def go() -> None:
            it = Counting((2, 2))
            data = it.files()
            with pytest.raises(RuntimeError, match="a Tensor that its collate_fn has not made"):
                it.train(data, lambda files: Changing(Records(files)))
            with pytest.raises(RuntimeError, match="a batch of no file; its data set must"):
                it.train(data, lambda files: DataLoader(Others(files)))
            with pytest.raises(RuntimeError, match="iterates over its files a second time"):
                it.train(data, lambda files: DataLoader(Twice(files)))

        train([go])
