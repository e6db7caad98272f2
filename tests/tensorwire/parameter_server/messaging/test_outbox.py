"""Calls noted under a lock are made once it is released, in that order."""

from __future__ import annotations

import threading

from tensorwire.parameter_server.messaging.outbox import Outbox


class Lock:
    """A lock that knows whether it is held."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()


def test_what_is_queued_is_done_in_order_after_the_outermost_block() -> None:
    lock, done = Lock(), []
    outbox = Outbox(lock)

    with outbox.acting():
        outbox.later(lambda: done.append(("first", lock.depth)))
        with outbox.acting():
            outbox.later(lambda: done.append(("second", lock.depth)))
        assert done == []

    assert done == [("first", 0), ("second", 0)]


def test_what_is_done_may_act_again() -> None:
    done: list[str] = []
    outbox = Outbox(Lock())

    def again() -> None:
        with outbox.acting():
            outbox.later(lambda: done.append("later"))
        done.append("again")

    with outbox.acting():
        outbox.later(again)

    assert done == ["later", "again"]
