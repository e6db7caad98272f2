"""Where `async def` handlers run, what becomes of them, and how it all ends."""

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
from typing import Any

import pytest
import torch

from rpc import event_loop as event_loop_module
from rpc.coroutines import Coroutines
from rpc.errors import AgentClosedError
from rpc.executor import Executor, blocking
from rpc.threads import Thread

SECONDS = 10.0
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Outcomes:
    """What became of coroutines, and on which thread that was told."""

    def __init__(self, coroutines: Coroutines) -> None:
        self._coroutines = coroutines
        self._told: queue.Queue[tuple[object, str, str]] = queue.Queue()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Callable[[], None]:
        return self._coroutines.run(coroutine, self._tell, self._tell)

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
def coroutines(executor: Executor) -> Iterator[Coroutines]:
    coroutines = Coroutines("test-asyncio", executor)
    yield coroutines
    coroutines.close()


@pytest.fixture
def outcomes(coroutines: Coroutines) -> Outcomes:
    return Outcomes(coroutines)


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
    coroutines: Coroutines, outcomes: Outcomes
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
    coroutines.close()
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


def test_no_thread_is_started_before_it_is_needed(coroutines: Coroutines, outcomes: Outcomes):
    assert not coroutines._loops
    outcomes.run(value())
    assert outcomes.outcome() == 7
    assert len(coroutines._loops) == 1


def test_many_threads_may_begin_the_first_coroutine(outcomes: Outcomes):
    threads = [threading.Thread(target=lambda: outcomes.run(value())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert [outcomes.outcome() for _ in threads] == [7] * 8
    for thread in threads:
        thread.join()


def test_close_cancels_what_still_runs_and_says_so(coroutines: Coroutines, outcomes: Outcomes):
    held = Held()
    outcomes.run(held())
    assert held.started.wait(SECONDS)
    coroutines.close()
    assert held.ended == ["cancelled"]
    assert isinstance(outcomes.outcome(), AgentClosedError)
    coroutines.close()


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


def test_close_cancels_what_has_not_begun_yet(coroutines: Coroutines, outcomes: Outcomes):
    blocked, proceed = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        assert proceed.wait(SECONDS)

    outcomes.run(block())
    assert blocked.wait(SECONDS)
    outcomes.run(Held()())
    closer = threading.Thread(target=coroutines.close)
    closer.start()
    proceed.set()
    closer.join(SECONDS)
    kinds = {type(outcomes.outcome()) for _ in range(2)}
    assert kinds == {type(None), AgentClosedError}


def test_close_ends_tasks_generators_and_threads_that_coroutines_left(
    coroutines: Coroutines, outcomes: Outcomes
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
    coroutines.close()
    assert ended == ["generator"]


def test_a_coroutine_that_ignores_its_cancellation_is_abandoned_and_named(
    coroutines: Coroutines,
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
        coroutines.close()
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
    coroutines: Coroutines,
    outcomes: Outcomes,
    caplog: pytest.LogCaptureFixture,
    stubborn: Callable[[threading.Event, threading.Event], Coroutine[Any, Any, None]],
    said: str,
):
    free, started = threading.Event(), threading.Event()
    outcomes.run(stubborn(free, started))
    assert started.wait(SECONDS)
    with caplog.at_level(logging.ERROR):
        coroutines.close(0.1)
    assert not free.is_set()
    assert said in caplog.text
    free.set()


@pytest.mark.parametrize("obeys", [True, False])
def test_close_does_not_wait_for_a_generator_that_does_not_end(
    coroutines: Coroutines,
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
        coroutines.close()
    assert ("generator does not end" in caplog.text) is not obeys


@pytest.mark.parametrize("used", [True, False])
def test_after_close_coroutines_fail_at_once(
    coroutines: Coroutines, outcomes: Outcomes, used: bool
):
    if used:
        outcomes.run(value())
        assert outcomes.outcome() == 7
    coroutines.close()
    outcomes.run(value())
    assert isinstance(outcomes.outcome(), AgentClosedError)


def test_closing_while_coroutines_begin_ends_each_of_them(executor: Executor):
    for _ in range(20):
        coroutines = Coroutines("test-asyncio", executor)
        outcomes = Outcomes(coroutines)
        threads = [threading.Thread(target=lambda o=outcomes: o.run(value())) for _ in range(4)]
        for thread in threads:
            thread.start()
        coroutines.close()
        for thread in threads:
            thread.join()
        for _ in threads:
            outcome = outcomes.outcome()
            assert outcome == 7 or isinstance(outcome, AgentClosedError)


class Blocking:
    """A coroutine that holds its loop in a wait which others are told of."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    async def __call__(self) -> str:
        with blocking():
            self.begun.set()
            assert self.go_on.wait(SECONDS)
        return threading.current_thread().name


async def where() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


@pytest.fixture
def blocked(outcomes: Outcomes) -> Iterator[Blocking]:
    """A coroutine that holds the first loop until the end of the test, or before."""
    blocked = Blocking()
    outcomes.run(blocked())
    assert blocked.begun.wait(SECONDS)
    yield blocked
    blocked.go_on.set()


def test_while_a_coroutine_waits_on_its_thread_others_begin_on_another(
    coroutines: Coroutines, outcomes: Outcomes, blocked: Blocking
) -> None:
    for _ in range(3):
        outcomes.run(where())
    assert [outcomes.outcome() for _ in range(3)] == ["test-asyncio-1"] * 3
    assert len(coroutines._loops) == 2


def test_when_it_has_waited_they_begin_with_it_again(
    coroutines: Coroutines, outcomes: Outcomes, blocked: Blocking
) -> None:
    outcomes.run(where())
    assert outcomes.outcome() == "test-asyncio-1"
    blocked.go_on.set()
    assert outcomes.outcome() == "test-asyncio"
    outcomes.run(where())
    assert outcomes.outcome() == "test-asyncio"
    assert len(coroutines._loops) == 2


def test_what_stands_in_line_behind_one_that_begins_to_wait_begins_elsewhere(
    outcomes: Outcomes,
) -> None:
    blocked, all_are_there = Blocking(), threading.Event()

    async def wait_for_the_others() -> str:
        assert all_are_there.wait(SECONDS)
        return await blocked()

    outcomes.run(wait_for_the_others())
    for _ in range(20):
        outcomes.run(where())
    all_are_there.set()
    assert [outcomes.outcome() for _ in range(20)] == ["test-asyncio-1"] * 20
    blocked.go_on.set()
    assert outcomes.outcome() == "test-asyncio"


def test_as_many_may_wait_as_there_are(coroutines: Coroutines, outcomes: Outcomes) -> None:
    depth = 30
    waits = [threading.Event() for _ in range(depth + 1)]

    async def nest(level: int) -> int:
        if level < depth:
            outcomes.run(nest(level + 1))
            with blocking():
                assert waits[level + 1].wait(SECONDS)
        waits[level].set()
        return level

    outcomes.run(nest(0))
    assert sorted([outcomes.outcome() for _ in range(depth + 1)], key=repr) == sorted(
        range(depth + 1), key=repr
    )
    assert len(coroutines._loops) == depth + 1


def test_one_that_began_elsewhere_is_cancelled_there(outcomes: Outcomes, blocked: Blocking) -> None:
    held = Held()
    cancel = outcomes.run(held())
    assert held.started.wait(SECONDS)
    cancel()
    assert isinstance(outcomes.outcome(), asyncio.CancelledError)
    assert held.ended == ["cancelled"]


def test_one_that_has_not_begun_is_cancelled_at_once_and_never_does(outcomes: Outcomes) -> None:
    held, begun, go_on = Held(), threading.Event(), threading.Event()
    outcomes.run(block(go_on, begun))  # nobody is told of this wait
    assert begun.wait(SECONDS)
    cancel = outcomes.run(held())
    cancel()
    cancel()
    assert isinstance(outcomes.outcome(), asyncio.CancelledError)
    go_on.set()
    assert outcomes.outcome() is None
    outcomes.run(value())
    assert outcomes.outcome() == 7
    assert not held.started.is_set()


def test_one_that_another_cancels_before_it_has_begun_fails(outcomes: Outcomes) -> None:
    all_are_there = threading.Event()

    async def cancel_all_others() -> int:
        assert all_are_there.wait(SECONDS)
        while not (others := asyncio.all_tasks() - {asyncio.current_task()}):
            await asyncio.sleep(0)
        for each in others:
            each.cancel()
        return 1

    held = Held()
    outcomes.run(cancel_all_others())
    outcomes.run(held())
    all_are_there.set()
    found = {type(outcomes.outcome()) for _ in range(2)}
    assert found == {int, asyncio.CancelledError}


def test_close_cancels_what_runs_on_every_loop(
    coroutines: Coroutines, outcomes: Outcomes, blocked: Blocking
) -> None:
    held = Held()
    outcomes.run(held())
    assert held.started.wait(SECONDS)
    closer = threading.Thread(target=coroutines.close)
    closer.start()
    assert isinstance(outcomes.outcome(), AgentClosedError)
    blocked.go_on.set()
    closer.join(SECONDS)
    assert held.ended == ["cancelled"]
    assert outcomes.outcome() == "test-asyncio"


def test_without_a_thread_a_coroutine_fails_and_the_next_one_may_get_one(
    outcomes: Outcomes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        start = Thread.start

        def refuse(thread: Thread) -> None:
            if thread.name == "test-asyncio":
                raise RuntimeError("can't start new thread")
            start(thread)

        patched.setattr(Thread, "start", refuse)
        outcomes.run(value())
        assert "can't start new thread" in str(outcomes.outcome())
    outcomes.run(value())
    assert outcomes.outcome() == 7
    assert "no further event loop can be started" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("no threads"), OSError("no descriptors")])
def test_without_another_loop_what_has_not_begun_does_so_when_the_wait_is_over(
    outcomes: Outcomes,
    blocked: Blocking,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        if isinstance(error, OSError):
            patched.setattr(asyncio, "new_event_loop", refuse)
        else:
            patched.setattr(event_loop_module.Thread, "start", refuse)
        outcomes.run(where())
    assert str(error) in caplog.text
    blocked.go_on.set()
    assert [outcomes.outcome() for _ in range(2)] == ["test-asyncio"] * 2
