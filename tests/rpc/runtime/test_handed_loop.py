"""One asyncio loop, and which of its threads has it."""

from __future__ import annotations

import asyncio
import contextvars
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rpc.runtime import handed_loop
from rpc.runtime.executor import blocking, is_replaced_while_waiting, is_shared_thread
from rpc.runtime.handed_loop import HandedLoop
from tests.waiting import until

SECONDS = 10.0


@pytest.fixture
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@pytest.fixture
def handed(loop: asyncio.AbstractEventLoop) -> Iterator[HandedLoop]:
    handed = HandedLoop("handed", loop)
    handed.start()
    yield handed
    if not loop.is_closed():
        loop.call_soon_threadsafe(handed.end)
    assert handed.join(time.monotonic() + SECONDS) == []
    assert loop.is_closed()


def wait_for(event: threading.Event) -> None:
    with blocking():
        assert event.wait(SECONDS)


def run_all(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop, *callbacks: Callable[[], object]
) -> None:
    """Calls them in one round of the loop."""
    loop.call_soon_threadsafe(lambda: [loop.call_soon(each) for each in callbacks])


def test_its_threads_are_known_to_be_shared_and_replaced(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    told: list[bool] = []
    over = threading.Event()

    def look() -> None:
        told.extend([is_shared_thread(), is_replaced_while_waiting(), handed.runs_here()])
        over.set()

    run_all(loop, handed, look)
    assert over.wait(SECONDS)
    assert told == [True, True, True]
    assert not handed.runs_here()


def test_without_waits_one_thread_runs_everything(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    threads: list[threading.Thread] = []
    run_all(loop, handed, *[lambda: threads.append(threading.current_thread())] * 50)
    until(lambda: len(threads) == 50)
    assert len({*threads}) == 1


def test_what_is_left_of_a_round_is_called_once_while_its_thread_waits(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    called: list[int] = []
    go_on, over = threading.Event(), threading.Event()
    rest = [lambda each=each: called.append(each) for each in range(20)]
    run_all(loop, handed, lambda: wait_for(go_on), *rest, over.set)
    assert over.wait(SECONDS)
    assert called == [*range(20)]
    go_on.set()
    again = threading.Event()
    loop.call_soon_threadsafe(again.set)
    assert again.wait(SECONDS)
    assert called == [*range(20)]


def test_who_waits_in_turn_comes_back_whatever_the_order(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    events = [threading.Event() for _ in range(30)]
    back: list[int] = []
    waiting: list[int] = []

    def wait(each: int) -> None:
        waiting.append(each)
        wait_for(events[each])
        back.append(each)

    run_all(loop, handed, *[lambda each=each: wait(each) for each in range(30)])
    until(lambda: len(waiting) == 30)
    order = [*range(30)]
    random.Random(5).shuffle(order)
    for each in order:
        events[each].set()
    until(lambda: len(back) == 30)
    assert sorted(back) == [*range(30)]
    until(lambda: handed._count <= 2)  # no more threads than one that runs and one that rests


def test_a_task_is_in_its_step_again_when_it_has_waited(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    go_on = threading.Event()

    async def wait() -> bool:
        before = asyncio.current_task(), asyncio.get_running_loop(), threading.get_ident()
        wait_for(go_on)
        after = asyncio.current_task(), asyncio.get_running_loop(), threading.get_ident()
        async with asyncio.Lock():
            await asyncio.sleep(0.001)
        return before == after and before[0] is not None

    async def let_go_on() -> bool:
        own = asyncio.current_task()
        go_on.set()
        await asyncio.sleep(0)
        return own is asyncio.current_task()

    first = asyncio.run_coroutine_threadsafe(wait(), loop)
    second = asyncio.run_coroutine_threadsafe(let_go_on(), loop)
    assert first.result(SECONDS)
    assert second.result(SECONDS)


def test_no_two_threads_run_the_loop_at_once(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    inside: list[int] = []
    overlaps: list[list[int]] = []

    async def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            inside.append(seed)
            sum(range(rng.randrange(3000)))
            overlaps.extend([[*inside]] if len(inside) > 1 else [])
            inside.remove(seed)
            if rng.random() < 0.5:
                event = threading.Event()
                loop.call_later(rng.random() * 0.002, event.set)
                wait_for(event)
            else:
                await asyncio.sleep(rng.random() * 0.001)

    done = [asyncio.run_coroutine_threadsafe(work(seed), loop) for seed in range(20)]
    for each in done:
        each.result(SECONDS)
    assert overlaps == []


def test_it_ends_when_the_last_that_waits_is_back(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    go_on, waits = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        wait_for(go_on)

    run_all(loop, handed, wait)
    assert waits.wait(SECONDS)
    loop.call_soon_threadsafe(handed.end)
    assert len(handed.join(time.monotonic() + 0.1)) == 1
    assert not loop.is_closed()
    go_on.set()
    assert handed.join(time.monotonic() + SECONDS) == []
    assert loop.is_closed()


def test_without_another_thread_the_others_go_on_when_the_wait_is_over(
    loop: asyncio.AbstractEventLoop,
    handed: HandedLoop,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    go_on, over = threading.Event(), threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(handed_loop.Thread, "start", refuse)
        run_all(loop, handed, lambda: wait_for(go_on), over.set)
        until(lambda: "cannot start a thread" in caplog.text)
    assert not over.is_set()
    go_on.set()
    assert over.wait(SECONDS)


def test_what_shares_the_context_of_one_that_waits_comes_after_it(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop
) -> None:
    context = contextvars.copy_context()
    go_on, others, over = threading.Event(), threading.Event(), threading.Event()

    def begin() -> None:
        loop.call_soon(wait_for, go_on, context=context)
        loop.call_soon(over.set, context=context)
        loop.call_soon(others.set)

    loop.call_soon_threadsafe(begin)
    assert others.wait(SECONDS)
    assert not over.is_set()
    go_on.set()
    assert over.wait(SECONDS)


def test_a_reader_that_waits_is_not_called_again_meanwhile(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, over = threading.Event(), threading.Event()
    read: list[bytes] = []
    ours, theirs = socket.socketpair()

    def receive() -> None:
        wait_for(go_on)
        read.append(ours.recv(1))
        over.set()

    ours.setblocking(False)
    with ours, theirs:
        theirs.send(b"a")
        loop.call_soon_threadsafe(loop.add_reader, ours, receive)
        for _ in range(5):  # whatever else there is goes on
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.001), loop).result(SECONDS)
        go_on.set()
        assert over.wait(SECONDS)
        removed = threading.Event()
        loop.call_soon_threadsafe(lambda: (loop.remove_reader(ours), removed.set()))
        assert removed.wait(SECONDS)
    assert read == [b"a"]
    assert caplog.text == ""


def test_a_context_that_a_stranger_is_in_is_an_error_as_ever(
    loop: asyncio.AbstractEventLoop, handed: HandedLoop, caplog: pytest.LogCaptureFixture
) -> None:
    context = contextvars.copy_context()

    def call() -> None:
        loop.call_soon_threadsafe(print, context=context)
        until(lambda: "cannot enter context" in caplog.text)

    context.run(call)


class Foreign(asyncio.AbstractEventLoop):
    """A loop of another kind, that does nothing by itself."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:  # type: ignore[override]
        callback(*args)

    def stop(self) -> None: ...

    def close(self) -> None: ...


def test_a_loop_of_another_kind_stands_still_while_one_waits() -> None:
    handed = HandedLoop("handed", Foreign())
    handed.enter_wait()
    handed.leave_wait()
    assert handed._count == 0
