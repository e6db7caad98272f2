"""Divides the work of kernels among the cores of this machine.

Kernels run without the interpreter lock, and so does a copy. Whoever has much to do puts all but
one share of it out for helpers, does that share, and then whatever no helper has begun: where the
other cores are busy it does all by itself. The helpers belong to the current worker; code that
runs outside any worker has none.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

import rpc
from rpc import extend

MOST_SHARES: Final = 4
WORTH: Final = 1 << 20
"""Bytes to read or write from which a share is worth the waking of a helper."""

Work = Callable[[], None]


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
        count: how many; by default one for each other core, up to three.
    """

    def __init__(self, count: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        self.count = min(cores, MOST_SHARES) - 1 if count is None else count
        self._shares: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def run(self, works: Sequence[Work]) -> None:
        """Does all of it, several at a time; raises the first error when nobody works any more."""
        shares = [_Share(work) for work in works]
        if len(shares) > 1 and self._are_there():
            for share in shares[1:]:
                self._shares.put(share)
        try:
            for share in (shares[0], *reversed(shares[1:])):  # helpers begin with the second
                share.help()
        finally:
            for share in shares:
                share.help()
                share.wait()
        for share in shares:
            if share.error is not None:
                raise share.error

    def _are_there(self) -> bool:
        with self._lock:
            if not self._threads and not self._closed:
                for number in range(self.count):
                    name = f"tensorwire-ps-share-{number}"
                    thread = threading.Thread(target=self._help, name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)
            return bool(self._threads) and not self._closed

    def _help(self) -> None:
        while (share := self._shares.get()) is not None:
            share.help()
            del share

    def close(self) -> None:
        """Ends the helpers. Work that is under way, or comes later, is done without them."""
        with self._lock:
            self._closed = True
            threads = self._threads
        for _ in threads:
            self._shares.put(None)
        for thread in threads:
            thread.join()


def _helpers() -> Helpers | None:
    worker = extend.find_worker()
    if worker is None:
        return None
    try:
        return worker.state(Helpers, Helpers, Helpers.close)
    except rpc.AgentClosedError:
        return None


def share_out(works: Sequence[Work]) -> None:
    """Does all of it, several at a time where cores are idle.

    Args:
        works: none of which needs what another does.
    """
    helpers = _helpers() if len(works) > 1 else None
    if helpers is not None:
        helpers.run(works)
        return
    for work in works:
        work()


def shares_of(nbytes: int) -> int:
    """The number of shares into which work that reads or writes so many bytes is divided."""
    if nbytes < 2 * WORTH:
        return 1
    helpers = _helpers()
    return 1 if helpers is None else min(helpers.count + 1, nbytes // WORTH)


def divide(count: int, nbytes: int, work: Callable[[int, int], None]) -> None:
    """Calls ``work(begin, end)`` for ranges that together are all of ``range(count)``.

    Args:
        count: of rows or elements, each of which is worked on by itself.
        nbytes: read or written in all.
        work: does a range.
    """
    parts = min(shares_of(nbytes), count)
    if parts < 2:
        work(0, count)
        return
    ends = [count * part // parts for part in range(parts + 1)]

    def of(part: int) -> Work:
        return lambda: work(ends[part], ends[part + 1])

    share_out([of(part) for part in range(parts)])
