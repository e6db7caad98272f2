"""Samples that count once: trainers and servers in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from rpc.testing import MemoryHub, as_worker, local_group
from tensorwire import parameter_server as ps
from tensorwire.parameter_server.decisions import tasks
from tests.tensorwire.parameter_server.clusters import run, train
from tests.tensorwire.parameter_server.samples.counting import SUM, Counting
from tests.waiting import until

T = TypeVar("T")
under_each = pytest.mark.parametrize("under", [SUM, ps.SSP(1), ps.Async()], ids=str)


def flat(lists: Iterable[list[T]]) -> list[T]:
    return [each for some in lists for each in some]


class TestOneTrainer:
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_trains_each_sample_once_an_epoch(self, drop_last: bool) -> None:
        def go() -> tuple[list[list[int]], list[float], ps.Progress]:
            it = Counting(10)
            data = it.cluster.samples(10, batch_size=3, epochs=2, drop_last=drop_last)
            assert data.progress == ps.Progress(0, 0, 3, 15 if drop_last else 17)
            it.train(data)
            assert len(data) == len(it.batches)
            return it.batches, it.counts, data.progress

        ((batches, counts, progress),) = train([go])
        epoch = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]][: 3 if drop_last else 4]
        assert batches == epoch * 2
        assert counts == [2.0] * 9 + [0.0 if drop_last else 2.0]
        assert progress == ps.Progress(2, 18 if drop_last else 20, 0, 0)

    def test_gets_orders_that_differ_by_epoch_and_seed(self) -> None:
        def go() -> list[list[int]]:
            it, orders = Counting(50), []
            for seed in (1, 2):
                data = it.cluster.samples(
                    50, batch_size=8, shuffle=True, seed=seed, epochs=2, name=f"seed{seed}"
                )
                for epoch in range(2):
                    it.batches = []
                    data.set_epoch(epoch)
                    it.train(data)
                    orders.append(flat(it.batches))
            return orders

        (orders,) = train([go])
        assert all(sorted(order) == list(range(50)) for order in orders)
        assert len({tuple(order) for order in orders}) == 4

    @under_each
    def test_accumulates_gradients_of_several_batches(self, under: Any) -> None:
        def go() -> list[float]:
            it = Counting(12, consistency=under)
            data, some = it.cluster.samples(12, batch_size=2), []
            for (ids,) in data.track(it.loader(data)):
                some.append(ids)
                if len(some) == 3:
                    assert data.progress.trained in (0, 6)
                    it.push(torch.cat(some))
                    some = []
            assert data.progress.trained == 12
            return it.counts

        assert train([go]) == [[1.0] * 12]

    def test_pushes_after_the_loop_what_it_has_accumulated(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def go() -> list[float]:
            it = Counting(12)
            data = it.cluster.samples(12, batch_size=5)
            some = [ids for (ids,) in data.track(it.loader(data))]
            assert data.progress.trained == 0
            it.push(torch.cat(some))
            assert data.progress.trained == 12
            return it.counts

        assert train([go]) == [[1.0] * 12]
        assert any("the last 3 batches were given out and not" in told for told in caplog.messages)

    @under_each
    def test_gets_again_what_it_left_behind(self, under: Any) -> None:
        """A loop that is left goes on where it was, with a batch that was not pushed."""

        def go() -> list[list[int]]:
            it = Counting(8, consistency=under)
            data = it.cluster.samples(8, batch_size=2)
            for (ids,) in data.track(it.loader(data)):
                if it.batches:
                    break
                it.push(ids)
            return it.train(data).batches

        assert train([go]) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]

    @under_each
    def test_reads_with_workers_ahead_of_what_is_trained(self, under: Any) -> None:
        def go() -> list[list[int]]:
            it = Counting(20, consistency=under)
            data = it.cluster.samples(20, batch_size=2)
            loader = it.loader(data, num_workers=2, multiprocessing_context="fork")
            for (ids,) in data.track(loader):
                assert data.progress.trained == 2 * len(it.batches)
                it.push(ids)
            return it.batches

        assert flat(train([go])[0]) == list(range(20))

    @under_each
    def test_prefetches_the_rows_of_tracked_batches(self, under: Any) -> None:
        def go() -> tuple[list[float], int]:
            it = Counting(20, consistency=under)
            model = ps.Embedding(it.table)
            optimizer = ps.Optimizer(it.cluster, model)
            data = it.cluster.samples(20, batch_size=2, shuffle=True, epochs=2)
            loader = data.track(it.loader(data))
            for (ids,) in ps.prefetch(loader, model, ids=lambda batch: batch[0]):
                (-model(ids)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return it.counts, it.cluster.step

        assert train([go]) == [([2.0] * 20, 20)]


class TestSeveralTrainers:
    def test_train_each_sample_once_in_turn(self) -> None:
        def go() -> list[list[int]]:
            it = Counting(22, trainers=3)
            return it.train(it.cluster.samples(22, batch_size=2, epochs=3)).batches

        found = sorted(train([go] * 3))
        assert [batches[0] for batches in found] == [[0, 1], [2, 3], [4, 5]]
        assert sorted(flat(flat(found))) == sorted(list(range(22)) * 3)

    def test_get_the_same_bits_in_every_run(self) -> None:
        def go() -> tuple[int, list[list[int]], Tensor]:
            it = Counting(60, trainers=2)
            model = nn.Linear(1, 1)
            nn.init.constant_(model.weight, 0.5)
            nn.init.constant_(model.bias, 0.1)
            optimizer = ps.Optimizer(it.cluster, model, torch.optim.Adam, lr=0.1)
            data = it.cluster.samples(60, batch_size=4, shuffle=True, seed=3)
            batches = []
            for (ids,) in data.track(it.loader(data)):
                model(ids.float().reshape(-1, 1)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                batches.append(ids.tolist())
            return it.cluster.number, batches, model.weight.detach().clone()

        one, two = (sorted(train([go] * 2), key=lambda each: each[0]) for _ in range(2))
        assert [each[:2] for each in one] == [each[:2] for each in two]
        assert all(torch.equal(a[2], b[2]) for a, b in zip(one, two, strict=True))
        assert torch.equal(one[0][2], one[1][2])

    def test_who_has_nothing_left_makes_empty_steps(self) -> None:
        """One trains two batches a push: it has trained its share while the other is at half."""

        def go(each: int) -> Callable[[], int]:
            def train_share() -> int:
                it = Counting(32, trainers=2)
                data, some = it.cluster.samples(32, batch_size=2), []
                for (ids,) in data.track(it.loader(data)):
                    some.append(ids)
                    if len(some) == each:
                        it.push(torch.cat(some))
                        some = []
                assert it.counts == [1.0] * 32
                return it.cluster.step

            return train_share

        assert train([go(1), go(2)]) == [8, 8]

    @under_each
    def test_one_that_joins_gets_work_and_one_that_leaves_gives_up_what_it_had(
        self, under: Any
    ) -> None:
        came, left = threading.Event(), threading.Event()

        def first() -> Counting:
            it = Counting(200, trainers=1, consistency=under)

            def wait(step: int) -> None:
                if step == 3:
                    came.set()
                    until(lambda: len(it.cluster.stats()["trainers"]) == 2)
                if step == 20:
                    assert left.wait(60)

            return it.train(it.cluster.samples(200, batch_size=2, epochs=2), wait)

        def second() -> Counting:
            assert came.wait(60)
            it = Counting(200, trainers=1, consistency=under)
            data = it.cluster.samples(200, batch_size=2, epochs=2)
            for (ids,) in data.track(it.loader(data)):
                it.push(ids)
                if len(it.batches) == 5:
                    break
            it.cluster.finish()
            left.set()
            return it

        with local_group("ps0", "trainer0", "trainer1") as agents:
            one, other = run(agents[1:], [first, second])
            with as_worker(agents[1]):
                assert one.counts == [2.0] * 200
        assert len(other.batches) == 5
        assert sorted(flat([*one.batches, *other.batches])) == sorted([*range(200)] * 2)

    @under_each
    def test_trainers_that_die_leave_their_batches_to_the_others(self, under: Any) -> None:
        hub, died = MemoryHub(), threading.Event()
        servers = ["ps0", "ps1"]

        def stays() -> list[float]:
            it = Counting(120, servers=servers, trainers=3, consistency=under)
            it.train(it.cluster.samples(120, batch_size=2, epochs=2))
            return it.counts

        def dies() -> list[float]:
            it = Counting(120, servers=servers, trainers=3, consistency=under)
            data = it.cluster.samples(120, batch_size=2, epochs=2)
            for (ids,) in data.track(it.loader(data)):
                if len(it.batches) == 4:
                    hub.cut(4)
                    died.set()
                    return []
                it.push(ids)
            return []

        with local_group("ps0", "ps1", "trainer0", "trainer1", "trainer2", hub=hub) as agents:
            found = run(agents[2:], [stays, stays, dies])
        assert died.is_set()
        assert found[0] == found[1] == [2.0] * 120


class TestAStaticAssignment:
    @under_each
    def test_gives_each_rank_every_kth_batch_in_every_run(self, under: Any) -> None:
        def go(rank: int) -> Callable[[], tuple[list[list[int]], list[float]]]:
            def train_share() -> tuple[list[list[int]], list[float]]:
                it = Counting(14, trainers=2, consistency=under)
                data = it.cluster.samples(
                    14, batch_size=2, epochs=2, assignment="static", rank=rank, num_replicas=2
                )
                it.train(data)
                assert data.progress == ps.Progress(2, 28, 0, 0)
                return it.batches, it.counts

            return train_share

        found = train([go(0), go(1)])
        epoch = [[n, n + 1] for n in range(0, 14, 2)]
        assert [batches for batches, _ in found] == [(epoch * 2)[0::2], (epoch * 2)[1::2]]
        assert [counts for _, counts in found] == [[2.0] * 14] * 2

    def test_that_two_trainers_have_alike_trains_each_batch_once(self) -> None:
        """A mistake of the program, which must not double what the rows get."""

        def go() -> list[float]:
            it = Counting(12, trainers=2)
            how = {"assignment": "static", "rank": 0, "num_replicas": 1}
            return it.train(it.cluster.samples(12, batch_size=2, **how)).counts

        assert train([go] * 2) == [[1.0] * 12] * 2

    @under_each
    def test_leaves_what_a_trainer_has_not_trained_to_the_next_of_its_rank(
        self, under: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rpc.runtime.wait_log.FIRST", (0.0, 5.0))
        told = "for batches of rank 1, which only trainers of that rank train"
        monkeypatch.setenv("ROLE_WORLD_SIZE", "2")
        left = threading.Event()

        def tracked(rank: int) -> tuple[Counting, ps.Samples]:
            it = Counting(12, trainers=1, consistency=under)
            return it, it.cluster.samples(12, batch_size=2, assignment="static", rank=rank)

        def stays() -> list[float]:
            it, data = tracked(0)
            return it.train(data).counts

        def leaves() -> list[list[int]]:
            it, data = tracked(1)
            for (ids,) in data.track(it.loader(data)):
                it.push(ids)
                break
            it.cluster.finish()
            left.set()
            return it.batches

        def comes() -> list[list[int]]:
            assert left.wait(60)
            until(lambda: told in caplog.text, 60)
            it, data = tracked(1)
            return it.train(data).batches

        with local_group("ps0", "trainer0", "trainer1", "trainer2") as agents:
            counts, *batches = run(agents[1:], [stays, leaves, comes])
        assert (counts, batches) == ([1.0] * 12, [[[2, 3]], [[6, 7], [10, 11]]])

    def test_says_what_is_missing_or_of_no_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ROLE_RANK", raising=False)

        def go() -> None:
            cluster = ps.connect(servers=["ps0"])
            for told, said in [
                ({"assignment": "both"}, "assignment='both' must be 'dynamic' or 'static'"),
                ({"rank": 0}, "rank=0 needs assignment='static'"),
                ({"assignment": "static", "num_replicas": 2}, "needs rank=, as the environment"),
                ({"assignment": "static", "num_replicas": 2, "rank": 2}, "rank=2 must be below 2"),
                ({"assignment": "static", "num_replicas": 0, "rank": 0}, "must be at least 1"),
            ]:
                with pytest.raises(ValueError, match=said):
                    cluster.samples(4, batch_size=2, **told)
            cluster.samples(4, batch_size=2, assignment="static", rank=0, num_replicas=2)
            with pytest.raises(ps.DeclarationError, match="num_replicas=2, not 0"):
                cluster.samples(4, batch_size=2)

        train([go])


WRONG_RUNS: list[Any] = [[2, 0], [-1, 1], [0.5, 1.5], ["0", "1"], [0, True], [0], 3]


class TestItsState:
    def test_is_accepted_by_a_cluster_that_is_as_far_and_by_no_other(self) -> None:
        def go() -> None:
            it = Counting(8)
            data = it.cluster.samples(8, batch_size=2)
            for (ids,) in data.track(it.loader(data)):
                it.push(ids)
                if len(it.batches) == 2:
                    break
            state = data.state_dict()
            assert state["trained"] == [[0, 2]]
            data.load_state_dict(state)
            data.load_state_dict({**state, "trained": []})
            later = {**state, "trained": [[0, 4]]}
            with pytest.raises(ValueError, match="2 batches of sampler 'samples' that were"):
                data.load_state_dict(later)
            other = {**state, "sampler": {**state["sampler"], "seed": 3}}
            with pytest.raises(ps.DeclarationError, match="seed=3, not 0"):
                data.load_state_dict(other)
            for wrong in ({"epoch": 1}, *({**state, "trained": [each]} for each in WRONG_RUNS)):
                with pytest.raises(ValueError, match="is not of state_dict"):
                    data.load_state_dict(wrong)

        train([go])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryHub]:
    """A network in which nobody waits for servers that do not come back."""
    monkeypatch.setattr(tasks, "PATIENCE", 0.05)
    return iter([MemoryHub()]).__next__()


class TestTheCluster:
    @pytest.mark.parametrize(
        ("workers", "prefetches", "under"),
        [(0, False, SUM), (2, True, SUM), (0, True, ps.SSP(1)), (2, False, ps.Async())],
        ids=str,
    )
    def test_goes_back_and_the_same_loop_goes_on(
        self, tmp_path: Path, impatient: MemoryHub, workers: int, prefetches: bool, under: Any
    ) -> None:
        hub, cut = impatient, threading.Lock()

        def go() -> tuple[list[float], list[int], int]:
            it = Counting(60, servers=["ps0", "ps1"], trainers=2, consistency=under)
            model = ps.Embedding(it.table)
            optimizer = ps.Optimizer(it.cluster, model)
            data, rolled = it.cluster.samples(60, batch_size=2, shuffle=True, epochs=2), []
            how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
            loader: Any = data.track(it.loader(data, **how))
            if prefetches:
                loader = ps.prefetch(loader, model, ids=lambda batch: batch[0])
            for (ids,) in loader:
                try:
                    (-model(ids)).sum().backward()
                    optimizer.step()
                    if it.cluster.step == 8 and not it.cluster.session.rollbacks:
                        it.cluster.snapshot(tmp_path / "8").wait(60)
                    if it.cluster.step == 13 and cut.acquire(blocking=False):
                        hub.cut(1)
                except ps.RolledBack as error:
                    rolled.append(error.step)
                except ps.SnapshotError:
                    assert under is not SUM  # the other has cut a server off before its own step 8
                optimizer.zero_grad()
            assert data.progress == ps.Progress(2, 120, 0, 0)
            return it.counts, rolled, it.cluster.session.rollbacks

        with local_group("ps0", "ps1", "trainer0", "trainer1", hub=hub) as agents:
            found = run(agents[2:], [go, go])
        assert [(counts, times) for counts, _, times in found] == [([2.0] * 60, 1)] * 2
        if under is SUM:
            assert [steps for _, steps, _ in found] == [[8]] * 2

    @pytest.mark.parametrize("trainers", [1, 3])
    @pytest.mark.parametrize("published", [False, True])
    def test_is_restored_into_another_number_of_trainers(
        self, tmp_path: Path, trainers: int, published: bool
    ) -> None:
        def save(cluster: ps.Cluster) -> None:
            if not published:
                cluster.snapshot(tmp_path / "7").wait(60)
            elif cluster.number == 0:
                cluster.publish(tmp_path / "7", ps.Steps(1000), state=True).wait()

        def begin() -> list[int]:
            it = Counting(50, trainers=2)
            data = it.cluster.samples(50, batch_size=2, shuffle=True, seed=5)
            for (ids,) in data.track(it.loader(data)):
                it.push(ids)
                if it.cluster.step == 7:
                    save(it.cluster)
                    break
            return flat(it.batches)

        def go_on() -> tuple[list[int], list[float], int]:
            it = Counting(50, trainers=trainers, restore=tmp_path / "7")
            with pytest.raises(ps.DeclarationError, match="batch_size=2, not 4"):
                it.cluster.samples(50, batch_size=4, shuffle=True, seed=5)
            it.train(it.cluster.samples(50, batch_size=2, shuffle=True, seed=5))
            return flat(it.batches), it.counts, len(it.batches)

        before = flat(train([begin] * 2))
        after = train([go_on] * trainers)
        assert sorted([*before, *flat(found for found, _, _ in after)]) == list(range(50))
        assert all(counts == [1.0] * 50 for _, counts, _ in after)
        assert all(steps >= 11 // trainers for _, _, steps in after)

    def test_is_resized_and_loses_a_head_without_a_change_of_the_account(self) -> None:
        hub = MemoryHub()

        def go() -> list[float]:
            it = Counting(120, servers=["ps0", "ps1"], backups=1, trainers=2)

            def disturb(step: int) -> None:
                if it.cluster.number == 0 and step == 5:
                    it.cluster.resize(["ps1", "ps2"])
                if it.cluster.number == 0 and step == 15:
                    hub.cut(1)

            it.train(it.cluster.samples(120, batch_size=2, epochs=2), disturb)
            assert it.cluster.session.rollbacks == 0
            return it.counts

        with local_group("ps0", "ps1", "ps2", "trainer0", "trainer1", hub=hub) as agents:
            assert run(agents[3:], [go, go]) == [[2.0] * 120] * 2

    def test_tells_how_far_all_are(self) -> None:
        def go() -> dict[str, Any]:
            it = Counting(10)
            data = it.cluster.samples(10, batch_size=3)
            for (ids,) in data.track(it.loader(data)):
                it.push(ids)
                break
            found: dict[str, Any] = it.cluster.stats()["samples"]
            return found

        told = {"epoch": 0, "trained": 3, "in_flight": 3, "left": 4}
        assert train([go]) == [{"samples": told}]
