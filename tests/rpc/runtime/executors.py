"""Executors and tasks for several test files."""

from __future__ import annotations

import threading

from rpc.runtime.executor import Executor

SECONDS = 10.0


NEVER = 3600.0


class Held:
    """A task that says that it runs, and ends when it is let go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.let_go = threading.Event()
        self.ended = threading.Event()

    def __call__(self) -> None:
        self.started.set()
        assert self.let_go.wait(SECONDS)
        self.ended.set()


def start(executor: Executor, count: int) -> list[Held]:
    tasks = [Held() for _ in range(count)]
    for task in tasks:
        assert executor.submit(task)
    return tasks


def let_go(*tasks: Held) -> None:
    for task in tasks:
        task.let_go.set()
