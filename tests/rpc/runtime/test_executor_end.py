"""Closing an executor: what it waits for, and what it abandons."""

from __future__ import annotations

import contextvars
import logging
import threading
from pathlib import Path

import pytest

from rpc.runtime import executor as executor_module
from rpc.runtime.executor import Executor
from tests.programs import run_program
from tests.rpc.runtime.executors import (
    NEVER,
    SECONDS,
    Held,
    let_go,
    start,
)
from tests.waiting import eventually


def test_close_waits_for_what_runs_and_returns_what_was_queued():
    executor = Executor("test", 1, contextvars.Context(), stall_seconds=NEVER)
    (running_task,) = start(executor, 1)
    assert running_task.started.wait(SECONDS)
    queued = start(executor, 2)
    closing: list[list[executor_module.Task]] = []
    closer = threading.Thread(target=lambda: closing.append(executor.close()))
    closer.start()
    assert eventually(lambda: executor.busy() == 1)
    let_go(running_task)
    closer.join(SECONDS)
    assert closing == [queued]
    assert running_task.ended.is_set()
    assert not any(task.started.is_set() for task in queued)
    assert executor.busy() == 0
    assert executor.thread_count() == 0


def test_close_abandons_what_does_not_end(caplog: pytest.LogCaptureFixture):
    executor = Executor("stuck", 2, contextvars.copy_context())
    held = Held()
    executor.submit(held)
    assert held.started.wait(SECONDS)
    with caplog.at_level(logging.ERROR, "rpc"):
        executor.close(seconds=0.01)
    assert "1 handlers do not end, and are abandoned" in caplog.text
    held.let_go.set()
    assert held.ended.wait(SECONDS)


def test_after_close_tasks_are_refused():
    executor = Executor("test", 1, contextvars.Context())
    assert executor.close() == []
    task = Held()
    assert not executor.submit(task)
    assert not executor.run_here(task)
    assert not task.started.is_set()
    assert executor.close() == []
    assert executor.thread_count() == 0


def test_close_wakes_and_joins_idle_threads_and_the_monitor():
    executor = Executor("test", 2, contextvars.Context(), stall_seconds=NEVER)
    tasks = start(executor, 3)
    assert eventually(lambda: {t.name for t in threads()} == {"test-handler", "test-monitor"})
    let_go(*tasks)
    assert all(task.ended.wait(SECONDS) for task in tasks)
    before = threads()
    executor.close()
    assert not any(t.is_alive() for t in before)


def test_a_task_may_close_its_own_executor():
    executor = Executor("test", 1, contextvars.Context(), stall_seconds=NEVER)
    closed = threading.Event()
    executor.submit(lambda: (executor.close(), closed.set()))
    assert closed.wait(SECONDS)
    assert eventually(lambda: executor.thread_count() == 0)


def test_close_joins_threads_that_are_only_just_starting():
    for _ in range(50):
        executor = Executor("test", 4, contextvars.Context(), stall_seconds=NEVER)
        submitters = [threading.Thread(target=start_none, args=(executor,)) for _ in range(3)]
        for submitter in submitters:
            submitter.start()
        executor.close()
        assert executor.thread_count() == 0
        for submitter in submitters:
            submitter.join()
        assert not threads()


def threads() -> list[threading.Thread]:
    """Those of executors of this module."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-")]


def start_none(executor: Executor) -> None:
    for _ in range(3):
        executor.submit(lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
def test_the_end_of_a_process_waits_for_a_handler_in_an_operator_that_was_abandoned(
    tmp_path: Path,
) -> None:
    """The interpreter would abort it."""
    program = """
import contextvars, threading, time, torch
from rpc.runtime.executor import Executor

x, began = torch.ones(600, 600), threading.Event()

def multiply():
    began.set()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        x @ x

executor = Executor("test", 1, contextvars.Context())
executor.submit(multiply)
began.wait()
executor.close(0.01)
"""
    done = run_program(tmp_path, program)
    assert (done.returncode, "1 handlers do not end" in done.stderr) == (0, True), done.stderr
