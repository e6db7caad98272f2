"""The samples that a step counts as trained, and how programs see that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpc.testing import MemoryHub, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.decisions import tasks
from tests.tensorwire.parameter_server.clusters import run, train
from tests.tensorwire.parameter_server.samples.counting import SUM, Counting

under_each = pytest.mark.parametrize("under", [SUM, ps.SSP(1), ps.Async()], ids=str)

Backward = Callable[[ps.Optimizer, Tensor], object]


def _not_finite(_: ps.Optimizer, loss: Tensor) -> None:
    (loss * torch.inf).backward()


def _skipped(optimizer: ps.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.zero_grad()


class TestAStepThatMovesNothing:
    @under_each
    @pytest.mark.parametrize("nothing", [_not_finite, _skipped])
    def test_counts_its_batch_as_trained(self, nothing: Backward, under: Any) -> None:
        """The second of two trainers' batches is left out by ``nans=``, or has no gradients."""

        def go() -> tuple[list[float], ps.Progress, int]:
            it = Counting(40, trainers=2, consistency=under, nans=ps.NanPolicy.SKIP)
            model = ps.Embedding(it.table)
            optimizer = ps.Optimizer(it.cluster, model)
            data = it.cluster.samples(40, batch_size=2)
            for (ids,) in data.track(it.loader(data)):
                loss = -model(ids).sum()
                if ids[0] % 8 == 4:
                    nothing(optimizer, loss)
                else:
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return it.counts, data.progress, it.cluster.bad_steps

        found = train([go] * 2)
        expected = [0.0 if each % 8 in (4, 5) else 1.0 for each in range(40)]
        assert [each[:2] for each in found] == [(expected, ps.Progress(1, 40, 0, 0))] * 2
        assert sum(bad for *_, bad in found) == (5 if nothing is _not_finite else 0)

    def test_counts_its_batch_as_trained_where_a_scaler_finds_infinities(self) -> None:
        def go() -> tuple[list[float], ps.Progress]:
            it = Counting(12)
            model = ps.Embedding(it.table)
            optimizer = ps.Optimizer(it.cluster, model)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
            data = it.cluster.samples(12, batch_size=2)
            for (ids,) in data.track(it.loader(data)):
                weight = torch.inf if ids[0] == 4 else 1.0
                scaler.scale(-model(ids).sum() * weight).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return it.counts, data.progress

        expected = [0.0 if each in (4, 5) else 1.0 for each in range(12)]
        assert train([go]) == [(expected, ps.Progress(1, 12, 0, 0))]


class TestASecondStep:
    @under_each
    def test_is_refused_as_it_has_no_batch_of_its_own(self, under: Any) -> None:
        def go() -> list[float]:
            it = Counting(12, consistency=under)
            model = ps.Embedding(it.table)
            optimizer = ps.Optimizer(it.cluster, model)
            data = it.cluster.samples(12, batch_size=2)

            def step(ids: Tensor) -> None:
                (-model(ids).sum()).backward()
                optimizer.step()
                optimizer.zero_grad()

            for (ids,) in data.track(it.loader(data)):
                step(ids)
                with pytest.raises(RuntimeError, match=r"'samples': the batch .* has been pushed"):
                    step(ids)
                optimizer.zero_grad()
            counts = it.counts
            step(torch.tensor([0]))  # no loop goes on, which counts samples
            assert it.counts == [2.0, *counts[1:]]
            return counts

        assert train([go]) == [[1.0] * 12]


class TestSeveralTrainers:
    @under_each
    @pytest.mark.parametrize(("drop_last", "trained"), [(False, 23), (True, 20)])
    def test_have_one_last_batch_together(self, drop_last: bool, trained: int, under: Any) -> None:
        """Not one each: the epoch as a whole has one that is smaller than the others."""

        def go() -> tuple[list[list[int]], int]:
            it = Counting(23, trainers=3, consistency=under)
            data = it.cluster.samples(23, batch_size=4, drop_last=drop_last)
            return it.train(data).batches, len(data)

        found = train([go] * 3)
        batches = sorted(batch for some, _ in found for batch in some)
        assert batches == [list(range(n, min(n + 4, 23))) for n in range(0, trained, 4)]
        assert {length for _, length in found} == {len(batches)}

    def test_get_the_same_batches_and_bits_though_a_server_died(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tasks, "PATIENCE", 0.05)

        def train_all(hub: MemoryHub, folder: Path, dies: bool) -> list[Any]:
            cut = threading.Lock()

            def go() -> tuple[int, list[list[int]], Tensor, int]:
                it = Counting(80, servers=["ps0", "ps1"], trainers=2)
                model = nn.Linear(1, 1)
                nn.init.constant_(model.weight, 0.5)
                nn.init.constant_(model.bias, 0.1)
                optimizer = ps.Optimizer(it.cluster, model, torch.optim.Adam, lr=0.1)
                data = it.cluster.samples(80, batch_size=4, shuffle=True, seed=3)
                for (ids,) in data.track(it.loader(data)):
                    model(ids.float().reshape(-1, 1)).pow(2).mean().backward()
                    try:
                        optimizer.step()
                        it.batches.append(ids.tolist())
                        if it.cluster.step == 4 and not it.cluster.session.rollbacks:
                            it.cluster.snapshot(folder).wait(60)
                        if it.cluster.step == 7 and dies and cut.acquire(blocking=False):
                            hub.cut(1)
                    except ps.RolledBack as error:
                        del it.batches[error.step :]
                    optimizer.zero_grad()
                weight = model.weight.detach().clone()
                return it.cluster.number, it.batches, weight, it.cluster.session.rollbacks

            with local_group("ps0", "ps1", "trainer0", "trainer1", hub=hub) as agents:
                return sorted(run(agents[2:], [go, go]), key=lambda each: each[0])

        calm = train_all(MemoryHub(), tmp_path / "calm", dies=False)
        died = train_all(MemoryHub(), tmp_path / "died", dies=True)
        assert [each[3] for each in calm + died] == [0, 0, 1, 1]
        assert [each[:2] for each in calm] == [each[:2] for each in died]
        assert all(torch.equal(a[2], b[2]) for a, b in zip(calm, died, strict=True))


def test_metrics_tell_what_is_trained() -> None:
    def go() -> str:
        it = Counting(10, servers=["trainer0"])  # a worker that is its own server
        data = it.cluster.samples(10, batch_size=3, epochs=2, name="clicks")
        for (ids,) in data.track(it.loader(data)):
            it.push(ids)
            if len(it.batches) == 5:
                break
        return ps.metrics()

    (text,) = train([go])
    labels = 'cluster="default",server="trainer0",shard="0",sampler="clicks"'
    assert f"tensorwire_ps_batches_trained{{{labels}}} 5" in text
    assert "# TYPE tensorwire_ps_batches_trained gauge" in text
