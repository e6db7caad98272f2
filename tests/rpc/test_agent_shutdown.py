"""Agents leave: what they wait for, for how long, and what fails then."""

from __future__ import annotations

import asyncio
import contextlib
import math
import operator
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import rpc
from rpc.agent import Agent
from rpc.errors import (
    AgentClosedError,
    RpcTimeoutError,
    WorkerLostError,
)
from rpc.testing import connect
from rpc.transports.base import Transport
from tests.rpc.handlers import (
    keep_event,
    slow_square,
    wait_for_event,
    whoami,
)
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")


async def bounce_blocking(names: tuple[str, ...]) -> list[str]:
    """Does as ``bounce``, and holds its loop while it waits."""
    await asyncio.sleep(0)
    here = whoami()
    return [here, *rpc.rpc_sync(names[0], bounce_blocking, (names[1:],))] if names else [here]


async def wait_for_a_coroutine_here() -> int:
    return rpc.rpc_async(whoami(), slow_square, (3,)).wait()


async def wait_for_a_value_from_here() -> int:
    return rpc.rpc_sync("bob", fetch_from, (whoami(),))


def fetch_from(name: str) -> int:
    return rpc.remote(name, slow_square, (3,)).to_here()


def _shut_down_together(agents: list[Agent]) -> None:
    threads = [threading.Thread(target=agent.shutdown) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_shutdown_waits_for_calls_nobody_awaited() -> None:
    agents = connect("alice", "bob")
    done: list[int] = []
    futures = [agents[0].rpc_async("bob", operator.add, (i, 0)) for i in range(3000)]
    for future in futures:
        future.add_done_callback(lambda f: done.append(f.value()))
    _shut_down_together(agents)
    assert sorted(done) == list(range(3000))


def _spread(hops: int) -> None:
    """Starts two calls for each hop left, and awaits neither."""
    _spread_count.append(hops)
    if hops:
        others = [n for n in ("alice", "bob", "carol") if n != rpc.get_worker_info().name]
        for other in others:
            rpc.rpc_async(other, _spread, (hops - 1,))


_spread_count: list[int] = []


def test_shutdown_waits_for_calls_spawned_by_calls() -> None:
    _spread_count.clear()
    agents = connect("alice", "bob", "carol")
    agents[0].rpc_async("bob", _spread, (6,))
    _shut_down_together(agents)
    assert len(_spread_count) == 2**7 - 1


def test_after_shutdown_calls_are_refused() -> None:
    agents = connect("alice", "bob")
    _shut_down_together(agents)
    with pytest.raises((AgentClosedError, WorkerLostError)):
        agents[0].rpc_sync("bob", whoami)


def test_shutdown_gives_up_at_its_deadline_and_names_who_was_missing() -> None:
    alice, bob = connect("alice", "bob")
    with pytest.raises(RpcTimeoutError, match=r"Followers \['bob'\] timed out in _all_gather"):
        alice.shutdown(timeout=0.05)
    bob.shutdown(graceful=False)


def test_an_ungraceful_shutdown_fails_the_peers_calls() -> None:
    release = threading.Event()
    alice, bob = connect("alice", "bob")
    future = alice.rpc_async("bob", wait_for_event, (id(keep_event(release)),))
    release.set()
    bob.shutdown(graceful=False)
    with contextlib.suppress(WorkerLostError):
        future.wait()
    with pytest.raises(WorkerLostError, match="bob"):
        alice.rpc_sync("bob", whoami)
    alice.shutdown()


_busy, _free = threading.Event(), threading.Event()


def _hold() -> None:
    _busy.set()
    assert _free.wait(20)


@pytest.mark.parametrize(
    "handler", [wait_for_a_coroutine_here, wait_for_a_value_from_here], ids=["self", "other"]
)
def test_a_coroutine_may_wait_for_one_of_its_own_worker(
    pair: list[Agent], handler: Callable[[], Any]
) -> None:
    assert [pair[1].rpc_sync("alice", handler) for _ in range(3)] == [9, 9, 9]


def test_coroutines_that_wait_for_each_other_in_turn_come_back(pair: list[Agent]) -> None:
    names = ("bob", "alice") * 10
    assert pair[0].rpc_sync("alice", bounce_blocking, (names,)) == ["alice", *names]


async def _hold_the_loop() -> None:
    _hold()


@pytest.mark.parametrize("handler", [_hold, _hold_the_loop])
@pytest.mark.parametrize("graceful", [True, False])
def test_a_shutdown_that_must_end_does_not_wait_for_a_handler(
    make_transport: Callable[[], Transport] | None, handler: Callable[[], Any], graceful: bool
) -> None:
    _busy.clear()
    _free.clear()
    agents = connect("alice", "bob", transport=make_transport)
    future = agents[0].rpc_async("bob", handler)
    assert _busy.wait(20)
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError) if graceful else contextlib.nullcontext():
        agents[1].shutdown(graceful, timeout=0.1)
    assert time.monotonic() - began < 3  # nothing of a handler's five seconds
    _free.set()  # and then the fixture sees that it ends, and leaves nothing
    with pytest.raises(WorkerLostError):
        future.wait()
    agents[0].shutdown(graceful=False)


class Unclosable:
    """An extension."""

    def __init__(self, word: str) -> None:
        self.name = word

    def close(self) -> None:
        raise ValueError(f"{self.name} cannot be closed")


def test_a_step_of_closing_that_fails_keeps_no_other_from_being_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = connect("alice", "bob")
    assert alice.rpc_sync("alice", whoami) == "alice"
    alice.extensions.loaded["first"] = Unclosable("first")  # type: ignore[assignment]
    stop = alice.pulse.stop

    def fail_after() -> None:
        stop()
        raise KeyError("second")

    monkeypatch.setattr(alice.pulse, "stop", fail_after)
    with pytest.raises(ValueError, match="first cannot be closed"):
        alice.shutdown(graceful=False)
    assert "a further step failed: 'second'" in caplog.text
    with pytest.raises(AgentClosedError):
        alice.rpc_sync("bob", whoami)
    bob.shutdown()  # and the fixture sees that no thread of alice is left


def test_shutdown_waits_only_for_the_living() -> None:
    hub = rpc.testing.MemoryHub()
    agents = connect("alice", "bob", "carol", hub=hub)
    hub.cut(0)
    _shut_down_together(agents[1:])
    agents[0].shutdown(graceful=False)


async def shut_down_in_a_coroutine() -> None:
    rpc.api.current_agent().shutdown(timeout=20)


def test_shutdown_in_a_handler_is_refused_and_changes_nothing(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="called in a handler"):
        pair[0].rpc_sync("bob", rpc.shutdown, timeout=20)
    with pytest.raises(RuntimeError, match="called in a handler"):
        pair[0].rpc_sync("bob", lambda: rpc.api.current_agent().shutdown(), timeout=20)
    with pytest.raises(RuntimeError, match="called in a handler"):
        pair[0].rpc_sync("bob", shut_down_in_a_coroutine, timeout=20)
    assert pair[0].rpc_sync("bob", whoami, timeout=20) == "bob"


@pytest.mark.parametrize("seconds", [math.inf, 1e10])
def test_shutdown_may_wait_for_ever(seconds: float) -> None:
    alice, bob = connect("alice", "bob")
    waiting = threading.Thread(target=alice.shutdown, args=(True, seconds))
    waiting.start()
    bob.shutdown(timeout=20)
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("seconds", [math.inf, 1e10])
def test_a_member_that_leaves_alone_may_wait_for_ever(pair: list[Agent], seconds: float) -> None:
    alice, _ = pair
    call = alice.rpc_async("bob", wait_for_event, (id(keep_event(release := threading.Event())),))
    leaving = threading.Thread(target=alice.group_shutdown.leave_alone, args=(seconds,))
    leaving.start()
    release.set()
    leaving.join(20)
    assert not leaving.is_alive()
    assert call.wait()


def test_one_that_leaves_in_haste_names_the_calls_that_it_leaves_running(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    alice, bob = connect("alice", "bob")
    alice.rpc_async("bob", wait_for_event, (id(keep_event(release)),))
    until(lambda: bool(bob.callee.serving()))
    bob.shutdown(graceful=False)
    release.set()
    assert re.search(r"'bob' left while .*wait_for_event, called by 'alice', was", caplog.text)
    alice.shutdown()
