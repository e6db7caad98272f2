"""The main thread hears of signals at once, whichever thread the kernel gave them to."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

from rpc.runtime import prompt_signals
from tests.signals import signalled_elsewhere
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals are the main thread's",
)

SECONDS = 30.0


class Heard(Exception):
    """The handler ran."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def hear(number: int, frame: FrameType | None) -> None:
        raise Heard

    before = signal.signal(signal.SIGTERM, hear)
    yield
    signal.signal(signal.SIGTERM, before)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=SECONDS)


def wait_for_input() -> None:
    read, write = os.pipe()
    try:
        select.select([read], [], [], SECONDS)
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("wait", [wait_for_a_lock, wait_for_input, lambda: time.sleep(SECONDS)])
def test_any_wait_of_the_main_thread_is_interrupted(wait: Callable[[], None]) -> None:
    with prompt_signals.prompt_signals(), pytest.raises(Heard), signalled_elsewhere():
        wait()


def test_signals_that_come_one_after_another_are_all_heard() -> None:
    with prompt_signals.prompt_signals():
        for _ in range(50):
            with pytest.raises(Heard), signalled_elsewhere():
                wait_for_a_lock()


def test_a_listener_hears_while_the_main_thread_is_in_torch_and_the_handler_runs_later() -> None:
    heard = threading.Event()
    future: torch.futures.Future[int] = torch.futures.Future()

    def end() -> None:
        heard.wait(SECONDS)
        future.set_result(1)

    other = threading.Thread(target=end)
    other.start()
    stop = prompt_signals.listen(signal.SIGTERM, heard.set)
    try:
        with pytest.raises(Heard), signalled_elsewhere():  # noqa: PT012
            future.wait()
            time.sleep(SECONDS)
    finally:
        stop()
        other.join()
    assert heard.is_set()


def test_the_last_user_puts_everything_back() -> None:
    before = signal.getsignal(signal.SIGURG)
    assert prompt_signals.use()
    assert prompt_signals.use()
    prompt_signals.stop()
    assert prompt_signals.is_heard()
    prompt_signals.stop()
    assert not prompt_signals.is_heard()
    assert signal.getsignal(signal.SIGURG) == before
    assert signal.set_wakeup_fd(-1) == -1


def elsewhere(what: Callable[[], object]) -> None:
    other = threading.Thread(target=what)
    other.start()
    other.join()


def test_another_thread_cannot_begin_it_and_has_the_main_one_end_it() -> None:
    began: list[bool] = []
    elsewhere(lambda: began.append(prompt_signals.use()))
    assert began == [False]
    assert prompt_signals.use()
    assert prompt_signals.use()
    elsewhere(prompt_signals.stop)
    assert prompt_signals.is_heard()
    elsewhere(prompt_signals.stop)
    until(lambda: not prompt_signals.is_heard())


def test_a_handler_of_the_programs_for_the_same_signal_still_runs() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, _: seen.append(number))
    try:
        with prompt_signals.prompt_signals():
            signal.raise_signal(signal.SIGURG)
            assert seen == [signal.SIGURG]
        signal.raise_signal(signal.SIGURG)
        assert seen == 2 * [signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, before)


def test_an_asyncio_loop_keeps_its_own_and_gives_way_when_it_is_closed() -> None:
    seen: list[str] = []

    async def program() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, done.set)
        with prompt_signals.prompt_signals():
            assert not prompt_signals.is_heard()
            os.kill(os.getpid(), signal.SIGUSR2)
            await asyncio.wait_for(done.wait(), SECONDS)
        seen.append("loop")

    with prompt_signals.prompt_signals():
        asyncio.run(program())
        assert seen == ["loop"]
        with prompt_signals.prompt_signals():  # as agents and servers do when they begin
            assert prompt_signals.is_heard()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_begins_without_and_can_have_its_own() -> None:
    with prompt_signals.prompt_signals():
        child = os.fork()
        if child == 0:
            try:
                is_heard_at_first = prompt_signals.is_heard()
                with (
                    prompt_signals.prompt_signals(),
                    pytest.raises(Heard),
                    signalled_elsewhere(),
                ):
                    wait_for_a_lock()
                os._exit(int(is_heard_at_first))
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        until(prompt_signals.is_heard)
