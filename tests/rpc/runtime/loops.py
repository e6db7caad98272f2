"""Coroutines, and where their outcomes go, for several test files."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from rpc.runtime.event_loop import EventLoop
from rpc.runtime.executor import blocking

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


async def value(of: object = 7) -> object:
    await asyncio.sleep(0)
    return of


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


async def stop_the_loop() -> int:
    asyncio.get_running_loop().stop()
    return 1


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
