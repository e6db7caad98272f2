"""One loop and its thread; what runs there, and how that ends, is tested with ``coroutines``."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import pytest

from rpc import event_loop as event_loop_module
from rpc.event_loop import EventLoop
from rpc.executor import blocking, is_replaced_while_waiting, is_shared_thread

SECONDS = 10.0
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Told:
    """What a loop says of its waits."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def blocks(self, _: EventLoop) -> None:
        self.waits.append("blocks")

    def goes_on(self, _: EventLoop) -> None:
        self.waits.append("goes on")


def test_it_tells_of_a_wait_on_its_thread_but_not_of_one_within() -> None:
    told, over = Told(), threading.Event()
    loop = EventLoop("test", told.blocks, told.goes_on)

    def wait() -> None:
        assert is_shared_thread()
        assert is_replaced_while_waiting()
        with blocking(), blocking():
            told.waits.append("waits")
        over.set()

    loop.soon(wait)
    loop.start()
    assert over.wait(SECONDS)
    loop.stop()
    loop.join(SECONDS)
    assert told.waits == ["blocks", "waits", "goes on"]


def test_a_task_begins_in_the_context_that_it_is_made_in() -> None:
    ended: list[Any] = []
    over = threading.Event()
    loop = EventLoop("test", lambda _: None, lambda _: None)
    context = contextvars.copy_context()
    context.run(variable.set, "given")

    async def look() -> str:
        return variable.get()

    def begin() -> None:
        context.run(loop.begin, look(), "looking", done)

    def done(task: Any) -> None:
        ended.append((task.get_name(), task.result()))
        over.set()

    loop.start()
    loop.soon(begin)
    assert over.wait(SECONDS)
    loop.stop()
    loop.join(SECONDS)
    assert ended == [("looking", "given")]


def test_without_a_thread_it_is_of_no_use_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    loop = EventLoop("test", lambda _: None, lambda _: None)
    assert loop.is_usable()
    with monkeypatch.context() as patched:
        patched.setattr(event_loop_module.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            loop.start()
    assert not loop.is_usable()
    loop.soon(lambda: None)
    loop.stop()
    loop.join(SECONDS)
