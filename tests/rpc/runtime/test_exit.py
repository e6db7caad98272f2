"""Workers that come to rest because their process ends without a shutdown."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rpc
from rpc.agent import Agent
from rpc.errors import AgentClosedError
from rpc.runtime import exit as process_end
from tests.programs import run_program, start_program

SECONDS = 20.0

_BUSY = """
import threading, time, torch, rpc

begun = threading.Semaphore(0)

def work():
    numbers = torch.ones(64, 64)
    begun.release()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        numbers = torch.mm(numbers, numbers).div(64)
        numbers.sum().item()
"""

_PROGRAM = """
import sys, rpc, busy
meet = rpc.{backend}RpcBackendOptions(init_method="file://{store}")
rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=meet)
for _ in range(8):
    rpc.rpc_async("a", busy.work)
for _ in range(8):
    busy.begun.acquire()
sys.exit({status})
"""

_ENDLESS = """
import threading, time, rpc

begun = threading.Semaphore(0)
seconds = 0.0

def work():
    begun.release()
    while True:
        pass

def shut_down():
    global seconds
    began = time.monotonic()
    rpc.shutdown(graceful=False)
    seconds = time.monotonic() - began
    begun.release()
"""

_ONE_OF_TWO = """
import sys, time, rpc, endless
rank = int(sys.argv[1])
meet = rpc.{backend}RpcBackendOptions(init_method="file://{store}")
rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=2, rpc_backend_options=meet)
if rank == 0:
    rpc.rpc_async("worker1", endless.{handler})
    open("{over}").read()
    rpc.shutdown(graceful=False)
else:
    endless.begun.acquire()
    began = time.monotonic()
    {leave}
    print(time.monotonic() - began + endless.seconds)
    sys.exit(3)
"""

_AGAIN = """
    rpc.shutdown(graceful=False)
    meet = type(meet)(init_method=meet.init_method + "_of_another")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=meet)
    assert rpc.rpc_sync("alone", abs, (-1,)) == 1
    rpc.shutdown()
"""

_go_on = threading.Event()
_waiting = threading.Event()
_outcomes: list[BaseException] = []


def wait() -> None:
    _waiting.set()
    _go_on.wait(SECONDS)


def call_and_wait() -> None:
    try:
        rpc.rpc_sync("bob", wait)
    except AgentClosedError as error:
        _outcomes.append(error)


@pytest.fixture(autouse=True)
def fresh() -> None:
    _go_on.clear()
    _waiting.clear()
    _outcomes.clear()


def rest(agent: Agent, seconds: float) -> float:
    began = time.monotonic()
    process_end._bring_to_rest(agent, began + seconds)
    return time.monotonic() - began


def test_a_handler_that_waits_for_a_call_ends_with_its_error(pair: list[Agent]) -> None:
    alice, bob = pair
    calling = bob.rpc_async("alice", call_and_wait)
    assert _waiting.wait(SECONDS)
    assert rest(alice, SECONDS) < SECONDS / 2
    (outcome,) = _outcomes
    assert "the process of this worker ended" in str(outcome)
    _go_on.set()
    del calling


def test_what_does_not_end_is_waited_for_no_longer_than_is_said(pair: list[Agent]) -> None:
    alice, bob = pair
    calling = bob.rpc_async("alice", wait)
    assert _waiting.wait(SECONDS)
    assert 0.2 <= rest(alice, 0.2) < SECONDS / 2
    with pytest.raises(AgentClosedError):
        alice.rpc_sync("bob", abs, (-1,))
    _go_on.set()
    del calling


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.parametrize("backend", ["TensorPipe", "TensorWire"])
def test_a_process_whose_handlers_run_operators_ends_with_its_own_status(
    backend: str, tmp_path: Path
) -> None:
    (tmp_path / "busy.py").write_text(_BUSY)
    program = _PROGRAM.format(backend=backend, store=tmp_path / "store", status=3)
    ended = run_program(tmp_path, program)
    assert (ended.returncode, ended.stdout) == (3, ""), ended.stderr
    assert ended.stderr.count("the process of this worker ended") == 8


def run_two(folder: Path, backend: str, handler: str, leave: str) -> tuple[float, str]:
    """Runs two workers; returns what the one that is called says of its time, and to stderr."""
    (folder / "endless.py").write_text(_ENDLESS)
    store, over = folder / "store", folder / "over"
    os.mkfifo(over)  # the caller reads it to its end
    program = _ONE_OF_TWO.format(
        backend=backend, store=store, over=over, handler=handler, leave=leave
    )
    caller, called = (start_program(folder, program, rank) for rank in "01")
    ended = called.wait()
    os.close(os.open(over, os.O_WRONLY))
    assert (ended.returncode, caller.wait().returncode) == (3, 0), ended.stderr
    return float(ended.stdout), ended.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.parametrize(
    ("backend", "leave"),
    [("TensorPipe", _AGAIN), ("TensorWire", "pass")],
    ids=["TensorPipe-again", "TensorWire"],
)
def test_a_handler_that_never_ends_keeps_neither_shutdown_nor_the_end_of_its_process(
    backend: str, leave: str, tmp_path: Path
) -> None:
    seconds, _ = run_two(tmp_path, backend, "work", leave)
    assert seconds < 5.0


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.parametrize("backend", ["TensorPipe", "TensorWire"])
def test_a_handler_may_shut_its_worker_down(backend: str, tmp_path: Path) -> None:
    seconds, err = run_two(tmp_path, backend, "shut_down", "pass")
    assert seconds < 5.0
    assert "abandoned" not in err
    assert "agent is not set" not in err


class _Nothing:
    """Comes to rest without a step."""

    def steps_to_rest(self) -> Iterator[Callable[[float], object]]:
        return iter(())


def test_a_worker_of_rpcrun_leaves_a_note_that_it_ends_but_none_for_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, running = tmp_path / "note", _Nothing()
    monkeypatch.setenv("RPC_ENDING_FILE", str(note))
    process_end._process_ends(weakref.ref(running), os.getppid())
    assert not note.exists()
    process_end._process_ends(weakref.ref(running), os.getpid())
    assert note.exists()
