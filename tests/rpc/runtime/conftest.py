"""Fixtures that several test files here share."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator

import pytest

from rpc.runtime.event_loop import EventLoop
from rpc.runtime.executor import Executor
from tests.rpc.runtime.loops import (
    SECONDS,
    Blocking,
    Outcomes,
)


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


@pytest.fixture
def blocked(outcomes: Outcomes) -> Iterator[Blocking]:
    """A coroutine that waits until the end of the test, or before."""
    blocked = Blocking()
    outcomes.run(blocked())
    assert blocked.begun.wait(SECONDS)
    yield blocked
    blocked.go_on.set()
