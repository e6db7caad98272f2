"""Closing the loop for async def handlers: what it cancels, waits for and abandons."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rpc.errors import AgentClosedError
from rpc.runtime import event_loop as event_loop_module
from rpc.runtime.event_loop import EventLoop
from rpc.runtime.executor import Executor
from tests.rpc.runtime.loops import (
    SECONDS,
    Blocking,
    Held,
    Outcomes,
    stop_the_loop,
    value,
)
from tests.waiting import until


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


def test_close_cancels_what_still_runs_and_says_so(loop: EventLoop, outcomes: Outcomes):
    held = Held()
    outcomes.run(held())
    assert held.started.wait(SECONDS)
    loop.close()
    assert held.ended == ["cancelled"]
    assert isinstance(outcomes.outcome(), AgentClosedError)
    loop.close()


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
