"""The loop for ``async def`` handlers: where they run, how they end, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from rpc.runtime import handed_loop
from rpc.runtime.event_loop import EventLoop
from tests.rpc.runtime.loops import (
    SECONDS,
    Blocking,
    Held,
    Outcomes,
    stop_the_loop,
    value,
    variable,
)
from tests.waiting import until


async def fail(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def grad_modes() -> list[bool]:
    seen = [torch.is_grad_enabled()]
    await asyncio.sleep(0)
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 0.001)
    return [*seen, torch.is_grad_enabled()]


def test_a_coroutine_keeps_the_grad_mode_it_was_started_in(outcomes: Outcomes) -> None:
    with torch.no_grad():
        outcomes.run(grad_modes())
    outcomes.run(grad_modes())
    found = [outcomes.outcome(), outcomes.outcome()]
    assert sorted(found, key=repr) == [[False, False], [True, True]]


def test_a_result_is_reported_on_the_executor(outcomes: Outcomes):
    outcomes.run(value(3))
    outcome, thread, _ = outcomes.next()
    assert (outcome, thread) == (3, "test-handler")


def test_an_error_is_reported_as_itself(outcomes: Outcomes):
    error = ValueError("no")
    outcomes.run(fail(error))
    assert outcomes.outcome() is error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_coroutine_that_wants_to_end_the_program_ends_only_itself(
    outcomes: Outcomes, error: BaseException
):
    outcomes.run(fail(error))
    assert outcomes.outcome() is error
    outcomes.run(value())
    assert outcomes.outcome() == 7


def test_a_coroutine_that_stops_the_loop_stops_no_other(outcomes: Outcomes):
    gate: list[asyncio.Event] = []
    held = threading.Event()

    async def wait() -> int:
        gate.append(asyncio.Event())
        held.set()
        await gate[0].wait()
        return 2

    async def release() -> int:
        gate[0].set()
        return 3

    outcomes.run(wait())
    assert held.wait(SECONDS)
    outcomes.run(stop_the_loop())
    assert outcomes.outcome() == 1
    outcomes.run(release())
    assert {outcomes.outcome(), outcomes.outcome()} == {2, 3}


def test_a_coroutine_that_is_cancelled_fails(outcomes: Outcomes):
    async def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    outcomes.run(cancel())
    assert isinstance(outcomes.outcome(), asyncio.CancelledError)


def test_coroutines_run_concurrently_on_one_thread(outcomes: Outcomes):
    threads: list[str] = []
    barrier: list[asyncio.Future[None]] = []

    async def first() -> None:
        threads.append(threading.current_thread().name)
        barrier.append(asyncio.get_running_loop().create_future())
        await barrier[0]

    async def second() -> None:
        threads.append(threading.current_thread().name)
        barrier[0].set_result(None)

    outcomes.run(first())
    outcomes.run(second())
    assert [outcomes.outcome(), outcomes.outcome()] == [None, None]
    assert threads == ["test-asyncio"] * 2


def test_the_context_of_the_caller_holds_in_the_coroutine_and_after_it(outcomes: Outcomes):
    async def look() -> str:
        await asyncio.sleep(0)
        seen = variable.get()
        variable.set("changed")
        return seen

    def call() -> None:
        variable.set("given")
        outcomes.run(look())

    contextvars.copy_context().run(call)
    outcome, _, seen_after = outcomes.next()
    assert outcome == "given"
    assert seen_after == "given"
    assert variable.get() == "unset"


def test_no_thread_is_started_before_it_is_needed(loop: EventLoop, outcomes: Outcomes):
    assert loop._loop is None
    outcomes.run(value())
    assert outcomes.outcome() == 7
    assert loop._loop is not None


def test_many_threads_may_begin_the_first_coroutine(outcomes: Outcomes):
    threads = [threading.Thread(target=lambda: outcomes.run(value())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert [outcomes.outcome() for _ in threads] == [7] * 8
    for thread in threads:
        thread.join()


def test_what_waits_for_itself_alone_is_not_collected(outcomes: Outcomes):
    waiting: list[asyncio.Event] = []
    begun = threading.Event()

    async def wait() -> str:
        event = asyncio.Event()
        waiting.append(weakref.proxy(event))
        begun.set()
        await event.wait()
        return "woken"

    async def wake() -> None:
        waiting[0].set()

    outcomes.run(wait())
    assert begun.wait(SECONDS)
    outcomes.run(value())  # so that the first has begun to wait when this has ended
    assert outcomes.outcome() == 7
    gc.collect()
    outcomes.run(wake())
    assert {outcomes.outcome(), outcomes.outcome()} == {None, "woken"}


def test_while_a_coroutine_waits_on_its_thread_others_begin(
    outcomes: Outcomes, blocked: Blocking
) -> None:
    for each in range(3):
        outcomes.run(value(each))
    assert {outcomes.outcome() for _ in range(3)} == {0, 1, 2}
    blocked.go_on.set()
    assert outcomes.outcome() == "waited"


def test_while_a_coroutine_waits_on_its_thread_those_that_have_begun_go_on(
    outcomes: Outcomes,
) -> None:
    gate: list[asyncio.Event] = []
    at_the_gate = threading.Event()

    async def wait() -> str:
        gate.append(asyncio.Event())
        at_the_gate.set()
        await gate[0].wait()
        return "let through"

    async def let_through() -> None:
        gate[0].set()

    outcomes.run(wait())
    assert at_the_gate.wait(SECONDS)
    blocked = Blocking()
    outcomes.run(blocked())
    assert blocked.begun.wait(SECONDS)
    outcomes.run(let_through())
    assert {outcomes.outcome(), outcomes.outcome()} == {None, "let through"}
    blocked.go_on.set()
    assert outcomes.outcome() == "waited"


@pytest.mark.parametrize(
    ("mode", "is_on"),
    [
        (torch.no_grad, torch.is_grad_enabled),
        (torch.inference_mode, torch.is_inference_mode_enabled),
    ],
)
def test_a_mode_of_gradients_goes_with_its_coroutine_from_thread_to_thread(
    outcomes: Outcomes, mode: Callable[[], AbstractContextManager[Any]], is_on: Callable[[], bool]
) -> None:
    gate: list[asyncio.Event] = []
    usual = is_on()

    async def compute() -> list[bool]:
        with mode():
            gate.append(asyncio.Event())
            await gate[0].wait()
            inside = is_on()
        return [inside, is_on()]

    async def look() -> list[bool]:
        return [is_on()]

    async def open_it() -> list[bool]:
        gate[0].set()
        return []

    outcomes.run(compute())
    until(lambda: bool(gate))
    outcomes.run(look())
    assert outcomes.outcome() == [usual]  # on the same thread
    blocked = Blocking()
    outcomes.run(blocked())
    assert blocked.begun.wait(SECONDS)
    outcomes.run(open_it())  # on another
    assert sorted([outcomes.outcome(), outcomes.outcome()]) == [[], [not usual, usual]]
    blocked.go_on.set()
    assert outcomes.outcome() == "waited"
    outcomes.run(look())
    assert outcomes.outcome() == [usual]


def test_one_that_runs_while_another_waits_is_cancelled(
    outcomes: Outcomes, blocked: Blocking
) -> None:
    held = Held()
    cancel = outcomes.run(held())
    assert held.started.wait(SECONDS)
    cancel()
    assert isinstance(outcomes.outcome(), asyncio.CancelledError)
    assert held.ended == ["cancelled"]


def test_one_that_is_cancelled_while_it_waits_learns_of_it_at_its_next_await(
    outcomes: Outcomes,
) -> None:
    blocked = Blocking()
    cancel = outcomes.run(blocked())
    assert blocked.begun.wait(SECONDS)
    cancel()
    outcomes.run(value())
    assert outcomes.outcome() == 7
    blocked.go_on.set()
    assert isinstance(outcomes.outcome(), asyncio.CancelledError)


def test_without_a_thread_a_coroutine_is_refused_and_the_next_one_may_get_one(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(handed_loop.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            outcomes.run(value())
    outcomes.run(value())
    assert outcomes.outcome() == 7
