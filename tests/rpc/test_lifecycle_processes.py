"""Joining, leaving and joining again, between processes that meet at one place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import rpc
from rpc import BringUpError, WorkerLostError
from tests import waiting
from tests.free_ports import free_port
from tests.rpc.worker_processes import WorkerProcess, call, join, leave, names, served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_server"), pytest.mark.timeout(400)]

BACKEND = "TENSORWIRE"
DeviceMaps = dict[str, dict[str, str]]
SECONDS = 60.0


@pytest.fixture
def url() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def workers() -> Iterator[list[WorkerProcess]]:
    made = [WorkerProcess() for _ in range(3)]
    yield made
    for worker in made:
        worker.end()


until = partial(waiting.until, seconds=SECONDS, pause=0.05)


def try_to_join(url: str, rank: int) -> tuple[str, float]:
    """The error, and the seconds that a shutdown after it took."""
    try:
        join(BACKEND, url, f"worker{rank}", rank, 2, bring_up_timeout=1)
    except BringUpError as error:
        start = time.monotonic()
        rpc.shutdown()
        return str(error), time.monotonic() - start
    raise AssertionError("it joined")


def test_a_group_meets_again_and_again_at_one_place(url: str, workers: list[WorkerProcess]) -> None:
    for _ in range(3):
        for rank in (1, 0):
            workers[rank].begin(join, BACKEND, url, f"worker{rank}", rank, 2)
        for rank in (1, 0):
            workers[rank].result()
        assert workers[1].do(call, "worker0", os.getpid) == workers[0].process.pid
        for rank in (0, 1):
            workers[rank].begin(leave)
        for rank in (0, 1):
            workers[rank].result()


def test_what_is_missing_is_named_and_shutdown_returns_after_a_failed_init(
    url: str, workers: list[WorkerProcess]
) -> None:
    message, seconds = workers[0].do(try_to_join, url, 0)
    assert "missing ranks [1]; there were 'worker0'" in message
    assert seconds < 1


def test_the_survivors_go_on_without_the_host_of_the_store(
    url: str, workers: list[WorkerProcess]
) -> None:
    host, second, third = workers
    settings = {"liveness_timeout": 2.0, "rpc_timeout": SECONDS}
    for rank, worker in enumerate(workers):
        worker.do(join, BACKEND, url, f"worker{rank}", rank, **settings)
    for worker in workers:
        until(lambda worker=worker: len(worker.do(names)) == 3)  # type: ignore[misc]
    second.begin(call, "worker0", time.sleep, 3600)
    until(lambda: host.do(served) == 1)
    host.send_signal(signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="worker0"):
        second.result()
    until(lambda: third.do(names) == ["worker1", "worker2"])
    assert third.do(call, "worker1", os.getpid) == second.process.pid

    late = WorkerProcess()
    try:
        with pytest.raises(BringUpError, match="could not be opened within 1 s"):
            late.do(join, BACKEND, url, "worker3", 3, bring_up_timeout=1)
        assert second.do(call, "worker2", os.getpid) == third.process.pid
    finally:
        late.end()
    second.do(leave)
    third.do(leave)


def test_a_frozen_host_of_the_store_keeps_nobody_from_leaving(
    url: str, workers: list[WorkerProcess]
) -> None:
    settings = {"liveness_timeout": 1.0, "rpc_timeout": SECONDS}
    for rank, worker in enumerate(workers):
        worker.do(join, BACKEND, url, f"worker{rank}", rank, **settings)
    host, second, third = workers
    for worker in workers:
        until(lambda worker=worker: len(worker.do(names)) == 3)  # type: ignore[misc]
    host.send_signal(signal.SIGSTOP)
    until(lambda: third.do(names) == ["worker1", "worker2"])
    assert third.do(call, "worker1", os.getpid) == second.process.pid
    second.do(leave)
    third.do(leave)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("backend", ["TENSORWIRE", "TENSORPIPE"])
def test_those_who_come_and_go_leave_no_descriptors(
    url: str, workers: list[WorkerProcess], backend: str
) -> None:
    stays, comes, _ = workers
    stays.do(join, backend, url, "stays", 0)
    held = []
    for _ in range(4):
        comes.do(join, backend, url, "comes", 1)
        assert comes.do(call, "stays", os.getpid) == stays.process.pid
        assert stays.do(call, "comes", os.getpid) == comes.process.pid
        held.append(stays.do(descriptors))
        comes.do(leave)
        until(lambda: stays.do(names) == ["stays"])
    comes.do(join, backend, url, "comes", 1)
    until(lambda: stays.do(descriptors) <= min(held) + 2)


def refusals(backend: str, url: str, attempts: list[tuple[int | None, DeviceMaps]]) -> list[str]:
    """Says what is wrong with each of the device maps; then this worker joins without them."""
    wrong = []
    for number, (world_size, maps) in enumerate(attempts):
        place = f"{url}{number}"
        with pytest.raises(ValueError, match="invalid") as refused:
            join(backend, place, "worker0", 0, world_size, device_maps=maps)
        wrong.append(str(refused.value))
        join(backend, place, "worker0", 0, world_size)
        rpc.shutdown()
    return wrong


@pytest.mark.parametrize("backend", ["TENSORWIRE", "TENSORPIPE"])
def test_device_maps_that_cannot_be_are_refused_when_the_group_forms(
    tmp_path: Path, workers: list[WorkerProcess], backend: str
) -> None:
    attempts: list[tuple[int | None, DeviceMaps]] = [
        (1, {"worker0": {"cuda:99": "cpu"}}),
        (1, {"worker0": {"cpu": "cuda:99"}}),
        (1, {"nobody": {"cpu": "cpu"}}),
        (None, {"somebody": {"cuda:99": "cuda:0"}}),
    ]
    source, target, name, dynamic = workers[0].do(
        refusals, backend, f"file://{tmp_path}/meeting", attempts
    )
    assert "source devices with invalid indices" in source
    assert "target devices with invalid indices" in target
    assert "invalid target node names" in name
    assert "source devices with invalid indices" in dynamic
