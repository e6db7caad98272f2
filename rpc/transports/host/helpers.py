"""Divides work among the cores of this process.

For work during which Python runs elsewhere: a copy, a compiled kernel. Whoever has much of it
deals out all but a share to helpers, does that share, and then whatever no helper has begun:
where other cores are busy, or Python is, it does all by itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from rpc.runtime.threads import Thread
from rpc.transports.host.identity import usable_cores

_MOST_HELPERS = 3

Work = Callable[[], object]


class _Share:
    """A part of some work; whoever claims it first does it."""

    __slots__ = ("_claim", "_done", "_work", "error")

    def __init__(self, work: Work) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def help(self) -> None:
        """Does it, unless somebody does already."""
        if self._claim.acquire(blocking=False):
            try:
                self._work()
            except BaseException as error:
                self.error = error
            finally:
                self._done.release()

    def wait(self) -> None:
        """Returns when it is done, whatever a signal handler raises meanwhile."""
        try:
            self._done.acquire()
        except BaseException:
            self._done.acquire()
            raise


class Helpers:
    """The helpers of one worker; they start with the first work that is worth it.

    Args:
        name: what their threads are called.
        count: how many; by default one for each other core, up to three.

    Attributes:
        count: how many there are to be.
    """

    def __init__(self, name: str, count: int | None = None) -> None:
        self._name = name
        self.count = min(usable_cores() - 1, _MOST_HELPERS) if count is None else count
        self._shares: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started: list[Thread] = []
        self._closed = False

    def run(self, works: Sequence[Work]) -> None:
        """Does all of it, several at a time; raises the first error when nobody works any more.

        Args:
            works: none of which needs what another does.
        """
        shares = [_Share(work) for work in works]
        if len(shares) > 1 and self.are_there():
            for share in shares[1:]:
                self._shares.put(share)
        try:
            for share in (*shares[:1], *reversed(shares[1:])):  # helpers begin with the second
                share.help()
        finally:
            for share in shares:
                share.help()
                share.wait()
        for share in shares:
            if share.error is not None:
                raise share.error

    def are_there(self) -> bool:
        """Starts them if they were not; False if there are none."""
        if self._started:
            return not self._closed
        with self._lock:
            if not self._started and not self._closed:
                with suppress(RuntimeError):  # no more threads: those that there are will do
                    for number in range(self.count):
                        name = f"{self._name}-{number}"
                        helper = Thread(target=self._help, name=name, daemon=True)
                        helper.start()
                        self._started.append(helper)
            return bool(self._started) and not self._closed

    def _help(self) -> None:
        while (share := self._shares.get()) is not None:
            share.help()
            del share

    def close(self) -> None:
        """Ends the helpers. Work that is under way, or comes later, is done without them."""
        with self._lock:
            self._closed = True
            helpers = self._started
        for _ in helpers:
            self._shares.put(None)
        for helper in helpers:
            helper.join()
