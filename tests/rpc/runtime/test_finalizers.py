"""Finalizers that the garbage collector runs, wherever it happens to, and that make calls."""

from __future__ import annotations

import gc
import operator
import threading
from _thread import LockType
from collections.abc import Callable
from contextlib import ExitStack
from inspect import getmembers
from typing import Any

import pytest

from rpc.agent import Agent
from rpc.errors import AgentClosedError, RpcError
from rpc.outcomes.futures import Future
from rpc.rrefs.rref import RRef
from rpc.runtime import finalizers
from rpc.testing import as_worker
from tests.waiting import until

SECONDS = 30.0


class Doomed:
    """Garbage that only the collector finds; does something when it does."""

    def __init__(self, deed: Callable[[], Any]) -> None:
        self.me = self
        self.deed = deed
        self.outcome: list[Any] = []
        self.keep = self.outcome.append

    def __del__(self) -> None:
        try:
            self.keep(self.deed())
        except BaseException as error:
            self.keep(error)


def collected(deed: Callable[[], Any]) -> Any:
    """The outcome of a deed that a finalizer did."""
    outcome = Doomed(deed).outcome
    gc.collect()
    return outcome[0]


release = threading.Event()


def wait_for_release() -> None:
    release.wait(SECONDS)


class Box:
    def weigh(self) -> int:
        return 7


def test_only_the_thread_that_collects_is_there() -> None:
    finalizers.watch()
    elsewhere: list[bool] = []

    def look() -> bool:
        other = threading.Thread(target=lambda: elsewhere.append(finalizers.running()))
        other.start()
        other.join()
        return finalizers.running()

    assert collected(look) is True
    assert elsewhere == [False]
    assert not finalizers.running()


def test_a_collection_whose_end_was_missed_is_over_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finalizers.watch()
    monkeypatch.setattr(finalizers, "collecting", threading.get_ident())
    assert not finalizers.running()


def is_lock(value: object) -> bool:
    return type(value) is LockType


def test_a_call_is_made_although_its_thread_holds_our_lock(pair: list[Agent]) -> None:
    alice, _ = pair
    made: list[Future[int]] = []
    parts = (alice.caller, alice.references, alice.callee)
    locks = [each for part in parts for _, each in getmembers(part, is_lock)]
    assert len(locks) >= len(parts)

    def collect() -> None:
        with ExitStack() as held:
            for lock in locks:
                held.enter_context(lock)
            made.append(collected(lambda: alice.rpc_async("bob", operator.neg, (1,))))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it waits for itself"
    assert made[0].wait() == -1


def test_a_method_of_a_referenced_value_can_be_called(pair: list[Agent]) -> None:
    alice, _ = pair
    box: RRef[Box] = alice.remote("bob", Box)
    assert collected(lambda: box.rpc_async().weigh()).wait() == 7


def test_a_call_that_cannot_be_made_fails_its_future(pair: list[Agent]) -> None:
    alice, _ = pair
    future = collected(lambda: alice.rpc_async("nobody", operator.neg, (1,)))
    with pytest.raises(RpcError, match="could not find destination name nobody"):
        future.wait()


class Unsent:
    def __reduce__(self) -> str:
        raise SystemExit("no")


def test_a_call_whose_argument_raises_system_exit_fails_its_future(pair: list[Agent]) -> None:
    alice, _ = pair
    future = collected(lambda: alice.rpc_async("bob", operator.neg, (Unsent(),)))
    until(future.done)
    with pytest.raises(RpcError, match="SystemExit: no"):
        future.wait()


@pytest.mark.parametrize("what", ["rpc_sync", "remote", "to_here", "RRef.rpc_sync"])
def test_what_waits_is_refused(pair: list[Agent], what: str) -> None:
    alice, _ = pair
    box: RRef[Box] = alice.remote("bob", Box)
    deeds: dict[str, Callable[[], Any]] = {
        "rpc_sync": lambda: alice.rpc_sync("bob", operator.neg, (1,)),
        "remote": lambda: alice.remote("bob", operator.neg, (1,)),
        "to_here": box.to_here,
        "RRef.rpc_sync": lambda: box.rpc_sync().weigh(),
    }
    error = collected(deeds[what])
    assert isinstance(error, RpcError)
    assert f"{what.removeprefix('RRef.')} was called by a finalizer" in str(error)
    assert box.rpc_sync().weigh() == 7


def test_a_call_can_be_given_up(pair: list[Agent]) -> None:
    alice, _ = pair
    release.clear()
    future = alice.rpc_async("bob", wait_for_release)
    assert collected(future.cancel)
    with pytest.raises(RpcError, match="cancelled"):
        future.wait()
    release.set()


def test_shutdown_ends_what_was_not_begun(pair: list[Agent]) -> None:
    alice, _ = pair
    bury, may_go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        bury.set()
        may_go_on.wait(SECONDS)

    alice.references.do_later(hold_up)
    assert bury.wait(SECONDS)
    future = collected(lambda: alice.rpc_async("bob", operator.neg, (1,)))
    with as_worker(alice):
        closing = threading.Thread(target=alice.shutdown, args=(False,))
    closing.start()
    until(lambda: alice.caller.closed_because is not None)
    may_go_on.set()
    closing.join(SECONDS)
    with pytest.raises(AgentClosedError):
        future.wait()
