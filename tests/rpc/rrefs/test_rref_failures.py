"""References whose value was never made, or whose owner or users were lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rpc
from rpc.agent import Agent
from rpc.errors import (
    RemoteError,
    RpcTimeoutError,
    RRefCreationError,
    RRefDeletedError,
    WorkerLostError,
)
from rpc.rrefs.rref import RRef
from rpc.testing import MemoryHub, VirtualClock, as_worker, connect, local_group
from tests.rpc.rrefs.references import (
    SECONDS,
    Counter,
    eventually,
    identity,
    keep,
    kept_references,
    owned,
)


def bury_the_dead(agent: Agent) -> None:
    """Waits until the handles that were dropped so far are dealt with."""
    done = threading.Event()
    agent.references.do_later(done.set)
    assert done.wait(SECONDS)


def fail() -> None:
    raise ZeroDivisionError("on purpose")


def test_to_here_raises_what_the_creator_raised_and_does_so_again(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            rref.to_here()


def leave(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit(0), GeneratorExit()])
@pytest.mark.parametrize("owner", ["alice", "bob"])
def test_a_creator_that_would_end_the_thread_is_a_remote_error_for_all(
    pair: list[Agent], owner: str, error: BaseException
) -> None:
    rref = pair[0].remote(owner, leave, (error,))
    with pytest.raises(RemoteError, match=f"^{type(error).__name__}"):
        rref.to_here()
    with pytest.raises(RemoteError, match=f"^{type(error).__name__}"):
        pair[0].rpc_sync(owner, read_locally, (rref,))
    with pytest.raises(RemoteError, match=f"^{type(error).__name__}"):
        rref.rpc_sync().anything()


def read_locally(rref: RRef[Any]) -> Any:
    return rref.local_value()


def test_a_call_through_a_failed_reference_raises_the_creators_error(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", fail)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        rref.rpc_sync().anything()


def test_a_method_error_leaves_the_reference_usable(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    with pytest.raises(KeyError, match="nope"):
        rref.rpc_sync().fail()
    assert rref.rpc_sync().add(1) == 1


_gate = threading.Event()


_at_the_gate: list[None] = []


def wait_at_the_gate() -> int:
    _at_the_gate.append(None)
    _gate.wait(20)
    return 1


def test_a_timed_out_to_here_may_be_repeated() -> None:
    _gate.clear()
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, _):
        rref = alice.remote("bob", wait_at_the_gate)
        errors: list[BaseException] = []

        def fetch() -> None:
            try:
                rref.to_here(timeout=0.5)
            except RpcTimeoutError as error:
                errors.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert eventually(lambda: len(alice.caller.outstanding()) == 2)
        clock.advance(1)
        thread.join(10)
        assert "RPC ran for more than" in str(errors[0])
        _gate.set()
        assert rref.to_here() == 1


@pytest.fixture
def closed_gate() -> Iterator[None]:
    _gate.clear()
    _at_the_gate.clear()
    yield
    _gate.set()


@pytest.mark.usefixtures("closed_gate")
def test_a_creation_that_failed_is_logged_once_if_its_reference_was_dropped_unread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, _):
        kept = alice.remote("bob", wait_at_the_gate, timeout=1)
        for owner in ("alice", "bob"):
            alice.remote(owner, wait_at_the_gate, timeout=1)  # dropped at once
        bury_the_dead(alice)
        clock.advance(2)
        assert eventually(lambda: len(caplog.records) == 2)
        assert eventually(lambda: alice.references.creations.under_way() == 0)
        del kept
        assert eventually(lambda: len(caplog.records) == 3)
        _gate.set()
    told = "a remote() failed and nobody looked: RpcTimeoutError: RPC ran for more than set timeout"
    assert [record.getMessage().startswith(told) for record in caplog.records] == [True] * 3


@pytest.mark.usefixtures("closed_gate")
@pytest.mark.parametrize("owner", ["alice", "bob"])
@pytest.mark.parametrize(
    "look",
    [
        lambda rref: rref.to_here(),
        lambda rref: rref.rpc_sync().bit_count(),
        lambda rref: rref._get_future().wait(),
        lambda rref: rpc.rpc_sync("bob", identity, (rref,)),
    ],
    ids=["to_here", "rpc_sync", "future", "argument"],
)
def test_a_creation_that_failed_is_not_logged_if_somebody_looked(
    owner: str, look: Callable[[RRef[Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, _), as_worker(alice):
        rref = alice.remote(owner, wait_at_the_gate, timeout=1)
        clock.advance(2)
        assert eventually(lambda: alice.references.creations.under_way() == 0)
        with pytest.raises(RuntimeError):
            look(rref)
        del rref
        bury_the_dead(alice)
        _gate.set()
    assert caplog.text == ""


@pytest.mark.usefixtures("closed_gate")
@pytest.mark.parametrize("owner", ["alice", "bob"])
@pytest.mark.parametrize(
    "look",
    [lambda rref: rref.to_here(0), lambda rref: rref.rpc_async(0).bit_count().wait()],
    ids=["to_here", "method"],
)
def test_what_waits_for_a_value_fails_when_its_creation_times_out(
    owner: str, look: Callable[[RRef[Any]], object]
) -> None:
    clock = VirtualClock()
    failed: list[BaseException] = []

    def wait() -> None:
        with as_worker(alice), pytest.raises(RRefCreationError) as caught:
            look(rref)
        failed.append(caught.value)

    with local_group("alice", "bob", clock=clock) as (alice, _):
        others = alice.remote("bob", wait_at_the_gate, timeout=0).rpc_async(0).bit_count()
        rref = alice.remote(owner, wait_at_the_gate, timeout=1)
        thread = threading.Thread(target=wait)
        thread.start()
        place = rref._holding.value
        if place is None:
            assert eventually(lambda: len(alice.caller.outstanding()) == 4)
        else:
            assert eventually(lambda: place.waiters() == 1)
        # One that has not begun by then fails by itself, with another error.
        assert eventually(lambda: len(_at_the_gate) == 2)
        clock.advance(2)
        thread.join(SECONDS)
        told = "RRef creation failed: RPC ran for more than set timeout (1000 ms)"
        assert [str(error)[: len(told)] for error in failed] == [told]
        _gate.set()
        assert others.wait() == 1


def test_a_reference_whose_creation_timed_out_raises_on_every_use_and_is_freed() -> None:
    _gate.clear()
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, bob):
        rref = alice.remote("bob", wait_at_the_gate, timeout=0.5)
        clock.advance(1)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref._get_future().wait()
        for use in (rref.to_here, lambda: rref.rpc_sync().bit_length()):
            with pytest.raises(RRefCreationError, match="RRef creation"):
                use()
        with pytest.raises(RRefCreationError, match="RRef creation"):
            alice.rpc_sync("bob", identity, (rref,))
        _gate.set()
        assert eventually(lambda: owned(bob) == 0)


def test_a_reference_to_a_lost_owner_raises_at_once() -> None:
    hub = MemoryHub()
    with local_group("alice", "bob", hub=hub) as (alice, _):
        rref = alice.remote("bob", Counter)
        rref._get_future().wait()
        hub.cut(1)
        assert eventually(lambda: not alice.references.counts().num_user_rrefs)
        for use in (rref.to_here, rref.rpc_sync().add):
            with pytest.raises(WorkerLostError, match="'bob'"):
                use(1)
        with pytest.raises(WorkerLostError, match="'bob'"):
            alice.rpc_sync("alice", identity, (rref,))


def test_the_forks_of_a_lost_user_are_released() -> None:
    hub = MemoryHub()
    with local_group("alice", "bob", "carol", hub=hub) as (alice, bob, _):
        rref = alice.remote("bob", identity, (1,))
        alice.rpc_sync("carol", keep, ("lost", rref))
        del rref
        assert eventually(lambda: alice.references.counts().num_user_rrefs == 0)
        assert owned(bob) == 1
        hub.cut(2)
        assert eventually(lambda: owned(bob) == 0)
        kept_references.pop("lost")


def test_shutdown_deletes_references_that_are_still_held() -> None:
    alice, bob = connect("alice", "bob")
    rref = alice.remote("bob", Counter)
    threads = [threading.Thread(target=agent.shutdown) for agent in (alice, bob)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (alice.group_shutdown.leaks, bob.group_shutdown.leaks) == ([], [])
    with pytest.raises(
        RRefDeletedError, match=r"has been deleted\. Cannot call to_here\(\) on it after deletion"
    ):
        rref.to_here()


def test_the_place_of_a_value_whose_request_could_not_be_sent_is_freed(pair: list[Agent]) -> None:
    for owner in pair:
        with pytest.raises(RuntimeError, match="argument 0"):
            pair[0].remote(owner.info, identity, (threading.Lock(),))
    assert eventually(lambda: owned(pair[0]) == owned(pair[1]) == 0)
