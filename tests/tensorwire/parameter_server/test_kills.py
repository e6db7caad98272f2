"""Servers and trainers that are killed: nothing is lost that must not be, and nobody hangs.

All share one group of processes, in which one cluster follows the other; who was killed is started
again before the next. A test that fails leaves the next one a new group.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rpc
from tensorwire import parameter_server as ps
from tensorwire.checkpoint.chain import Chain
from tensorwire.parameter_server.server.host import host
from tensorwire.parameter_server.server.loading import load_kernels
from tests import waiting
from tests.rpc.worker_processes import ProcessGroup, join
from tests.tensorwire.parameter_server.clusters import server_names, train
from tests.tensorwire.parameter_server.samples import counted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("parameter_server"),
]

Record = Callable[[str, Any], None]

_IDS = 300
_STEPS = 40
_SECONDS = 90.0


class Processes(ProcessGroup):
    """A group of servers and trainers, each a process."""

    def __init__(self, folder: Path, backend: str) -> None:
        super().__init__(folder, backend, _join)
        self.clusters = 0

    def kill_at_once(self, *names: str) -> None:
        """Kills several before anybody can hear of the first."""
        for name in names:
            self.workers[name].send_signal(signal.SIGKILL)
        for name in names:
            worker = self.workers.pop(name)
            worker.process.join()
            worker.end()

    def begin(self, name: str, function: Any, *args: Any) -> None:
        self.workers[name].begin(function, *args)

    def result(self, name: str) -> Any:
        return self.workers[name].result()

    def new_cluster(self) -> str:
        self.start(*(name for name in self.ranks if name not in self.workers))
        self.clusters += 1
        return f"cluster{self.clusters}"


class Groups:
    """One group for all tests, and another one after one that has failed.

    Args:
        folder: makes one for each group.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._group: Processes | None = None

    @contextlib.contextmanager
    def one(self) -> Iterator[Processes]:
        if self._group is None:
            self._group = Processes(self._folder(), "TENSORWIRE")
            self._group.start("ps0", "ps1", "ps2", "trainer0", "trainer1", "observer")
        try:
            yield self._group
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.end()


def _join(backend: str, url: str, name: str, rank: int) -> None:
    """Joins; a server does what ``ps.serve`` does, without waiting for the end."""
    torch.set_num_threads(1)
    if name.startswith("ps"):
        load_kernels()
    join(backend, url, name, rank)
    if name.startswith("ps"):
        host().start(host().announce)


def _connect(name: str, trainers: int, backups: int, consistency: Any) -> ps.Cluster:
    return ps.connect(
        server_names(2), backups=backups, consistency=consistency, trainers=trainers, name=name
    )


@dataclass
class Trained:
    """A trainer's account.

    Attributes:
        rows: once all have finished.
        rollbacks: steps, and the pushes that were lost.
        steps: seconds of each step but the first, which waits for all trainers to come.
    """

    rows: Tensor
    rollbacks: list[tuple[int, dict[str, int]]]
    steps: list[float]


def _train(
    trainer: int, name: str, trainers: int, backups: int, consistency: Any, progress: str
) -> Trained:
    """Pushes and pulls."""
    cluster = _connect(name, trainers, backups, consistency)
    table = cluster.table("items", 8, ps.Adam(lr=0.05), init=ps.Uniform(0.1, seed=3))
    generator = torch.Generator().manual_seed(trainer)
    batches = [
        (
            torch.randint(0, _IDS, (50,), generator=generator),
            torch.randn(50, 8, generator=generator),
        )
        for _ in range(_STEPS)
    ]
    cluster.join()
    rollbacks, steps = [], []
    while cluster.step < _STEPS:
        begin = time.monotonic()
        try:
            ids, grad = batches[cluster.step]
            rows = table.pull(ids)
            table.push(ids, grad + rows)
            if progress:
                Path(progress).write_text(str(cluster.step))
        except ps.RolledBack as error:
            rollbacks.append((error.step, error.lost))
        steps.append(time.monotonic() - begin)
    cluster.finish()
    _wait_until_all_have_finished(cluster)
    return Trained(table.pull(torch.arange(_IDS)), rollbacks, steps[1:])


def _wait_until_all_have_finished(cluster: ps.Cluster) -> None:
    while cluster.stats()["trainers"]:
        time.sleep(0.02)


_expected: list[Tensor] = []


def _undisturbed() -> Tensor:
    """The rows after two trainers in this process, on servers with nothing special."""
    if not _expected:
        functions = [lambda n=n: _train(n, "undisturbed", 2, 0, ps.BSP(), "") for n in range(2)]
        _expected.append(train(functions, servers=2)[0].rows)
    return _expected[0]


def _step(path: Path) -> int:
    text = path.read_text() if path.exists() else ""
    return int(text) if text else 0


def _begin_to_train(group: Processes, name: str, backups: int, progress: Path) -> None:
    for n in range(2):
        args = (n, name, 2, backups, ps.BSP(), str(progress) if n == 0 else "")
        group.begin(f"trainer{n}", _train, *args)


def _kill_a_head(group: Processes, tmp_path: Path, seed: int) -> list[float]:
    """Returns how many seconds each step took."""
    dice = random.Random(seed)
    name, progress = group.new_cluster(), tmp_path / "progress"
    _begin_to_train(group, name, 1, progress)
    moment = dice.randrange(1, _STEPS - 2)
    waiting.until(lambda: _step(progress) >= moment, _SECONDS)
    time.sleep(dice.uniform(0, 0.01))  # no synchronisation: the moment is to be any
    victim = dice.choice(["ps0", "ps1"])
    group.kill(victim)
    if dice.random() < 0.5:
        group.start(victim)
    results: list[Trained] = [group.result(f"trainer{n}") for n in range(2)]
    for each in results:
        assert each.rollbacks == []
        assert torch.equal(each.rows, _undisturbed())
    return sorted(seconds for each in results for seconds in each.steps)


def _snapshot(name: str, backups: int, folder: str) -> set[int]:
    """Takes a snapshot; returns the steps of the trainers in it."""
    return set(_connect(name, 2, backups, ps.BSP()).snapshot(folder).wait(60).counts.values())


def _kill_what_has_no_backup(group: Processes, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    name, progress = group.new_cluster(), tmp_path / "progress2"
    backups = dice.choice([0, 1])
    _begin_to_train(group, name, backups, progress)
    waiting.until(lambda: _step(progress) >= 2, _SECONDS)
    folder = str(tmp_path / "snapshot")
    steps = group.workers["observer"].do(_snapshot, name, backups, folder)
    moment = min(_step(progress) + dice.randrange(10), _STEPS - 4)
    waiting.until(lambda: _step(progress) >= moment, _SECONDS)
    victims = ["ps0", "ps1"] if backups else [dice.choice(["ps0", "ps1"])]
    for victim in victims:
        group.kill(victim)
    group.start(*victims)
    results = [group.result(f"trainer{n}") for n in range(2)]
    for each in results:
        assert torch.equal(each.rows, _undisturbed())
        assert {step for step, _ in each.rollbacks} == steps
        assert {name for _, lost in each.rollbacks for name in lost} == {"trainer0", "trainer1"}


def _kill_a_trainer(group: Processes, tmp_path: Path) -> None:
    name, progress = group.new_cluster(), tmp_path / "progress3"
    _begin_to_train(group, name, 0, progress)
    waiting.until(lambda: _step(progress) >= 3, _SECONDS)
    group.kill("trainer1")
    group.start("trainer1")
    group.begin("trainer1", _train, 1, name, 2, 0, ps.BSP(), "")
    one, other = (group.result(f"trainer{n}").rows for n in range(2))
    assert torch.equal(one, other)


def _count(name: str, pushes: int, consistency: Any) -> None:
    cluster = _connect(name, 2, 1, consistency)
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    for _ in range(pushes):
        table.push(torch.arange(1000), -torch.ones(1000, 2))
    cluster.finish()


def _counts(name: str, consistency: Any) -> Tensor:
    cluster = _connect(name, 2, 1, consistency)
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    _wait_until_all_have_finished(cluster)
    return table.pull(torch.arange(1000))


def _resize(name: str, consistency: Any, *sizes: int) -> None:
    """Waits for a trainer; then resizes the cluster to each of these numbers of servers.

    A server that came back just now is known here a little later.
    """
    cluster = _connect(name, 2, 1, consistency)
    while not cluster.stats()["trainers"]:
        time.sleep(0.01)
    for size in sizes:
        wanted = set(server_names(size))
        waiting.until(lambda wanted=wanted: wanted <= {each.name for each in rpc.workers()})
        cluster.resize(server_names(size))


def _kill_while_counting(group: Processes, seed: int, *sizes: int) -> None:
    """Kills a server while pushes are counted, and while servers come and go."""
    dice = random.Random(seed)
    consistency = dice.choice([ps.Async(), ps.SSP(2)])
    name, observer = group.new_cluster(), group.workers["observer"]
    for n in range(2):
        group.begin(f"trainer{n}", _count, name, 100, consistency)
    observer.do(_resize, name, consistency, *sizes)
    time.sleep(dice.uniform(0, 0.2))  # no synchronisation: the moment is to be any
    group.kill(dice.choice(server_names(max([2, *sizes]))))
    for n in range(2):
        group.result(f"trainer{n}")
    assert observer.do(_counts, name, consistency).unique().tolist() == [200.0]


# --- versions that are published


def _publish(name: str, folder: str, pushes: int) -> None:
    """Pushes the same to all rows, and publishes each step; waits for the last version."""
    cluster = _connect(name, 1, 1, ps.BSP())
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    publishing = cluster.publish(folder, ps.Steps(1), base_every=3)
    for _ in range(pushes):
        table.push(torch.arange(1000), -torch.ones(1000, 2))
    while True:
        publishing.take()
        try:
            publishing.wait()
        except ps.SnapshotError:  # a head was lost that knew the rows; the next one has them
            continue
        break
    cluster.finish()


def _published(folder: Path) -> list[int]:
    """Numbers of the versions in a folder."""
    return [each.number for each in Chain.open(folder).versions()] if folder.exists() else []


def _require_one_step(folder: Path) -> float:
    """Checks that all rows of the last version are of one step; returns which."""
    ids, rows = ps.read(folder, "counts")
    assert len(ids) == 1000
    (value,) = rows.unique().tolist()
    return float(value)


def _kill_who_publishes(group: Processes, folder: Path, seed: int) -> None:
    dice = random.Random(seed)
    name = group.new_cluster()
    group.begin("trainer0", _publish, name, str(folder), 1_000_000)
    moment = dice.randrange(2, 6)
    waiting.until(lambda: max(_published(folder), default=0) >= moment, _SECONDS)
    time.sleep(dice.uniform(0, 0.05))  # no synchronisation: the moment is to be any
    group.kill("trainer0")
    last, before = max(_published(folder)), _require_one_step(folder)
    group.start("trainer0")
    group.begin("trainer0", _publish, name, str(folder), 5)
    if dice.random() < 0.5:
        group.kill(dice.choice(["ps0", "ps1"]))
    group.result("trainer0")
    assert max(_published(folder)) > last
    assert _require_one_step(folder) >= before + 5


# --- servers that come and go

_COUNTERS = ("trainer0", "trainer1", "trainer2", "trainer3")


def _count_until(name: str, stop: str) -> list[float]:
    """Pushes until there is a file; returns how long each push took."""
    cluster = _connect(name, 2, 1, ps.Async())
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    took = []
    while not Path(stop).exists():
        begin = time.monotonic()
        table.push(torch.arange(1000), -torch.ones(1000, 2))
        took.append(time.monotonic() - begin)
    cluster.finish()
    return took


def _resize_under_load(group: Processes, stop: Path) -> float:
    """Two servers, three, two, and once more; returns the longest push in medians."""
    name, observer = group.new_cluster(), group.workers["observer"]
    group.start(*(each for each in _COUNTERS if each not in group.workers))
    for each in _COUNTERS:
        group.begin(each, _count_until, name, str(stop))
    observer.do(_resize, name, ps.Async(), 3, 2, 3, 2)
    stop.touch()
    found = [group.result(each) for each in _COUNTERS]
    pushes = sum(map(len, found))
    assert observer.do(_counts, name, ps.Async()).unique().tolist() == [pushes]
    took = sorted(seconds for each in found for seconds in each[1:])  # the first sets up
    return took[-1] / took[len(took) // 2]


# --- snapshots whose writers are killed

_WRITTEN = 20_000


def _add_for_ever(name: str, stop: str) -> None:
    cluster = ps.connect(server_names(2), backups=1, consistency=ps.Async(), trainers=1, name=name)
    table = cluster.table("counts", 8, ps.SGD(lr=1.0))
    while not Path(stop).exists():
        table.push(torch.arange(_WRITTEN), -torch.ones(_WRITTEN, 8))
    cluster.finish()


def _save_for_ever(name: str, folder: str, stop: str) -> None:
    """Takes one snapshot after the other, some of which cannot be written."""
    cluster = ps.connect(server_names(2), backups=1, consistency=ps.Async(), trainers=1, name=name)
    while not cluster.stats()["trainers"]:
        time.sleep(0.01)
    for number in itertools.count():
        if Path(stop).exists():
            return
        with contextlib.suppress(ps.SnapshotError):
            cluster.snapshot(f"{folder}/{number}").wait(60)


def _kill_a_writer(group: Processes, tmp_path: Path, seed: int) -> None:
    dice, name = random.Random(seed), group.new_cluster()
    folder, stop = tmp_path / "written", tmp_path / "stop"
    group.begin("trainer0", _add_for_ever, name, str(stop))
    group.begin("observer", _save_for_ever, name, str(folder), str(stop))
    waiting.until(lambda: len(_whole(folder)) >= 1, _SECONDS)
    time.sleep(dice.uniform(0, 0.2))  # no synchronisation: the moment is to be any
    before = _whole(folder)
    group.kill(dice.choice(["ps0", "ps1"]))
    waiting.until(lambda: len(_whole(folder)) >= len(before) + 2, _SECONDS)
    stop.touch()
    group.result("trainer0")
    group.result("observer")
    for each in [*before, *_whole(folder)]:
        ids, rows = ps.read(each, "counts")
        assert len(ids) in (0, _WRITTEN)
        assert len(rows.unique()) <= 1  # of one point in all pushes, whoever wrote it


def _whole(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.exists() else ()
    return [each for each in found if ".tmp" not in each.name]


# --- state that is lost


def _push_until_lost(name: str, progress: str) -> str:
    """Pushes until the cluster cannot go on; returns why."""
    cluster = ps.connect(server_names(3), backups=1, trainers=1, name=name)
    table = cluster.table("counts", 2, ps.SGD(lr=1.0))
    try:
        while True:
            table.push(torch.arange(100), -torch.ones(100, 2))
            Path(progress).touch()
    except ps.ParameterServerError as error:
        return f"{type(error).__name__}: {error}"


# --- samples that are counted


def _count_samples(
    tracked: Any, name: str, backups: int, consistency: Any, progress: str, folder: str
) -> tuple[list[float], dict[str, int]]:
    """Trains all samples; returns how often each was, and what the servers say of that."""
    cluster = _connect(name, 2, backups, consistency)
    table = cluster.table("samples", 1, ps.SGD(lr=1.0))
    model = ps.Embedding(table)
    optimizer = ps.Optimizer(cluster, model)
    for ids in ps.prefetch(tracked(cluster), model, ids=lambda batch: batch):
        with contextlib.suppress(ps.RolledBack, ps.SnapshotError):  # and the loop goes on
            (-model(ids)).sum().backward()
            optimizer.step()
            if folder and cluster.step == 5:
                cluster.snapshot(folder).wait(60)
            if progress:
                Path(progress).write_text(str(cluster.step))
        optimizer.zero_grad()
    counts = table.pull(torch.arange(counted.SAMPLES)).flatten().tolist()
    told = cluster.stats()["samples"]["samples"]
    cluster.finish()
    return counts, told


def _resize_for_ever(name: str, backups: int, consistency: Any, stop: str) -> int:
    """Moves the cluster to three servers, back to two, and so on; returns how often that went well.

    Some moves fail, as one of the servers is killed.
    """
    cluster, moves = _connect(name, 2, backups, consistency), 0
    while not cluster.stats()["trainers"]:
        time.sleep(0.01)
    for size in itertools.cycle((3, 2)):
        if Path(stop).exists():
            break
        with contextlib.suppress(ps.ParameterServerError, rpc.RpcError, TimeoutError):
            cluster.resize(server_names(size), timeout=1.0)
            moves += 1
    return moves


def _kill_while_samples_are_counted(group: Processes, tmp_path: Path, seed: int) -> None:
    """Kills a server, a trainer, or one of each at once; of half of the clusters servers move."""
    dice, consistency = random.Random(seed), (ps.Async(), ps.BSP(ps.Reduce.SUM))[seed % 2]
    tracked = (counted.records, counted.records, counted.batches)[seed % 3]
    name, progress, backups = group.new_cluster(), tmp_path / "progress4", dice.choice([0, 1])
    paths = [(str(progress), str(tmp_path / "step 5")), ("", "")]
    for n, args in enumerate(paths):
        group.begin(f"trainer{n}", _count_samples, tracked, name, backups, consistency, *args)
    stop, moves = tmp_path / "stop4", seed // 3 % 2 == 1
    if moves:
        group.begin("observer", _resize_for_ever, name, backups, consistency, str(stop))
    moment = dice.randrange(6, 30)
    waiting.until(lambda: _step(progress) >= moment, _SECONDS)
    time.sleep(dice.uniform(0, 0.01))  # no synchronisation: the moment is to be any
    victims = dice.choice([("ps0",), ("ps1",), ("trainer0",), ("trainer1",), ("ps1", "trainer1")])
    group.kill_at_once(*victims)
    group.start(*victims)
    for victim in victims:
        if victim.startswith("trainer"):
            args = paths[int(victim[-1])]
            group.begin(victim, _count_samples, tracked, name, backups, consistency, *args)
    for n in range(2):
        counts, told = group.result(f"trainer{n}")
        assert set(counts) == {float(counted.EPOCHS)}
        assert (told["epoch"], told["in_flight"], told["left"]) == (counted.EPOCHS, 0, 0)
    stop.touch()
    assert not moves or group.result("observer") > 0


# --- tests


@pytest.fixture(scope="module")
def groups(
    tmp_path_factory: pytest.TempPathFactory, nothing_is_left_by_module: None
) -> Iterator[Groups]:
    made = Groups(lambda: tmp_path_factory.mktemp("group"))
    yield made
    made.end()


@pytest.mark.kills(30)
def test_a_killed_head_with_a_backup_disturbs_no_bit(
    groups: Groups, tmp_path: Path, kill_seed: int, full_length: bool, record_property: Record
) -> None:
    with groups.one() as group:
        steps = _kill_a_head(group, tmp_path, kill_seed)
    record_property("longest step, s", steps[-1])
    record_property("usual step, s", steps[len(steps) // 2])
    assert steps[-1] < 1.0 or not full_length


@pytest.mark.kills(30)
def test_every_push_counts_once_when_a_head_is_killed(groups: Groups, kill_seed: int) -> None:
    with groups.one() as group:
        _kill_while_counting(group, kill_seed)


def test_trainers_hear_at_once_that_all_servers_of_a_share_have_died(
    groups: Groups, tmp_path: Path
) -> None:
    """The one that is left is no majority, but the end of the others is certain."""
    with groups.one() as group:
        name, progress = group.new_cluster(), tmp_path / "progress"
        group.begin("trainer0", _push_until_lost, name, str(progress))
        waiting.until(progress.exists, _SECONDS)
        group.kill_at_once("ps0", "ps1")
        assert re.match(
            r"ServerLostError: all servers of shard .* were lost", group.result("trainer0")
        )


@pytest.mark.kills(20)
def test_all_go_back_to_one_snapshot_when_all_that_keep_a_share_are_killed(
    groups: Groups, tmp_path: Path, kill_seed: int
) -> None:
    with groups.one() as group:
        _kill_what_has_no_backup(group, tmp_path, kill_seed)


@pytest.mark.kills(30)
def test_every_push_counts_once_when_a_server_is_killed_during_a_resize(
    groups: Groups, kill_seed: int
) -> None:
    with groups.one() as group:
        _kill_while_counting(group, kill_seed, 3)


@pytest.mark.kills(20)
def test_snapshots_are_whole_or_not_there_when_a_writer_is_killed(
    groups: Groups, tmp_path: Path, kill_seed: int
) -> None:
    with groups.one() as group:
        _kill_a_writer(group, tmp_path, kill_seed)


@pytest.mark.kills(30, usual=1)
def test_versions_are_whole_or_not_there_when_who_publishes_is_killed(
    groups: Groups, tmp_path: Path, kill_seed: int
) -> None:
    with groups.one() as group:
        _kill_who_publishes(group, tmp_path / "chain", kill_seed)


@pytest.mark.kills
def test_every_push_counts_once_and_none_takes_long_while_servers_come_and_go(
    groups: Groups, tmp_path: Path, full_length: bool, record_property: Record
) -> None:
    times = 10 if full_length else 1
    with groups.one() as group:
        longest = [_resize_under_load(group, tmp_path / f"stop{n}") for n in range(times)]
    record_property("times", times)
    record_property("longest push, medians", max(longest))
    assert max(longest) < 10 or not full_length


@pytest.mark.kills(50)
def test_every_sample_counts_once_when_a_server_or_a_trainer_is_killed(
    groups: Groups, tmp_path: Path, kill_seed: int
) -> None:
    with groups.one() as group:
        _kill_while_samples_are_counted(group, tmp_path, kill_seed)


def test_others_go_on_when_a_trainer_or_a_head_is_killed_on_tensorpipe_too(tmp_path: Path) -> None:
    group = Processes(tmp_path, "TENSORPIPE")
    try:
        group.start("ps0", "ps1", "trainer0", "trainer1")
        _kill_a_trainer(group, tmp_path)
        _kill_a_head(group, tmp_path, 1)
    finally:
        group.end()
