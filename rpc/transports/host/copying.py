"""Copies large stretches of memory with several cores.

One core moves several gigabytes per second, and the memory of most machines several
times that. Whoever copies much deals out all but a share of it to helpers, copies that
share, and then whatever no helper has begun: where other cores are busy, or Python is, it
copies alone. A share is one call of ``memmove``, during which Python runs elsewhere.
"""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from ctypes import memmove

from rpc.runtime.threads import Thread
from rpc.transports.host.identity import usable_cores

_MOST_HELPERS = 3
_SHARE = 4 << 20
"""Bytes from which a share is worth the waking of a helper."""
_PAGE = 4096


class _Share:
    """A part of what is to be copied; whoever claims it first copies it."""

    __slots__ = ("_claim", "_done", "_length", "_source", "_target")

    def __init__(self, target: int, source: int, length: int) -> None:
        self._target = target
        self._source = source
        self._length = length
        self._claim = threading.Lock()
        self._done = threading.Lock()
        self._done.acquire()

    def help(self) -> None:
        """Copies it, unless somebody does already."""
        if self._claim.acquire(blocking=False):
            memmove(self._target, self._source, self._length)
            self._done.release()

    def wait(self) -> None:
        """Returns when it is copied; the memory is the caller's again, whatever is raised."""
        try:
            self._done.acquire()
        except BaseException:  # a signal handler's
            self._done.acquire()
            raise


class CopyThreads:
    """The helpers of one worker; they start with the first copy that is worth it.

    Args:
        name: what its threads are called.
        helpers: how many at most; by default one for each other core, up to three.
    """

    def __init__(self, name: str, helpers: int | None = None) -> None:
        self._name = name
        self._helpers = min(usable_cores() - 1, _MOST_HELPERS) if helpers is None else helpers
        self._shares: queue.SimpleQueue[_Share | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started: list[Thread] = []
        self._closed = False

    def copy(self, target: int, source: int, length: int) -> None:
        """Copies ``length`` bytes between two addresses; the stretches do not overlap."""
        parts = min(self._helpers + 1, length // _SHARE)
        if parts < 2 or not self._is_there():
            memmove(target, source, length)
            return
        size = -(-length // parts // _PAGE) * _PAGE
        shares = [
            _Share(target + start, source + start, min(size, length - start))
            for start in range(size, length, size)
        ]
        for share in shares:
            self._shares.put(share)
        try:
            memmove(target, source, size)
        finally:
            for share in reversed(shares):  # helpers begin with the first
                share.help()
            for share in shares:
                share.wait()

    def _is_there(self) -> bool:
        if self._started:
            return not self._closed
        with self._lock:
            if not self._started and not self._closed:
                with suppress(RuntimeError):  # no more threads: those that there are will do
                    for number in range(self._helpers):
                        name = f"{self._name}-copy-{number}"
                        helper = Thread(target=self._help, name=name, daemon=True)
                        helper.start()
                        self._started.append(helper)
            return bool(self._started) and not self._closed

    def _help(self) -> None:
        while (share := self._shares.get()) is not None:
            share.help()
            del share

    def close(self) -> None:
        """Ends the helpers. Copies that are under way, or come later, are made without them."""
        with self._lock:
            self._closed = True
            helpers = self._started
        for _ in helpers:
            self._shares.put(None)
        for helper in helpers:
            helper.join()
