"""Tries again, on a thread of its own, what a lost or other head did not take."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tensorwire.parameter_server.client.servers import LONGEST_PAUSE, PAUSE
from tensorwire.parameter_server.messaging.outbox import Outbox

_SPREAD: Final = 8
"""Rounds of tries after which all servers are told of the view once more."""


@dataclass(frozen=True, slots=True)
class Part:
    """One shard's part of a push or pull.

    Args:
        shard: its number; -1 for any, where the map has changed.
        number: of the push or pull.
    """

    shard: int
    number: int


@dataclass(frozen=True, slots=True)
class Tries:
    """The ways in which a session tries again.

    Args:
        look: looks for a later view.
        spread: tells servers of this worker's.
        push: sends a part of a push again, with the lock held.
        pull: sends a part of a pull again, with the lock held.
        fail: ends the session with an error.
        is_over: true once it has ended.
    """

    look: Callable[[], object]
    spread: Callable[[], object]
    push: Callable[[Part], object]
    pull: Callable[[Part], object]
    fail: Callable[[Exception], object]
    is_over: Callable[[], bool]


class Retrier:
    """The parts that are to be sent again, and the thread that does so.

    Args:
        condition: guards all that is kept here.
        outbox: of that lock.
        tries: how to try.
    """

    def __init__(self, condition: threading.Condition, outbox: Outbox, tries: Tries) -> None:
        self._condition = condition
        self._outbox = outbox
        self._tries = tries
        self._pushes: set[Part] = set()
        self._pulls: set[Part] = set()
        self._errand: Callable[[], object] | None = None
        self._pause = PAUSE
        context = contextvars.copy_context()  # of this worker
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="tensorwire-ps", daemon=True
        )

    def start(self) -> None:
        """Starts the thread, which ends when the session does."""
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Waits for the end of the thread, unless this is it."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    # --- with the lock held

    def push(self, part: Part) -> None:
        """Sends a part of a push again, soon."""
        self._pushes.add(part)
        self._condition.notify_all()

    def pull(self, part: Part) -> None:
        """Sends a part of a pull again, soon."""
        self._pulls.add(part)
        self._condition.notify_all()

    def first(self, errand: Callable[[], object]) -> None:
        """Does something on the thread before anything is tried again, in place of an earlier."""
        self._errand = errand
        self._condition.notify_all()

    def answered(self) -> None:
        """Notes that a server took something, so the next pause is short."""
        self._pause = PAUSE

    def forget(self) -> None:
        """Tries nothing again that was to be."""
        self._pushes.clear()
        self._pulls.clear()

    # --- on the thread

    def _run(self) -> None:
        rounds = 0
        while True:
            with self._condition:
                self._condition.wait_for(self._has_work)
                if self._tries.is_over():
                    return
                errand, self._errand = self._errand, None
            try:
                if errand is not None:
                    errand()
                    continue
                rounds += 1
                self._round(rounds)
            except Exception as error:
                self._tries.fail(error)

    def _has_work(self) -> bool:
        return bool(self._pushes or self._pulls or self._errand) or self._tries.is_over()

    def _round(self, number: int) -> None:
        with self._condition:
            self._condition.wait_for(self._tries.is_over, self._pause)
            self._pause = min(self._pause * 1.5, LONGEST_PAUSE)
        self._tries.look()
        if number % _SPREAD == 0:
            self._tries.spread()
        with self._outbox.acting():
            pushes, self._pushes = self._pushes, set()
            pulls, self._pulls = self._pulls, set()
            for part in sorted(pushes, key=_number_of):
                self._tries.push(part)
            for part in sorted(pulls, key=_number_of):
                self._tries.pull(part)


def _number_of(part: Part) -> int:
    return part.number
