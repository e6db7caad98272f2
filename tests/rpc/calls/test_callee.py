"""Serving requests: what becomes of one whose caller is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import pytest

from rpc.agent import Agent
from rpc.errors import RpcError
from rpc.functions import idempotent
from rpc.protocol.retry import Retry
from rpc.testing import MemoryHub, VirtualClock, connect
from rpc.transports.base import Peer
from tests import waiting
from tests.rpc.gates import Gate, gates, pass_gate

SECONDS = 30.0


old_gate, new_gate = Gate(), Gate()


def serve_old() -> str:
    old_gate.pass_through()
    return "for the old life"


def serve_new() -> str:
    new_gate.pass_through()
    return "for the new life"


until = partial(waiting.until, seconds=SECONDS)


def come_back(agent: Agent, hub: MemoryHub, others: list[Agent]) -> Agent:
    """A worker that was cut off returns under the next incarnation."""
    returned = Agent(agent.info, agent.life.incarnation + 1, hub.transport())
    me = Peer(agent.info, returned.life.incarnation, returned.start())
    returned.join([me, *(other.group.peer(other.info.id) for other in others)])
    for other in others:
        other.add_peer(me)
    return returned


@contextmanager
def closing(*agents: Agent) -> Iterator[None]:
    try:
        yield
    finally:
        for gate in (old_gate, new_gate):
            gate.open.set()
        for agent in agents:
            agent.shutdown(graceful=False)


def test_what_was_asked_by_an_earlier_life_is_not_answered_to_the_next() -> None:
    """Both lives number their requests alike, so that the reply would be taken for another."""
    hub = MemoryHub()
    alice, bob = connect("alice", "bob", hub=hub)
    alice.rpc_async("bob", serve_old)
    assert old_gate.reached.wait(SECONDS)
    hub.cut(alice.info.id)
    returned = come_back(alice, hub, [bob])
    with closing(alice, returned, bob):
        answer = returned.rpc_async("bob", serve_new)
        assert new_gate.reached.wait(SECONDS)
        served = bob.callee.handled()
        old_gate.open.set()
        until(lambda: bob.callee.handled() > served)
        new_gate.open.set()
        assert answer.wait() == "for the new life"


@pytest.mark.parametrize("leaver", ["alice", "bob"])
def test_a_function_whose_reply_nobody_takes_did_not_fail(
    leaver: str, capfd: pytest.CaptureFixture[str]
) -> None:
    alice, bob = connect("alice", "bob")
    asked = alice.rpc_async("bob", pass_gate, (f"asked before {leaver} left",))
    made = alice.remote("bob", pass_gate, (f"made before {leaver} left",))
    passed = [gates[f"{what} before {leaver} left"] for what in ("asked", "made")]
    assert all(gate.reached.wait(SECONDS) for gate in passed)
    leaving = {"alice": alice, "bob": bob}[leaver]
    with closing(alice, bob), ThreadPoolExecutor(1) as pool:
        left = pool.submit(leaving.shutdown, graceful=False)
        with pytest.raises(RpcError):
            asked.wait()
        if leaver == "alice":  # bob's shutdown waits for its handlers
            left.result(SECONDS)
        for gate in passed:
            gate.open.set()
        until(lambda: bob.callee.handled() == 2)
        assert not any(series.errors for series in bob.callee.metrics())
    del made
    assert "Traceback" not in capfd.readouterr().err


class Lease:
    """Looks, at its end, whether this thread could serve a call."""

    could_serve: ClassVar[list[bool]] = []
    lock: ClassVar[threading.Lock]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("lease",)

    def __del__(self) -> None:
        taken = self.lock.acquire(timeout=2.0)
        if taken:
            self.lock.release()
        self.could_serve.append(taken)


@idempotent
def lease() -> Lease:
    return Lease()


@idempotent
def one() -> int:
    return 1


def ask_again(alice: Agent, bob: Agent, clock: VirtualClock) -> None:
    assert alice.rpc_sync("bob", one, retry=Retry()) == 1


def wait_long(alice: Agent, bob: Agent, clock: VirtualClock) -> None:
    clock.advance(60.0)


def be_lost(alice: Agent, bob: Agent, clock: VirtualClock) -> None:
    bob.worker_loss.lost(alice.life, "it was cut off")


@pytest.mark.parametrize("end", [ask_again, wait_long, be_lost])
def test_a_kept_outcome_ends_where_its_destructor_may_make_calls(
    end: Callable[[Agent, Agent, VirtualClock], None],
) -> None:
    clock = VirtualClock()
    alice, bob = agents = connect("alice", "bob", clock=clock)
    Lease.lock = bob.callee._lock
    Lease.could_serve.clear()
    with closing(*agents):
        assert alice.rpc_sync("bob", lease, timeout=20.0, retry=Retry()) == "lease"
        assert Lease.could_serve == []
        end(alice, bob, clock)
        until(lambda: len(Lease.could_serve) > 0)
        assert Lease.could_serve == [True]
