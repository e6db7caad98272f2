"""The loaders of samples that count once, and mistakes in their use, in one process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tensorwire import parameter_server as ps
from tests.tensorwire.parameter_server.clusters import train
from tests.tensorwire.parameter_server.samples.counting import Counting


class Records(IterableDataset[int]):
    """The numbers that files are."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            yield from file.counted(file.source)


class Lazy(DataLoader[tuple[Tensor, ...]]):
    """Begins to read with its first batch."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


class Watched(DataLoader[Tensor]):
    """Knows how many iterations over it are alive."""

    alive = 0

    def __iter__(self) -> Any:
        self.alive += 1
        return self._watched(super().__iter__())

    def _watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        finally:
            self.alive -= 1


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Keeps what is in a cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_collector")
class TestTheLoader:
    """Its workers end with the loop, as torch's do, however that ends."""

    @pytest.mark.parametrize("prefetches", [False, True])
    @pytest.mark.parametrize("of_files", [False, True])
    def test_is_let_go_of_when_the_loop_is_left(self, prefetches: bool, of_files: bool) -> None:
        def go() -> list[float]:
            it = Counting(20)
            model = ps.Embedding(it.table)
            data: Any
            if of_files:
                data = it.cluster.samples(files=[range(10), range(10, 20)])
                loader = Watched(Records(data), batch_size=2)
            else:
                data = it.cluster.samples(20, batch_size=2)
                loader = Watched(torch.arange(20), batch_sampler=data)
            tracked = data.track(loader)

            def leave_by_an_error(batches: Iterable[Tensor]) -> None:
                for ids in batches:
                    assert loader.alive == 1
                    raise KeyError(ids)

            def batches() -> Iterable[Tensor]:
                return ps.prefetch(tracked, model, ids=lambda b: b) if prefetches else tracked

            for ids in batches():
                it.push(ids)
                break
            assert loader.alive == 0
            with contextlib.suppress(KeyError):  # keeps no frame of what it has caught
                leave_by_an_error(batches())
            assert loader.alive == 0
            for ids in batches():
                it.push(ids)
            assert loader.alive == 0
            return it.counts

        assert train([go]) == [[1.0] * 20]


class TestMistakes:
    def test_are_one_clear_error_each(self) -> None:
        def go() -> None:
            it = Counting(10)
            data = it.cluster.samples(10, batch_size=3)
            others = it.cluster.samples(6, batch_size=3, name="others")
            with pytest.raises(ps.DeclarationError, match=r"length=10, not 11"):
                it.cluster.samples(11, batch_size=3)
            with pytest.raises(ValueError, match="track: the loader's batch_sampler is"):
                data.track(it.loader(others))
            with pytest.raises(ValueError, match="in_order=False"):
                data.track(it.loader(data, in_order=False, num_workers=1))
            with pytest.raises(RuntimeError, match=r"iterate over data.track\(loader\)"):
                list(it.loader(data))
            with pytest.raises(ValueError, match="epoch=1 must be below 1"):
                data.set_epoch(1)
            with pytest.raises(ValueError, match="drop_last=True leaves no batch"):
                it.cluster.samples(2, batch_size=3, drop_last=True, name="none")
            with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
                it.cluster.samples(2, batch_size=0, name="none")
            for how, said in [
                ({"name": ""}, "name='' must have at least one character"),
                ({"name": "\ud800"}, r"name='\\ud800' has half a surrogate pair"),
                ({"epochs": 0}, "epochs=0 must be at least 1"),
                ({"epochs": 1 << 62}, "must be below"),
                ({"seed": -1}, "seed=-1 must be at least 0"),
            ]:
                with pytest.raises(ValueError, match=said):
                    it.cluster.samples(**{"length": 2, "batch_size": 1, "name": "none", **how})
            assert it.cluster.counting.account_of("others").done == ()

        train([go])

    def test_one_sampler_gives_out_nothing_while_batches_of_another_are_to_be_pushed(self) -> None:
        def go() -> None:
            it = Counting(6)
            one, other = (it.cluster.samples(6, batch_size=3, name=name) for name in "ab")
            first: Any = iter(one.track(it.loader(one)))
            second = iter(other.track(it.loader(other)))
            it.push(next(first)[0])
            it.push(next(second)[0])
            next(first)
            with pytest.raises(ValueError, match=r"sampler 'b': batches of sampler 'a' were given"):
                next(second)
            assert (one.progress.trained, other.progress.trained) == (3, 3)
            first.close()
            it.train(other)
            assert (one.progress.trained, other.progress.trained) == (3, 6)

        train([go])

    @pytest.mark.parametrize("kind", [DataLoader, Lazy])
    def test_a_loader_is_not_read_beside_the_loop_that_tracks_it(
        self, kind: type[DataLoader[tuple[Tensor, ...]]]
    ) -> None:
        def go() -> list[float]:
            it = Counting(20)
            data = it.cluster.samples(20, batch_size=2)
            loader = kind(TensorDataset(torch.arange(20)), batch_sampler=data)
            tracked = data.track(loader)
            for moment in (tracked, data.track(loader), tracked):
                with pytest.raises(RuntimeError, match=r"iterate over data.track\(loader\)"):
                    next(iter(loader))
                for (ids,) in moment:
                    with pytest.raises(RuntimeError, match=r"iterate over data.track\(loader\)"):
                        next(iter(loader))
                    it.push(ids)
                    if it.cluster.step % 4 == 0:
                        break
            return it.counts

        assert train([go]) == [[1.0] * 20]

    @pytest.mark.parametrize("is_same", [False, True])
    def test_a_loop_that_another_one_has_taken_the_place_of_ends_with_an_error(
        self, is_same: bool
    ) -> None:
        def go() -> list[float]:
            it = Counting(20)
            data = it.cluster.samples(20, batch_size=2)
            tracked = data.track(it.loader(data))
            first = iter(tracked)
            it.push(next(first)[0])
            second = iter(tracked if is_same else data.track(it.loader(data)))
            it.push(next(second)[0])
            with pytest.raises(RuntimeError, match="another loop over it has begun since"):
                next(first)
            for (ids,) in second:
                it.push(ids)
            return it.counts

        assert train([go]) == [[1.0] * 20]

    def test_a_batch_that_is_pushed_in_parts_is_refused(self) -> None:
        def go() -> None:
            it, model = Counting(6), nn.Linear(1, 1)
            ps.Optimizer(it.cluster, model, torch.optim.SGD, lr=0.1, pushing=ps.Pushing.BACKWARD)
            data = it.cluster.samples(6, batch_size=3)
            for (ids,) in data.track(it.loader(data)):
                with pytest.raises(ValueError, match=r"with cluster.samples use Pushing.STEP"):
                    model(ids.float().reshape(-1, 1)).sum().backward()
                break

        train([go])
