"""TensorWire starts and closes so that nothing is left open, whatever goes wrong."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from typing import Any

import pytest
import torch

from rpc.errors import (
    AgentClosedError,
)
from rpc.runtime import signals as interrupts
from rpc.transports.base import Frame
from rpc.transports.tensorwire import Settings, TensorWireTransport
from rpc.transports.tensorwire.peer import RemotePeer
from rpc.transports.tensorwire.reconnect import Reconnector
from rpc.transports.tensorwire.wakeup import WakeUp
from rpc.worker_info import WorkerInfo
from tests.rpc.transports.conformance import (
    SECONDS,
    Worker,
)
from tests.rpc.transports.tensorwire.transports import (
    Maker,
    until,
)
from tests.signals import heeding_interrupts


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Beginnings.


def test_a_start_that_finds_no_descriptors_leaves_none_open() -> None:
    def start() -> bool:
        transport = TensorWireTransport(Settings())
        try:
            Worker(transport, WorkerInfo("worker0", 0)).start()
        except OSError as error:
            assert error.errno == errno.EMFILE  # noqa: PT017
            return False
        finally:
            transport.close(0.1)
        return True

    files, most = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(each) for each in os.listdir("/proc/self/fd")}
    free = [number for number in range(1000) if number not in taken]
    try:
        for room in range(30):
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[room], most[1]))
            started = start()
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
            assert descriptors() == files
            if started:
                break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert started
    assert room > 5


# Ends.


def test_nothing_can_be_sent_after_close(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    a.close()
    with pytest.raises(AgentClosedError):
        a.notify(b, b"h")


def test_threads_and_descriptors_are_gone_after_close(make: Maker) -> None:
    threads, files = set(threading.enumerate()), descriptors()
    workers = make(Settings(), Settings(), Settings(local_paths=False))
    large = torch.ones(1 << 18)
    for a in workers:
        for b in workers:
            for _ in range(5):
                kept = a.call(b, b"h", b"x" * 100_000, large)
    for worker in workers:
        worker.close()
        worker.received.clear()
    assert set(threading.enumerate()) == threads
    assert descriptors() == files
    assert kept.tensors[0].sum() == 1 << 18


def test_a_handler_may_close_its_own_transport(make: Maker) -> None:
    a, b = make(Settings(), Settings())
    closed = threading.Event()

    def answer(worker: Worker, sender: int, frame: Frame) -> None:
        worker.transport.close(0.5)
        closed.set()

    b.answer = answer
    a.ask(b, b"h")
    assert closed.wait(SECONDS)
    a.until(lambda: bool(a.lost))


class Interrupt(BaseException):
    """An error such as a signal handler may raise."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(RemotePeer, "flush", marks=pytest.mark.interpreted),
        (Reconnector, "join"),
        (threading.Thread, "join"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_close_that_is_interrupted_closes_everything_all_the_same(
    make: Maker, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    threads, files = set(threading.enumerate()), descriptors()
    a, b = make(Settings(), Settings())
    a.call(b, b"h", b"", torch.ones(1 << 18))
    b.call(a, b"h", b"", torch.ones(1 << 18))
    step, errors = getattr(owner, name), [Interrupt()]

    def interrupted(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return step(*arguments)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Interrupt):
        a.close()
    a.closed = True
    b.close()
    a.received.clear()
    b.received.clear()
    a.replies.clear()
    b.replies.clear()
    until(lambda: set(threading.enumerate()) == threads and descriptors() == files)


def test_ctrl_c_in_the_middle_of_a_step_of_closing_waits_until_nothing_is_left_open(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, files = set(threading.enumerate()), descriptors()
    a, b = make(Settings(), Settings())
    a.call(b, b"h")
    wake, woken = WakeUp.set, list[WakeUp]()

    def wake_and_interrupt(wake_up: WakeUp) -> None:
        if not woken:
            woken.append(wake_up)
            signal.raise_signal(signal.SIGINT)
        wake(wake_up)

    with heeding_interrupts(), monkeypatch.context() as patched:
        interrupts.use()
        patched.setattr(WakeUp, "set", wake_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            a.close()
    a.closed = True
    b.close()
    for each in (a, b):
        each.received.clear()
        each.replies.clear()
    until(lambda: set(threading.enumerate()) == threads and descriptors() == files)
