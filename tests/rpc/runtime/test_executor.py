"""The rules that the handler threads keep, whatever the handlers do to them.

A *patient* executor has a monitor that never strikes: what completes on it
completes because no wake-up was lost, not because the monitor papered it over.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import logging
import queue
import random
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from rpc.runtime import executor as executor_module
from rpc.runtime.executor import Executor, blocking, in_handler
from tests.rpc.runtime.executors import (
    NEVER,
    SECONDS,
    Held,
    let_go,
    start,
)
from tests.waiting import eventually


class Countdown:
    """Becomes set when it has been counted down to nothing."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._done.set()

    def wait(self) -> None:
        assert self._done.wait(SECONDS), f"{self._left} tasks were forgotten"


@contextlib.contextmanager
def running(
    limit: int,
    context: contextvars.Context | None = None,
    stall_seconds: float = executor_module.STALL_SECONDS,
) -> Iterator[Executor]:
    executor = Executor(
        "test", limit, context or contextvars.Context(), stall_seconds=stall_seconds
    )
    try:
        yield executor
    finally:
        executor.close()


patient = partial(running, stall_seconds=NEVER)


# --- The limit


def test_no_more_tasks_than_the_limit_run_at_once():
    with patient(limit=3) as executor:
        *first, fourth = start(executor, 4)
        assert all(task.started.wait(SECONDS) for task in first)
        assert executor.thread_count() == 3
        assert executor.busy() == 4
        assert not fourth.started.is_set()
        let_go(first[0])
        assert fourth.started.wait(SECONDS)
        assert executor.thread_count() == 3
        let_go(*first, fourth)
        assert eventually(lambda: executor.busy() == 0)


def test_an_idle_thread_is_used_again():
    with patient(limit=4) as executor:
        for _ in range(5):
            (task,) = start(executor, 1)
            assert task.started.wait(SECONDS)
            let_go(task)
            assert eventually(lambda: len(executor._idle) == 1)
        assert executor.thread_count() == 1


def test_queued_tasks_run_in_the_order_of_their_submission():
    order: list[int] = []
    done = Countdown(20)
    with patient(limit=1) as executor:
        (gate,) = start(executor, 1)
        for number in range(20):
            executor.submit(lambda number=number: (order.append(number), done()))
        let_go(gate)
        done.wait()
    assert order == list(range(20))


# --- Waiting


def test_a_waiting_task_is_replaced_while_it_waits():
    waits, resume = threading.Event(), threading.Event()

    def wait() -> None:
        with blocking():
            waits.set()
            assert resume.wait(SECONDS)

    with patient(limit=1) as executor:
        executor.submit(wait)
        assert waits.wait(SECONDS)
        (other,) = start(executor, 1)
        assert other.started.wait(SECONDS)
        let_go(other)
        resume.set()
        assert eventually(lambda: executor.busy() == 0)


def test_a_task_that_was_queued_before_the_wait_runs_during_it():
    queued, resume, ran = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        assert queued.wait(SECONDS)
        with blocking():
            assert ran.wait(SECONDS)
        resume.set()

    with patient(limit=1) as executor:
        executor.submit(wait)
        executor.submit(ran.set)
        queued.set()
        assert resume.wait(SECONDS)


def test_a_wait_within_a_wait_counts_once():
    waits, resume = threading.Event(), threading.Event()

    def wait() -> None:
        with blocking(), blocking():
            waits.set()
            assert resume.wait(SECONDS)

    with patient(limit=1) as executor:
        executor.submit(wait)
        assert waits.wait(SECONDS)
        first, second = start(executor, 2)
        assert first.started.wait(SECONDS)
        assert executor.thread_count() == 2
        assert not second.started.is_set()
        let_go(first, second)
        resume.set()


def test_a_chain_of_waits_deeper_than_the_limit_completes_and_its_threads_retire():
    depth, limit = 40, 2
    done = threading.Event()

    with patient(limit) as executor:

        def call(level: int, finished: threading.Event) -> None:
            if level:
                inner = threading.Event()
                executor.submit(lambda: call(level - 1, inner))
                with blocking():
                    assert inner.wait(SECONDS)
            finished.set()

        executor.submit(lambda: call(depth, done))
        assert done.wait(SECONDS)
        assert eventually(lambda: executor.thread_count() <= limit and executor.busy() == 0)


def test_a_task_that_comes_back_from_a_wait_delays_others_but_does_not_lose_them():
    """The replacement retires while a task is queued; the returned one must take it."""
    waits, resume, ran = threading.Event(), threading.Event(), threading.Event()
    returned = Held()

    def wait() -> None:
        with blocking():
            waits.set()
            assert resume.wait(SECONDS)
        returned()

    with patient(limit=1) as executor:
        executor.submit(wait)
        assert waits.wait(SECONDS)
        (replacement,) = start(executor, 1)
        assert replacement.started.wait(SECONDS)
        resume.set()
        assert returned.started.wait(SECONDS)  # two run now, one more than the limit
        executor.submit(ran.set)
        let_go(replacement)
        assert eventually(lambda: executor.thread_count() == 1)
        assert not ran.is_set()
        let_go(returned)
        assert ran.wait(SECONDS)


def test_blocking_is_free_outside_handlers():
    assert not in_handler()
    with blocking():
        assert not in_handler()


def test_a_handler_knows_that_it_is_one_even_while_it_waits():
    seen: list[bool] = []

    def look() -> None:
        seen.append(in_handler())
        with blocking():
            seen.append(in_handler())

    with patient(limit=1) as executor:
        executor.run_here(look)
        assert not in_handler()
    assert seen == [True, True]


# --- The monitor


def test_waits_that_nobody_announces_are_overcome():
    """Every task waits for the next, unseen; only the last can end."""
    links = [threading.Event() for _ in range(6)]
    done = Countdown(5)

    def link(number: int) -> None:
        assert links[number + 1].wait(SECONDS)
        links[number].set()
        done()

    with running(limit=1) as executor:
        for number in range(5):
            executor.submit(lambda number=number: link(number))
        executor.submit(links[5].set)
        done.wait()
        assert eventually(lambda: executor.thread_count() <= 1)


def test_a_guest_that_waits_unannounced_is_overcome_although_a_thread_is_idle():
    guest, other = Held(), Held()
    with running(limit=1) as executor:
        (first,) = start(executor, 1)
        let_go(first)
        assert eventually(lambda: len(executor._idle) == 1)
        host = threading.Thread(target=executor.run_here, args=(guest,))
        host.start()
        assert guest.started.wait(SECONDS)
        executor.submit(other)
        assert other.started.wait(SECONDS)
        let_go(guest, other)
        host.join()


def test_a_thread_that_finds_the_limit_exceeded_leaves_its_task_to_the_monitor():
    """It was called for a task, but a waiting handler came back before it arrived."""
    ran = threading.Event()
    with running(limit=1, stall_seconds=0.001) as executor:
        (first,) = start(executor, 1)
        let_go(first)
        assert eventually(lambda: len(executor._idle) == 1)
        with executor._lock:
            executor._queue.append(ran.set)
            executor._busy += 1
            assert executor._staff() is None  # the idle thread is called
            executor._guests += 1  # and never ends
        assert ran.wait(SECONDS)
        executor._guests -= 1


def test_the_monitor_ends_when_all_is_quiet_and_comes_back_when_needed(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(executor_module, "_MONITOR_LINGER_CHECKS", 2)
    with running(limit=1, stall_seconds=0.001) as executor:
        for _ in range(3):
            first, second = start(executor, 2)
            assert second.started.wait(SECONDS)
            let_go(first, second)
            assert eventually(lambda: not executor._monitored)
            assert eventually(lambda: executor.thread_count() <= 1)


def test_the_limit_is_back_in_force_once_the_queue_has_run_dry():
    with running(limit=1, stall_seconds=0.001) as executor:
        tasks = start(executor, 4)
        assert all(task.started.wait(SECONDS) for task in tasks)
        let_go(*tasks)
        assert eventually(lambda: executor.thread_count() <= 1)
        assert executor._allowed() == 1


# --- Guests


def test_run_here_runs_on_the_calling_thread_while_the_limit_allows():
    where: list[threading.Thread] = []
    with patient(limit=1) as executor:
        executor.run_here(lambda: where.append(threading.current_thread()))
        assert where == [threading.current_thread()]
        assert executor.thread_count() == 0


def test_run_here_queues_when_the_limit_is_reached():
    where: list[threading.Thread] = []
    done = threading.Event()
    with patient(limit=1) as executor:
        (running_task,) = start(executor, 1)
        assert running_task.started.wait(SECONDS)
        executor.run_here(lambda: (where.append(threading.current_thread()), done.set()))
        assert where == []
        let_go(running_task)
        assert done.wait(SECONDS)
    assert where[0].name == "test-handler"


def test_a_task_queued_behind_a_guest_runs_when_the_guest_leaves():
    ran = threading.Event()
    with patient(limit=1) as executor:
        executor.run_here(lambda: executor.submit(ran.set))
        assert ran.wait(SECONDS)


def test_a_task_queued_behind_a_guest_runs_when_the_guest_leaves_although_a_thread_was_idle():
    ran = threading.Event()
    with patient(limit=1) as executor:
        (first,) = start(executor, 1)
        let_go(first)
        assert eventually(lambda: len(executor._idle) == 1)
        executor.run_here(lambda: executor.submit(ran.set))
        assert ran.wait(SECONDS)


def test_a_guest_of_a_waiting_task_leaves_the_wait_as_it_was():
    """A waiting handler that reads for others runs a guest, which waits in turn."""
    done = Countdown(2)
    with patient(limit=1) as executor:

        def guest() -> None:
            ran = threading.Event()
            executor.submit(ran.set)
            with blocking():
                assert ran.wait(SECONDS)
            done()

        def wait() -> None:
            with blocking():
                executor.run_here(guest)
                assert executor.waiting == 1
            assert executor.waiting == 0
            done()

        executor.submit(wait)
        done.wait()


def test_a_guest_of_another_executor_is_counted_there():
    ran = threading.Event()
    with patient(limit=1) as home, patient(limit=1) as away:

        def guest() -> None:
            with blocking():
                assert away.waiting == 1
                assert home.waiting == 0
            ran.set()

        home.submit(lambda: away.run_here(guest))
        assert ran.wait(SECONDS)


# --- Errors


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_that_leaves_a_task_is_logged_and_the_thread_goes_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
):
    def fail() -> None:
        raise error

    ran = threading.Event()
    with caplog.at_level(logging.ERROR, logger="rpc"), patient(limit=1) as executor:
        executor.submit(fail)
        executor.submit(ran.set)
        assert ran.wait(SECONDS)
        executor.run_here(fail)
        assert executor.thread_count() == 1
        assert eventually(lambda: executor.busy() == 0)
    ours = [record for record in caplog.records if record.name == "rpc"]
    assert [record.exc_info[1] for record in ours if record.exc_info] == [error] * 2
    assert "test" in ours[0].getMessage()


class BrokenLog(logging.Handler):
    """Raises whatever it is given, as one does whose disk is full."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(28, "No space left on device")


def test_a_log_that_takes_nothing_ends_no_thread():
    def fail() -> None:
        raise ValueError("no")

    log, ran = BrokenLog(), threading.Event()
    logging.getLogger("rpc").addHandler(log)
    try:
        with patient(limit=1) as executor:
            executor.submit(fail)
            executor.submit(ran.set)
            assert ran.wait(SECONDS)
            assert eventually(lambda: executor.busy() == 0)
    finally:
        logging.getLogger("rpc").removeHandler(log)


def test_a_thread_that_cannot_be_started_costs_nothing_but_the_delay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done = Countdown(2)
    with patient(limit=2) as executor:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            assert executor.submit(done)
        assert executor.thread_count() == 0
        assert "cannot start a handler thread" in caplog.text
        executor.submit(done)
        done.wait()


def test_who_owns_the_executor_may_try_again_to_start_a_thread(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done, short = threading.Event(), []
    executor = Executor("test", 2, contextvars.Context(), short.append)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        executor.submit(done.set)
        executor.try_again()
    assert short == [executor, executor]
    executor.try_again()
    assert done.wait(SECONDS)
    executor.try_again()
    assert executor.thread_count() == 1
    executor.close()


# --- Contexts


def test_each_task_runs_in_its_own_copy_of_the_context():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    context = contextvars.Context()
    context.run(variable.set, "given")
    seen: list[str] = []

    def task() -> None:
        seen.append(variable.get())
        variable.set("changed")

    done = threading.Event()
    with patient(limit=1, context=context) as executor:
        executor.run_here(task)
        executor.submit(task)
        executor.submit(task)
        executor.submit(done.set)
        assert done.wait(SECONDS)
    assert seen == ["given"] * 3
    assert variable.get() == "unset"


# --- Anything at all


def scenario(seed: int) -> None:
    """Tasks that run, wait for tasks of their own, or play guest, from several threads."""
    random_ = random.Random(seed)
    limit = random_.randint(1, 4)
    executor = Executor("test", limit, contextvars.Context())

    def make(depth: int, done: Callable[[], None]) -> Callable[[], None]:
        children = random_.randint(0, 3) if depth else 0
        waits = random_.random() < 0.7
        guests = [random_.random() < 0.3 for _ in range(children)]
        finished = Countdown(children)
        tasks = [make(depth - 1, finished) for _ in range(children)]

        def task() -> None:
            for child, guest in zip(tasks, guests, strict=True):
                (executor.run_here if guest else executor.submit)(child)
            if tasks and waits:
                with blocking():
                    finished.wait()
            done()

        return task

    roots = 6
    done = Countdown(roots)
    tasks = [make(3, done) for _ in range(roots)]
    half = roots // 2
    other = threading.Thread(target=lambda: [executor.run_here(task) for task in tasks[:half]])
    other.start()
    for task in tasks[half:]:
        executor.submit(task)
    done.wait()
    other.join()
    assert eventually(lambda: executor.busy() == 0)
    assert eventually(lambda: executor.thread_count() <= limit)
    executor.close()
    assert (executor._guests, executor.waiting) == (0, 0)
    assert (executor._size, len(executor._idle), executor._coming) == (0, 0, 0)


def test_no_wake_up_is_ever_lost():
    for seed in range(60):
        try:
            scenario(seed)
        except BaseException:
            print(f"reproduce with scenario({seed})")
            raise


def openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text()
    found = re.findall(r"/\S*/(?:libgomp|libomp|libiomp)[^/\s]*\.so\S*", maps)
    own = [path for path in found if "/torch/" in path or "/torch.libs/" in path]
    for path in own or found:  # numba and scikit-learn load runtimes of their own
        return ctypes.CDLL(path)
    return None


@pytest.mark.parametrize("way", ["submit", "run_here"])
def test_torchs_number_of_threads_holds_on_every_thread_that_runs_tasks(way: str) -> None:
    runtime = openmp()
    if runtime is None:
        pytest.skip("torch does not use OpenMP here")
    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    executor = Executor("test", 2, contextvars.copy_context())
    try:
        seen: queue.SimpleQueue[int] = queue.SimpleQueue()

        def task() -> None:
            seen.put(runtime.omp_get_max_threads())

        thread = threading.Thread(target=getattr(executor, way), args=(task,))
        thread.start()
        thread.join(SECONDS)
        assert seen.get(timeout=SECONDS) == before + 3
    finally:
        executor.close()
        torch.set_num_threads(before)
