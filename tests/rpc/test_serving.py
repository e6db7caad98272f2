"""A worker that only answers calls leaves when it is done."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore, TCPStore

import rpc
from rpc.agent import Agent
from rpc.errors import RpcError, WorkerLostError
from rpc.group.key_values import KeyValueStore
from rpc.serving import _Others, _refuse_to_wait_for_itself
from rpc.testing import as_worker, local_group
from rpc.worker_info import WorkerInfo
from tests.rpc.stores import signed
from tests.rpc.worker_processes import WorkerProcess, call, join, leave
from tests.waiting import until

ME = WorkerInfo("ps:0", 0)
BACKEND = "TENSORWIRE"


class FakeMembers:
    """An agent as far as it knows who lives."""

    def __init__(self) -> None:
        self.info = ME
        self.group = SimpleNamespace(living=self.living)
        self.names = ["ps:0"]

    def living(self) -> list[WorkerInfo]:
        return [WorkerInfo(name, number) for number, name in enumerate(self.names)]


def test_a_server_outlasts_the_workers_that_do_not_serve() -> None:
    store, members = KeyValueStore(signed(HashStore()), "serving"), FakeMembers()
    others = _Others(cast(Agent, members))
    history = [
        (["ps:0"], False),  # nobody has come
        (["ps:0", "ps:1"], False),  # it may serve, or not
        (["ps:0", "ps:1", "trainer:0"], False),
        (["ps:0", "ps:1"], True),
    ]
    for names, over in history:
        members.names = names
        assert others.have_left(store) is over, names
        store.set("serving/ps:1", b"")


def test_servers_alone_wait_for_somebody_to_serve() -> None:
    store, members = KeyValueStore(signed(HashStore()), "serving"), FakeMembers()
    others = _Others(cast(Agent, members))
    members.names = ["ps:0", "ps:1"]
    assert not others.have_left(store)
    store.set("serving/ps:1", b"")
    assert not others.have_left(store)
    members.names = ["ps:0"]
    assert not others.have_left(store)


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process is a worker of rpcrun, whose role is no service."""
    monkeypatch.setenv("RPC_WORKER_NAME", "ps:0")
    monkeypatch.setenv("RPC_SERVICE", "0")
    return SimpleNamespace(info=ME)


def test_a_worker_that_the_job_waits_for_does_not_wait_for_the_job(seat: Any) -> None:
    with pytest.raises(RpcError, match=r"start it with: rpcrun --role ps:COUNT,service"):
        _refuse_to_wait_for_itself(seat, None)
    _refuse_to_wait_for_itself(seat, "trained")  # somebody else says when


@pytest.mark.parametrize("event", ["two words", ""])
def test_an_event_has_a_name_as_workers_have(event: str) -> None:
    with local_group("here", "there") as (here, _), as_worker(here):
        for use in (rpc.set_event, rpc.serve):
            with pytest.raises(ValueError, match="use letters, digits"):
                use(event)


def handles_signals() -> bool:
    return callable(signal.getsignal(signal.SIGTERM))


def serves(name: str) -> bool:
    """True if the worker can be told to end by a signal by now."""
    try:
        return call(name, handles_signals)
    except WorkerLostError:  # its former life left, and the next is not known yet
        return False


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a group's store, which is in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield f"tcp://127.0.0.1:{store.port}"
    del store


def use_the_store_of_somebody_else() -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


@pytest.fixture
def workers(process_server: None) -> Iterator[list[WorkerProcess]]:
    made = [WorkerProcess() for _ in range(3)]
    for worker in made:
        worker.do(use_the_store_of_somebody_else)
    yield made
    for worker in made:
        worker.end()


@pytest.mark.slow
def test_servers_of_a_dynamic_group_end_with_the_workers_an_event_or_a_signal(
    url: str, workers: list[WorkerProcess]
) -> None:
    names = ["ps:0", "ps:1", "trainer:0"]
    for rank, worker in enumerate(workers):
        worker.begin(join, BACKEND, url, names[rank], rank)
    for worker in workers:
        worker.result()
    first, second, trainer = workers
    first.begin(rpc.serve)
    second.begin(rpc.serve, "trained")
    assert trainer.do(call, "ps:0", abs, -1) == 1
    assert trainer.do(call, "ps:1", abs, -1) == 1
    trainer.do(rpc.set_event, "trained")
    second.result()
    second.do(join, BACKEND, url, names[1], 1)
    second.begin(rpc.serve, "never")
    until(lambda: trainer.do(serves, "ps:1"), seconds=60.0)
    second.send_signal(signal.SIGTERM)
    second.result()
    trainer.do(leave)
    first.result()


@pytest.mark.slow
def test_a_server_of_a_static_group_ends_with_the_others_or_by_a_signal(
    url: str, workers: list[WorkerProcess]
) -> None:
    first, second, _ = workers
    for sent in (None, signal.SIGTERM):
        for rank, worker in enumerate((first, second)):
            worker.begin(join, BACKEND, url, f"worker{rank}", rank, 2)
        for worker in (first, second):
            worker.result()
        first.begin(rpc.serve)
        until(lambda: second.do(serves, "worker0"), seconds=60.0)
        if sent is not None:
            first.send_signal(sent)
            first.result()
            second.do(leave, graceful=False)
        else:
            second.do(leave)
            first.result()
