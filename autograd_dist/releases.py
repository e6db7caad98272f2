"""Tells other workers that contexts are over: not at once, but many to a message.

A context holds memory on the workers it reached, but nobody waits for its end. A
message for each would cost a short training step as much as one of its calls.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from rpc.errors import RpcError
from rpc.extend import Reaper

_log = logging.getLogger("rpc")

_LINGER_SECONDS = 0.02


class Releases:
    """News of contexts that are over, on its way to the workers that took part.

    Args:
        name: of the thread that sends it.
        send: sends the ids of contexts that are over to one worker; what it raises an
            RpcError for, such as that the worker's queue is full, is sent again later;
            any other error is logged, and the worker keeps those contexts.
    """

    def __init__(self, name: str, send: Callable[[int, Sequence[int]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._started = self._closed = False
        self._process = os.getpid()
        self._reaper: Reaper[tuple[int, int]] = Reaper(
            name, self._send_all, _nothing_waits, _LINGER_SECONDS
        )

    def put(self, context_id: int, workers: Iterable[int]) -> None:
        """Queues the news for some workers."""
        if not self._started:
            self._start()
        for worker in workers:
            self._reaper.put((worker, context_id))

    def close(self) -> None:
        """Stops; what is queued is dropped, as the others forget what a worker that left began."""
        with self._lock:
            self._closed = True
        self._reaper.stop()

    def _start(self) -> None:
        if os.getpid() != self._process:  # forked: it is the parent's to tell
            return
        with self._lock:
            if not (self._started or self._closed):
                self._reaper.start()
                self._started = True

    def _send_all(self, batch: list[tuple[int, int]]) -> None:
        contexts: defaultdict[int, list[int]] = defaultdict(list)
        for worker, context_id in batch:
            contexts[worker].append(context_id)
        for worker, ids in contexts.items():
            try:
                self._send(worker, ids)
            except RpcError as error:
                _log.debug("worker %d is told later which contexts are over: %s", worker, error)
                for context_id in ids:
                    self.put(context_id, (worker,))
            except Exception:  # the others, and what comes later, must not suffer
                _log.exception("worker %d is not told which contexts are over: %s", worker, ids)


def _nothing_waits() -> None:
    """Does nothing, as nobody waits for the queue to become empty."""
