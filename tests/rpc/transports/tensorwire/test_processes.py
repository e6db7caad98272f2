"""TensorWire between processes: killed, frozen, idle and busy ones."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rpc.errors import QueueFullError, WorkerLostError
from rpc.options import WhenFull
from rpc.transports.base import Frame, FrameKind
from rpc.transports.tensorwire import Settings, TensorWireTransport
from rpc.worker_info import WorkerInfo
from tests.rpc.transports.conformance import Worker
from tests.rpc.transports.cutter import Cutter
from tests.rpc.transports.tensorwire.echo_process import EchoProcess, start_echo_process
from tests.signals import freeze
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_server")]

MIB = 1 << 20


class Caller(Worker):
    """A worker that keeps count of replies to pipelined requests only."""

    def expect(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.replies) >= count, 60)
            self.replies.clear()


_LIVES = itertools.count(1)


def start_caller(settings: Settings) -> Caller:
    info = WorkerInfo("caller", 0)
    caller = Caller(TensorWireTransport(settings), info, incarnation=next(_LIVES))
    caller.start()
    return caller


@pytest.fixture(scope="module", params=[True, False], ids=["unix", "tcp"])
def local(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def echo(local: bool) -> Iterator[EchoProcess]:
    process = start_echo_process(Settings(local_paths=local))
    yield process
    process.end()


@pytest.fixture
def caller(local: bool, echo: EchoProcess) -> Iterator[Caller]:
    made = start_caller(Settings(local_paths=local))
    echo.add(made)
    yield made
    made.close()


def ask(caller: Caller, payload: bytes = b"", *tensors: torch.Tensor) -> int:
    correlation = next(caller.correlations)
    frame = Frame(FrameKind.REQUEST, correlation, b"header", payload, tensors)
    caller.transport.send(1, frame)
    return correlation


def test_a_frozen_peer_bounds_what_is_sent_to_it(local: bool, echo: EchoProcess) -> None:
    settings = Settings(local_paths=local, max_bytes_in_flight=4 * MIB, when_full=WhenFull.RAISE)
    caller = start_caller(settings)
    try:
        echo.add(caller)
        caller.reply(ask(caller))
        assert echo.process.pid is not None
        freeze(echo.process.pid)
        sent = 0
        with contextlib.suppress(QueueFullError):
            while sent < 1000:
                ask(caller, bytes(100_000))
                sent += 1
        os.kill(echo.process.pid, signal.SIGCONT)
        assert sent <= 4 * MIB // 100_000
        caller.expect(sent)
        assert caller.lost == []
    finally:
        caller.close()


def test_a_frozen_peer_whose_link_broke_is_lost_when_the_bound_is_over(local: bool) -> None:
    process = start_echo_process(Settings(local_paths=local))
    cutter = Cutter()
    caller = start_caller(Settings(local_paths=local, resume_seconds=0.5))
    try:
        process.add(caller)
        caller.reply(ask(caller))
        assert process.process.pid is not None
        freeze(process.process.pid)
        ask(caller)
        cutter.cut()
        caller.until(lambda: bool(caller.lost))
        assert "not opened again within 0.5 s" in caller.lost[0][1]
        os.kill(process.process.pid, signal.SIGCONT)
    finally:
        caller.close()
        process.end()


def test_calls_to_a_process_go_on_while_its_connections_break(
    caller: Caller, echo: EchoProcess
) -> None:
    cutter = Cutter()
    large = torch.arange(MIB)
    for _ in range(4):
        asked = [ask(caller, b"x" * 20_000) for _ in range(200)]
        asked_large = [ask(caller, b"", large) for _ in range(4)]
        until(lambda: cutter.cut() > 0)
        for correlation in asked:
            assert caller.reply(correlation).payload == b"x" * 20_000
        for correlation in asked_large:
            assert torch.equal(caller.reply(correlation).tensors[0], large)
    assert caller.lost == []


def test_an_idle_worker_uses_next_to_no_processor_time(caller: Caller, echo: EchoProcess) -> None:
    for _ in range(20):
        caller.reply(ask(caller, b"", torch.zeros(MIB // 8)))
    pause = threading.Event()
    pause.wait(0.3)
    before, mine = echo.cpu_seconds(), _seconds_of_transport_threads()
    pause.wait(2.0)
    assert echo.cpu_seconds() - before < 0.005 * 2.0
    assert _seconds_of_transport_threads() - mine < 0.005 * 2.0


def _seconds_of_transport_threads() -> float:
    """Processor time of the transport's own threads here, the first field of ``schedstat``."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("tensorwire")]
    tasks = [Path(f"/proc/self/task/{thread.native_id}/schedstat") for thread in ours]
    assert tasks
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def test_memory_stays_flat_over_many_small_requests(caller: Caller, echo: EchoProcess) -> None:
    levels = []
    for _ in range(5):
        for _ in range(4000):
            ask(caller)
        caller.expect(4000)
        levels.append(echo.resident_bytes())
    assert levels[-1] - levels[0] < 10 * MIB


def test_memory_stays_flat_over_many_large_requests(caller: Caller, echo: EchoProcess) -> None:
    levels = []
    tensor = torch.zeros(MIB // 4)
    for _ in range(5):
        for _ in range(32):
            for _ in range(5):  # few in flight: how many overlap is chance, and buffers are kept
                ask(caller, b"", tensor)
            caller.expect(5)
        levels.append(echo.resident_bytes())
    assert levels[-1] - levels[0] < 20 * MIB


def test_a_killed_peer_is_lost_at_once_and_leaves_nothing(
    caller: Caller, echo: EchoProcess
) -> None:
    """The last of the module: the process is gone afterwards."""
    large = torch.arange(MIB)
    kept = [caller.reply(ask(caller, b"", large)).tensors[0] for _ in range(8)]
    ask(caller, bytes(MIB), large)
    shared = set(os.listdir("/dev/shm"))
    process = echo.process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    began = time.monotonic()
    caller.until(lambda: bool(caller.lost))
    assert time.monotonic() - began < 2
    assert [life.worker for life, _ in caller.lost] == [1]
    with pytest.raises(WorkerLostError):
        ask(caller)
    assert all(torch.equal(tensor, large) for tensor in kept)
    assert set(os.listdir("/dev/shm")) <= shared
    assert not [name for name in _open_files() if "memfd" in name]


def _open_files() -> list[str]:
    names: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since; the folder itself was, too
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return names
