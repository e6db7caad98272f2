"""A walk through the waits that programs have in the main thread: each hears of a signal at once.

The signal goes to another thread than the main one, by ``tgkill``, as the kernel may choose.
``tests/tensorwire/launch/test_endings.py`` does the same to rpcrun and its servers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import rpc
from remote_module import RemoteModule
from rpc.agent import Agent
from rpc.outcomes import collecting
from rpc.testing import as_worker, local_group
from rpc.transports.base import Transport
from tensorwire import parameter_server as ps
from tensorwire.pipeline import Pipeline
from tests.signals import functions_of_the_main_thread, signalled_elsewhere

_SECONDS = 30.0

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals are the main thread's",
)


gate, reached, expired = threading.Event(), threading.Event(), threading.Event()


def wait_at_the_gate() -> None:
    """Runs until the gate is open, or for longer than a test may take."""
    reached.set()
    if not gate.wait(_SECONDS):
        expired.set()


class Heard(BaseException):
    """The handler ran. Like ``SystemExit`` no ``Exception``: those end where modules are loaded."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """SIGTERM opens the gate, and raises."""

    def hear(number: int, frame: FrameType | None) -> None:
        gate.set()
        raise Heard

    for each in (gate, reached, expired):
        each.clear()
    before = signal.signal(signal.SIGTERM, hear)
    yield
    signal.signal(signal.SIGTERM, before)
    gate.set()


@contextmanager
def heard(when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """The block waits in vain, is sent a signal once ``when`` is true, and is ended by it."""
    with pytest.raises(Heard), signalled_elsewhere(when=when):
        yield
    assert not expired.is_set(), "it was heard only when the wait was over"


def main_thread_is_in(*functions: str) -> bool:
    """True if the main thread runs functions of these names, whichever calls which."""
    return {*functions_of_the_main_thread()}.issuperset(functions)


@pytest.fixture
def pair(make_transport: Callable[[], Transport] | None) -> Iterator[list[Agent]]:
    """Two workers, of whom the current one is alice."""
    with local_group("alice", "bob", transport=make_transport) as agents, as_worker(agents[0]):
        yield agents
        gate.set()


def make() -> nn.Module:
    return nn.Linear(1, 1)


def a_call() -> None:
    rpc.rpc_sync("bob", wait_at_the_gate, timeout=0)


def a_future() -> None:
    rpc.rpc_async("bob", wait_at_the_gate, timeout=0).wait()


def what_hangs_on_a_future() -> None:
    rpc.rpc_async("bob", wait_at_the_gate, timeout=0).then(lambda done: done.wait()).wait()


def several_futures() -> None:
    collecting.collect_all([rpc.rpc_async("bob", wait_at_the_gate, timeout=0)]).wait()


def to_here() -> None:
    rpc.remote("bob", wait_at_the_gate, timeout=0).to_here(0)


def a_retried_call() -> None:
    rpc.rpc_sync("bob", rpc.functions.idempotent(wait_at_the_gate), timeout=0, retry=rpc.Retry())


@pytest.mark.parametrize(
    "wait", [a_call, a_future, what_hangs_on_a_future, several_futures, to_here, a_retried_call]
)
def test_a_wait_for_a_worker_is_ended(wait: Callable[[], None], pair: list[Agent]) -> None:
    with heard(reached.is_set):
        wait()


def test_the_wait_for_the_others_at_the_end_is_ended(pair: list[Agent]) -> None:
    future = rpc.rpc_async("bob", wait_at_the_gate, timeout=0)
    with heard(reached.is_set):
        rpc.shutdown()
    with pytest.raises(rpc.AgentClosedError):
        future.wait()


def test_serving_is_ended(pair: list[Agent]) -> None:
    ours = signal.getsignal(signal.SIGTERM)  # serve has one of its own
    with signalled_elsewhere(when=lambda: signal.getsignal(signal.SIGTERM) is not ours):
        rpc.serve(until="never")


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wait_at_the_gate()
        return x * self.weight


def test_a_pipelines_step_is_ended(pair: list[Agent]) -> None:
    stages = [RemoteModule("bob", _Gated), RemoteModule("alice", make)]
    pipe = Pipeline(stages, "gpipe", 2, nn.MSELoss())
    with heard(reached.is_set):
        pipe.train_step(torch.ones(2, 1), target=torch.ones(2, 1))
    pipe.close()


def test_the_waits_of_a_trainer_are_ended() -> None:
    """For the other trainer, as it connects and then, as nothing is pushed there, as it pulls."""
    come, go = threading.Event(), threading.Event()

    def connect() -> tuple[ps.Cluster, Any]:
        cluster = ps.connect(["server"], trainers=2)
        return cluster, cluster.table("items", 2, ps.SGD(lr=1.0))

    def other(agent: Agent) -> None:
        with as_worker(agent):
            come.wait()
            connect()[0].join()
            go.wait()

    with local_group("server", "alice", "bob") as agents, as_worker(agents[1]):
        trainer = threading.Thread(target=other, args=(agents[2],))
        trainer.start()
        try:
            cluster, table = connect()
            with heard(lambda: main_thread_is_in("join", "wait")):
                cluster.join()
            come.set()
            cluster.join()  # else the push could be ended before it is sent
            with heard(lambda: main_thread_is_in("push", "wait")):
                cluster.push({table: (torch.tensor([1]), torch.ones(1, 2))})
            with heard(lambda: main_thread_is_in("pull", "wait")):
                table.pull(torch.tensor([1]))
        finally:
            come.set()
            go.set()
            trainer.join()
