"""Processes whose torch names may be redirected without harm to other tests."""

from __future__ import annotations

import multiprocessing.forkserver
from collections.abc import Callable, Iterator

import pytest

from tests.processes import ready_made
from tests.rpc.worker_processes import WorkerProcess


@pytest.fixture(scope="session", autouse=True)
def process_server() -> None:
    """Start what makes the processes of tests, before one that uses it begins."""
    ready_made()
    multiprocessing.forkserver.ensure_running()


@pytest.fixture
def make_process(process_server: None) -> Iterator[Callable[[], WorkerProcess]]:
    """Makes processes that end with the test."""
    made: list[WorkerProcess] = []

    def make() -> WorkerProcess:
        made.append(WorkerProcess())
        return made[-1]

    yield make
    for process in made:
        process.end()
