"""The loop for ``async def`` handlers: where they run, how they end, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from rpc.errors import AgentClosedError
from rpc.runtime import event_loop as event_loop_module
from rpc.runtime import handed_loop
from rpc.runtime.event_loop import EventLoop
from rpc.runtime.executor import Executor, blocking
from tests.waiting import until

SECONDS = 10.0
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Outcomes:
    """The outcomes of coroutines, and on which thread each was told."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._told: queue.Queue[tuple[object, str, str]] = queue.Queue()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Callable[[], None]:
        return self._loop.run(coroutine, self._tell, self._tell)

    def _tell(self, outcome: object) -> None:
        self._told.put((outcome, threading.current_thread().name, variable.get()))

    def next(self) -> tuple[object, str, str]:
        return self._told.get(timeout=SECONDS)

    def outcome(self) -> object:
        return self.next()[0]

    def empty(self) -> bool:
        return self._told.empty()


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor("test", 2, contextvars.Context())
    yield executor
    executor.close()


@pytest.fixture
def loop(executor: Executor) -> Iterator[EventLoop]:
    loop = EventLoop("test-asyncio", executor)
    yield loop
    loop.close()


@pytest.fixture
def outcomes(loop: EventLoop) -> Outcomes:
    return Outcomes(loop)


async def value(of: object = 7) -> object:
    await asyncio.sleep(0)
    return of


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


class Held:
    """A coroutine that waits until it is cancelled."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.ended: list[str] = []

    async def __call__(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.ended.append("cancelled")
            raise


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


async def stop_the_loop() -> int:
    asyncio.get_running_loop().stop()
    return 1


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


def test_close_ends_a_coroutine_that_stops_the_loop_when_it_is_cancelled(
    loop: EventLoop, outcomes: Outcomes
):
    async def resist() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await stop_the_loop()

    held = Held()
    outcomes.run(resist())
    outcomes.run(held())
    assert held.started.wait(SECONDS)
    loop.close()
    assert {type(outcomes.outcome()) for _ in range(2)} == {AgentClosedError}
    assert held.ended == ["cancelled"]


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


def test_close_cancels_what_still_runs_and_says_so(loop: EventLoop, outcomes: Outcomes):
    held = Held()
    outcomes.run(held())
    assert held.started.wait(SECONDS)
    loop.close()
    assert held.ended == ["cancelled"]
    assert isinstance(outcomes.outcome(), AgentClosedError)
    loop.close()


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


def test_close_cancels_what_has_not_begun_yet(loop: EventLoop, outcomes: Outcomes):
    blocked, proceed = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        assert proceed.wait(SECONDS)

    outcomes.run(block())
    assert blocked.wait(SECONDS)
    outcomes.run(Held()())
    closer = threading.Thread(target=loop.close)
    closer.start()
    proceed.set()
    closer.join(SECONDS)
    kinds = {type(outcomes.outcome()) for _ in range(2)}
    assert kinds == {type(None), AgentClosedError}


def test_close_ends_tasks_generators_and_threads_that_coroutines_left(
    loop: EventLoop, outcomes: Outcomes
):
    ended: list[str] = []

    async def generate() -> Any:
        try:
            yield 1
        finally:
            ended.append("generator")

    async def leave() -> None:
        generator = generate()
        await generator.__anext__()
        kept.append(generator)
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)

    kept: list[object] = []
    outcomes.run(leave())
    assert outcomes.outcome() is None
    loop.close()
    assert ended == ["generator"]


def test_a_coroutine_that_ignores_its_cancellation_is_abandoned_and_named(
    loop: EventLoop,
    outcomes: Outcomes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(event_loop_module, "_SECONDS_TO_CANCEL", 0.01)
    started = threading.Event()

    async def ignore() -> None:
        while True:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    outcomes.run(ignore())
    assert started.wait(SECONDS)
    with caplog.at_level(logging.ERROR):
        loop.close()
        gc.collect()
    assert "is abandoned" in caplog.text
    assert outcomes.empty()


async def block(until: threading.Event, started: threading.Event) -> None:
    started.set()
    until.wait(SECONDS)


async def block_a_thread(until: threading.Event, started: threading.Event) -> None:
    await asyncio.to_thread(asyncio.run, block(until, started))


@pytest.mark.parametrize(
    ("stubborn", "said"),
    [(block, "holds the loop"), (block_a_thread, "left to threads is abandoned")],
)
def test_close_abandons_and_names_what_does_not_end(
    loop: EventLoop,
    outcomes: Outcomes,
    caplog: pytest.LogCaptureFixture,
    stubborn: Callable[[threading.Event, threading.Event], Coroutine[Any, Any, None]],
    said: str,
):
    free, started = threading.Event(), threading.Event()
    outcomes.run(stubborn(free, started))
    assert started.wait(SECONDS)
    with caplog.at_level(logging.ERROR):
        loop.close(0.1)
    assert not free.is_set()
    assert said in caplog.text
    free.set()


@pytest.mark.parametrize("obeys", [True, False])
def test_close_does_not_wait_for_a_generator_that_does_not_end(
    loop: EventLoop,
    outcomes: Outcomes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    obeys: bool,
):
    monkeypatch.setattr(event_loop_module, "_SECONDS_TO_CANCEL", 0.01)
    kept: list[object] = []

    async def generate() -> Any:
        try:
            yield 1
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if not obeys:
                await asyncio.Event().wait()

    async def leave() -> None:
        generator = generate()
        await generator.__anext__()
        kept.append(generator)

    outcomes.run(leave())
    assert outcomes.outcome() is None
    with caplog.at_level(logging.ERROR, logger="rpc"):
        loop.close()
    assert ("generator does not end" in caplog.text) is not obeys


@pytest.mark.parametrize("used", [True, False])
def test_after_close_coroutines_fail_at_once(loop: EventLoop, outcomes: Outcomes, used: bool):
    if used:
        outcomes.run(value())
        assert outcomes.outcome() == 7
    loop.close()
    outcomes.run(value())
    assert isinstance(outcomes.outcome(), AgentClosedError)


def test_closing_while_coroutines_begin_ends_each_of_them(executor: Executor):
    for _ in range(20):
        loop = EventLoop("test-asyncio", executor)
        outcomes = Outcomes(loop)
        threads = [threading.Thread(target=lambda o=outcomes: o.run(value())) for _ in range(4)]
        for thread in threads:
            thread.start()
        loop.close()
        for thread in threads:
            thread.join()
        for _ in threads:
            outcome = outcomes.outcome()
            assert outcome == 7 or isinstance(outcome, AgentClosedError)


class Blocking:
    """A coroutine that holds its thread in a wait which others are told of."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    async def __call__(self) -> str:
        with blocking():
            self.begun.set()
            assert self.go_on.wait(SECONDS)
        return await value("waited")


@pytest.fixture
def blocked(outcomes: Outcomes) -> Iterator[Blocking]:
    """A coroutine that waits until the end of the test, or before."""
    blocked = Blocking()
    outcomes.run(blocked())
    assert blocked.begun.wait(SECONDS)
    yield blocked
    blocked.go_on.set()


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


def test_close_cancels_what_runs_while_one_waits(
    loop: EventLoop, outcomes: Outcomes, blocked: Blocking
) -> None:
    held = Held()
    outcomes.run(held())
    assert held.started.wait(SECONDS)
    closer = threading.Thread(target=loop.close)
    closer.start()
    assert isinstance(outcomes.outcome(), AgentClosedError)
    blocked.go_on.set()
    closer.join(SECONDS)
    assert held.ended == ["cancelled"]
    assert isinstance(outcomes.outcome(), AgentClosedError)


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


def test_an_error_that_nobody_can_be_told_any_more_is_no_news_to_asyncio(
    loop: EventLoop, executor: Executor, outcomes: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, waits = threading.Event(), threading.Event()

    async def fail_late() -> None:
        waits.set()
        await asyncio.to_thread(go_on.wait, SECONDS)
        raise ValueError("too late")

    outcomes.run(fail_late())
    assert waits.wait(SECONDS)
    executor.close()
    go_on.set()
    until(lambda: not loop._tasks)
    loop.close()
    gc.collect()
    assert "never retrieved" not in caplog.text
    assert outcomes.empty()
