"""A worker that forks: its child has its tensors, and no part in its group."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import autograd_dist
import rpc
from tests.free_ports import free_port
from tests.rpc.worker_processes import WorkerProcess, call, join, leave
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("forking"),
    pytest.mark.timeout(300),
]

LARGE = 100_000


@pytest.fixture(scope="module", params=["TENSORPIPE", "TENSORWIRE"])
def worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """``worker0`` of two."""
    url = f"file://{tmp_path_factory.mktemp('forks')}/store"
    workers = [WorkerProcess() for _ in range(2)]
    for rank, worker in enumerate(workers):
        worker.begin(join, request.param, url, f"worker{rank}", rank, 2)
    for worker in workers:
        worker.result()
    yield workers[0]
    for worker in workers:
        worker.begin(leave)
    for worker in workers:
        worker.result()
        worker.end()


# --- What runs in the worker


def full(value: float, length: int = LARGE) -> torch.Tensor:
    return torch.full((length,), value)


def is_shared(tensor: torch.Tensor) -> bool:
    """True if it lies in a segment that another worker made."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return "memfd:tensorwire" in line
    return False


def received(value: float) -> torch.Tensor:
    """A tensor that came through shared memory, as the first ones do not."""
    found = [call("worker1", full, value)]

    def again() -> None:
        found[0] = call("worker1", full, value)

    until(lambda: is_shared(found[0]), meanwhile=again, pause=0.02)
    return found[0]


def in_child(look: Callable[[], Any]) -> str:
    """The account of a forked child of ``look()``: its value, or the error's type and text."""
    outcome, tell = os.pipe()
    if not os.fork():
        try:
            found = str(look())
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        os.write(tell, found.encode())
        os._exit(0)
    os.close(tell)
    with open(outcome) as told:
        text = told.read()
    os.wait()
    return text


def child_of_a_receiver() -> tuple[str, set[float]]:
    """The text the child writes; what the parent has then, of that tensor and of later ones."""
    tensor = received(1.0)
    text = in_child(lambda: set(tensor.mul_(5).tolist()))
    later = [received(2.0) for _ in range(3)]
    assert all(each.eq(2).all() for each in later)
    return text, set(tensor.tolist())


def refusals() -> dict[str, str]:
    """The errors of a child that uses what its parent has, which then goes on as before."""
    made = rpc.remote("worker1", full, (1.0, 3))
    made.to_here()
    future = rpc.rpc_async("worker1", full, (1.0, 3))
    large = full(1.0)
    attempts: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: call("worker1", full, 1.0),
        "rpc_async": lambda: rpc.rpc_async("worker1", full, (1.0,)),
        "remote": lambda: rpc.remote("worker1", full, (1.0,)),
        "to_here": made.to_here,
        "proxy": lambda: made.rpc_sync().sum(),
        "large": lambda: made.rpc_sync().add(large),
        "shutdown": rpc.shutdown,
    }
    heard = {name: in_child(attempt) for name, attempt in attempts.items()}
    future.wait()
    assert torch.equal(call("worker1", full, 4.0, 3), full(4.0, 3))
    return heard


def forks_in_a_handler() -> str:
    return in_child(lambda: call("worker0", full, 1.0))


def waits_in_child(gate: str) -> str:
    """The error of a child that waits for a call of its parent's, which ends after that."""
    os.mkfifo(gate)
    future = rpc.rpc_async("worker1", Path.read_bytes, (Path(gate),))
    text = in_child(future.wait)
    Path(gate).write_bytes(b"x")
    assert future.wait() == b"x"
    return text


def child_ends_in_the_ordinary_way() -> int:
    """The status of a child that leaves a context, drops references and runs Python's exit."""
    made = rpc.remote("worker1", full, (1.0, 3))
    made.to_here()
    with autograd_dist.context():
        weights = torch.ones(3, requires_grad=True)
        call("worker1", torch.add, weights, weights)
        child = os.fork()
    if not child:
        del made
        sys.exit(7 if threading.active_count() == 1 else 8)
    _, status = os.waitpid(child, 0)
    assert torch.equal(call("worker1", full, 4.0, 3), full(4.0, 3))
    return os.waitstatus_to_exitcode(status)


def forks_when_it_has_left(backend: str, former: str, own: str) -> str:
    """The value that its child makes, which joins a group of its own."""
    join(backend, former, "alone", 0, 1)
    leave()

    def join_own() -> float:
        join(backend, own, "alone", 0, 1)
        total = call("alone", full, 2.0, 3).sum().item()
        leave()
        return total

    return in_child(join_own)


# --- The tests


def test_a_received_tensor_is_the_childs_own(worker: WorkerProcess) -> None:
    assert worker.do(child_of_a_receiver) == ("{5.0}", {1.0})


def test_the_child_cannot_call_and_does_not_disturb_its_parent(worker: WorkerProcess) -> None:
    heard = worker.do(refusals)
    uninitialized = (
        "NotInitializedError: RPC has not been initialized in this process, which was forked "
        "from worker 'worker0'. Call rpc.init_rpc first."
    )
    no_part = (
        "AgentClosedError: this process was forked from worker 'worker0', whose calls, futures "
        "and references it cannot use; use them in the worker itself"
    )
    assert heard == {
        "rpc_sync": uninitialized,
        "rpc_async": uninitialized,
        "remote": uninitialized,
        "to_here": no_part,
        "proxy": no_part,
        "large": no_part,
        "shutdown": "None",
    }


def test_a_child_of_a_handler_cannot_call(worker: WorkerProcess) -> None:
    assert "forked from worker 'worker1'" in worker.do(call, "worker1", forks_in_a_handler)


def test_the_child_does_not_wait_for_its_parents_calls(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    heard = worker.do(waits_in_child, str(tmp_path / "gate"))
    assert heard.startswith("AgentClosedError: this process was forked from worker 'worker0'")


def test_the_child_ends_as_any_process_does(worker: WorkerProcess) -> None:
    assert worker.do(child_ends_in_the_ordinary_way) == 7


@pytest.mark.parametrize("backend", ["TENSORPIPE", "TENSORWIRE"])
def test_a_child_of_who_has_left_joins_a_group_of_its_own(backend: str) -> None:
    stores = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    parent = WorkerProcess()
    assert parent.do(forks_when_it_has_left, backend, *stores) == "6.0"
    parent.end()
