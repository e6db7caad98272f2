"""Sends the acknowledgements that were not worth a message of their own at the time.

Owns a thread that sleeps while there are none. What they say, and when they are
sent at once instead, is for ``resumption`` and the readers to know.
"""

from __future__ import annotations

import logging
import threading
from queue import SimpleQueue
from typing import Protocol

from rpc.runtime.threads import Thread

_DELAY_SECONDS = 0.25

_log = logging.getLogger("rpc.transports")


class Acknowledging(Protocol):
    """The reading half of a channel."""

    def acknowledge(self) -> None:
        """Tells the other end what has arrived."""


class LateReceipts:
    """The acknowledgements that one worker's channels owe.

    Args:
        name: of the thread, which starts with the first one.
        delay: seconds that an acknowledgement may wait for others.
    """

    def __init__(self, name: str, delay: float = _DELAY_SECONDS) -> None:
        self._name = name
        self._delay = delay
        self._owing: dict[Acknowledging, None] = {}
        self._wake_ups: SimpleQueue[None] = SimpleQueue()
        self._woken = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, channel: Acknowledging) -> None:
        """Has ``channel`` acknowledge before long."""
        self._owing[channel] = None
        if self._woken:  # the thread looks at what is owed after it woke
            return
        self._woken = True
        self._wake_ups.put(None)
        if self._thread is None:
            self._begin_to_serve()

    def _begin_to_serve(self) -> None:
        """Without a thread, what is owed waits for the next that is added."""
        with self._lock:
            if self._thread is not None or self._closed.is_set():
                return
            thread = Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log.warning("%s: acknowledgements have to wait: %s", self._name, error)
                self._woken = False
            else:
                self._thread = thread

    def _serve(self) -> None:
        while not self._closed.is_set():
            self._wake_ups.get()
            self._closed.wait(self._delay)
            self._woken = False
            while self._owing and not self._closed.is_set():
                channel, _ = self._owing.popitem()
                try:
                    channel.acknowledge()
                except Exception:
                    _log.exception("%s could not acknowledge what arrived", self._name)

    def close(self) -> None:
        """Ends the thread; what is still owed is not paid."""
        with self._lock:
            self._closed.set()
            thread = self._thread
        self._wake_ups.put(None)
        if thread is not None:
            thread.join()
        self._owing.clear()
