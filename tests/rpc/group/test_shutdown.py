"""A graceful shutdown says what does not end in time, and what leaked."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rpc
from rpc.agent import Agent
from rpc.current import current_agent
from rpc.errors import AgentClosedError, RpcTimeoutError
from rpc.ids import Life
from rpc.outcomes.futures import Future
from rpc.protocol.termination import Phase
from rpc.testing import MemoryHub, VirtualClock, connect
from rpc.transports.base import Frame, FrameKind
from rpc.wire.control import ControlMessage, Probe, decode_batch
from tests.rpc.worker_processes import WorkerProcess, join, leave, served
from tests.waiting import until

SECONDS = 20.0
BUSY = "shutdown: calls were still under way here after 0.50 seconds"

_free = threading.Event()
_holding: set[int] = set()
_numbers = itertools.count()


def hold(number: int) -> None:
    _holding.add(number)
    assert _free.wait(SECONDS)


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    """Of whom alice leads; in the end all have left."""
    _free.clear()
    made = connect("alice", "bob", "carol")
    yield made
    _free.set()
    for agent in made:
        agent.shutdown(graceful=False)


def held(caller: Agent, callee: Agent) -> Future[None]:
    """A call whose handler runs until the end of the test."""
    number = next(_numbers)
    future = caller.rpc_async(callee.info.name, hold, (number,))
    until(lambda: number in _holding)  # one that has not begun would not once it is cancelled
    return future


@contextmanager
def leaving(*others: Agent) -> Iterator[None]:
    """They shut down meanwhile, too."""
    threads = [threading.Thread(target=agent.shutdown) for agent in others]
    for thread in threads:
        thread.start()
    yield
    _free.set()
    for thread in threads:
        thread.join(SECONDS)


def refused(future: Future[None]) -> None:
    with pytest.raises(AgentClosedError):
        future.wait()


def why(agent: Agent) -> str:
    """The error's text from a shutdown that did not end in time."""
    with pytest.raises(RpcTimeoutError) as info:
        agent.shutdown(timeout=0.5)
    return str(info.value)


def test_its_own_handler_is_named_and_not_the_leader(agents: list[Agent]) -> None:
    alice, bob, carol = agents
    held(alice, bob).cancel()
    with leaving(alice, carol):
        assert why(bob) == f"{BUSY}: hold called by 'alice'"


def test_its_own_call_is_named_and_not_the_leader(agents: list[Agent]) -> None:
    alice, bob, carol = agents
    future = held(bob, carol)
    with leaving(alice, carol):
        assert why(bob) == f"{BUSY}: hold called on 'carol'"
    refused(future)


def test_calls_that_were_given_up_are_told_of(agents: list[Agent]) -> None:
    alice, bob, carol = agents
    held(bob, carol).cancel()
    with leaving(alice, carol):
        assert why(bob) == f"{BUSY}: calls that were given up and not answered"


def test_some_of_many_calls_are_named_and_like_ones_once(agents: list[Agent]) -> None:
    alice, bob, carol = agents
    futures = [held(bob, agent) for agent in agents] + [
        bob.rpc_async("alice", hold, (next(_numbers),))
    ]
    with leaving(alice, carol):
        calls = "hold called by 'bob', hold called on 'alice', hold called on 'bob'"
        assert why(bob) == f"{BUSY}: {calls} and 1 more"
    for future in futures:
        refused(future)


def test_the_leader_names_its_own_calls_if_only_they_are_left(agents: list[Agent]) -> None:
    alice, bob, carol = agents
    held(alice, alice).cancel()
    with leaving(bob, carol):
        assert why(alice) == f"{BUSY}: hold called by 'alice'"


def test_the_leader_names_the_others_that_are_left(agents: list[Agent]) -> None:
    alice, bob, carol = agents
    held(alice, bob).cancel()
    with leaving(bob, carol):
        assert (
            why(alice) == "Followers ['alice', 'bob'] timed out in _all_gather after 0.50 seconds"
        )


def test_one_that_was_done_blames_neither_itself_nor_the_leader(agents: list[Agent]) -> None:
    alice, bob, carol = agents
    held(alice, carol).cancel()
    with leaving(alice, carol):
        assert why(bob) == (
            "shutdown: the group was not done after 0.50 seconds; this worker was, "
            "and the leader 'alice' still had to hear so from others"
        )


def test_a_leader_that_says_nothing_is_named(agents: list[Agent]) -> None:
    alice, bob, _ = agents
    with leaving(alice):
        assert why(bob) == (
            "shutdown: the leader 'alice' did not answer within 0.50 seconds; "
            "it does when every worker has called shutdown"
        )
        agents[2].shutdown(graceful=False)


def test_one_that_leaves_alone_names_its_calls(agents: list[Agent]) -> None:
    alice, bob, _ = agents
    held(alice, bob).cancel()
    with pytest.raises(RpcTimeoutError, match=f"{BUSY}: hold called by 'alice'"):
        bob.group_shutdown.leave_alone(0.5)


def test_one_that_leaves_alone_says_what_it_waits_for(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rpc.runtime.wait_log.FIRST", (0.05,))
    alice, bob, _ = agents
    held(alice, bob).cancel()
    leaves = threading.Thread(target=bob.group_shutdown.leave_alone, args=(0.0,), daemon=True)
    leaves.start()
    says = "shutdown of 'bob' has waited 0 s for calls under way: hold called by 'alice'"
    until(lambda: says in [record.getMessage() for record in caplog.records])
    _free.set()
    leaves.join(SECONDS)
    assert not leaves.is_alive()


@pytest.mark.parametrize("leave", [Agent.shutdown, lambda bob: bob.group_shutdown.leave_alone(0.0)])
def test_one_that_is_closed_by_another_thread_waits_for_nobody(
    agents: list[Agent], leave: Callable[[Agent], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.agent.SECONDS_TO_END", 0.5)
    alice, bob, _ = agents
    held(bob, bob).cancel()
    left = threading.Event()

    def leave_in_peace() -> None:
        leave(bob)
        left.set()

    threading.Thread(target=leave_in_peace, daemon=True).start()
    until(lambda: bob.group_shutdown._alone or 1 not in alice.group_shutdown.machine.missing())
    bob.shutdown(graceful=False)
    assert left.wait(SECONDS)


def test_what_the_whole_group_waits_for_is_said_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _free.clear()
    clock = VirtualClock()
    agents = alice, bob, _ = connect("alice", "bob", "carol", clock=clock)
    held(alice, bob).cancel()
    begins = "shutdown: every worker has called it and waits for calls under way on "
    says = {
        f"{begins}'bob': hold called by 'alice'",
        f"{begins}'alice': calls that were given up and not answered",
    }

    def said(times: int) -> bool:
        clock.advance(1)
        messages = [record.getMessage() for record in caplog.records]
        return set(messages) == says and all(messages.count(each) >= times for each in says)

    with leaving(bob, agents[2]):
        clock.advance(3600)  # not a word while one goes on
        assert not caplog.records
        with leaving(alice):
            until(lambda: said(1))
            until(lambda: said(2))
    caplog.clear()
    clock.advance(3600)
    assert not caplog.records


@pytest.mark.parametrize("whose", [0, 1])  # of the leader, and of another
def test_a_step_that_fails_is_taken_again(
    agents: list[Agent],
    whose: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notices = agents[whose].control
    tell, failures = notices.tell, [MemoryError("no room for it")]

    def fails_once(to: Life, message: ControlMessage) -> None:
        if failures:
            raise failures.pop()
        tell(to, message)

    monkeypatch.setattr(notices, "tell", fails_once)
    threads = [threading.Thread(target=agent.shutdown, daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    (record,) = caplog.records
    name = agents[whose].info.name
    assert record.getMessage() == (
        f"{name!r} could not take a step of leaving the group, and will try again"
    )


class _LateToClose:
    """A network on which one worker hears late that the group closes.

    Args:
        worker: its id.
    """

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def delay(self, source: int, destination: int, frame: Frame) -> float:
        """Half a second for that; nothing for all else."""
        if destination != self._worker or frame.kind is not FrameKind.NOTICE:
            return 0.0
        _, messages = decode_batch(frame.payload)
        closes = any(isinstance(each, Probe) and each.phase == Phase.CLOSE for each in messages)
        return 0.5 if closes else 0.0


def test_a_value_that_a_worker_kept_is_a_leak_though_that_one_has_left() -> None:
    hub = MemoryHub(script=_LateToClose(2))
    agents = alice, bob, carol = connect("alice", "bob", "carol", hub=hub)
    rref = bob.remote("carol", abs, (-1,))
    assert rref.to_here() == 1
    bob.group_shutdown.release = lambda: None
    threads = [threading.Thread(target=agent.shutdown) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (alice.group_shutdown.leaks, bob.group_shutdown.leaks) == ([], [])
    (leak,) = carol.group_shutdown.leaks
    assert "used by worker 1" in leak


def call_until_lost(to: str) -> None:
    with pytest.raises(rpc.WorkerLostError):
        rpc.rpc_sync(to, hold, (0,), timeout=0)


def seconds_to_leave(*, graceful: bool, patience: float) -> float:
    """With that many seconds for what was sent to leave."""
    agent = current_agent()
    agent.options = dataclasses.replace(agent.options, flush_seconds=patience)
    began = time.monotonic()
    rpc.shutdown(graceful)
    return time.monotonic() - began


def test_one_that_says_goodbye_takes_nobody_who_hangs_up_then_for_lost(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alice = agents[0]
    struck_off: list[Life] = []
    monkeypatch.setattr(alice, "strike_off", lambda life, *_: struck_off.append(life))
    tell = alice.control.tell

    def tell_and_be_cut_off(to: Life, message: ControlMessage) -> None:
        tell(to, message)
        alice.inbound.peer_lost(to, "it hung up")

    monkeypatch.setattr(alice.control, "tell", tell_and_be_cut_off)
    alice.shutdown(graceful=False)
    assert [each.name for each in alice.group.living()] == ["alice"]
    assert not caplog.records
    assert not struck_off


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.parametrize("graceful", [True, False])
@pytest.mark.parametrize("backend", ["TENSORPIPE", "TENSORWIRE"])
def test_nobody_waits_for_the_answer_of_one_that_left_in_haste(
    backend: str, graceful: bool, tmp_path: Path
) -> None:
    callee, caller = workers = WorkerProcess(), WorkerProcess()
    for rank, worker in enumerate(workers):
        worker.begin(join, backend, f"file://{tmp_path / 'store'}", f"worker{rank}", rank, 2)
    for worker in workers:
        worker.result()
    caller.begin(call_until_lost, "worker0")
    until(lambda: callee.do(served) == 1)
    callee.begin(leave, graceful=False)
    caller.result()
    seconds = caller.do(seconds_to_leave, graceful=graceful, patience=2 * SECONDS)
    callee.result()
    for worker in workers:
        worker.end()
    assert seconds < SECONDS / 2
