"""The state of a job as JSON, put together twice a second at most, however many ask for it."""

from __future__ import annotations

import gzip
import json
import threading
import time
from typing import Final, Protocol

from tensorwire.watching.hub import Question

_SECONDS_NEW: Final = 0.5


class Watched(Protocol):
    """The job that is shown."""

    def answer(self, question: Question) -> object:
        """Answers one question about it."""


class JobAnswer:
    """The latest answer to the question for the whole job.

    Args:
        watched: the job.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._lock = threading.Lock()
        self._plain = self._packed = b""
        self._made = -_SECONDS_NEW

    def plain(self) -> bytes:
        """The JSON."""
        with self._lock:  # also while it is made: the others that ask want the same
            self._make()
            return self._plain

    def packed(self) -> bytes:
        """The JSON, compressed by gzip: that of a thousand workers is some 8 MB, and 0.3 MB so."""
        with self._lock:
            self._make()
            if not self._packed:
                self._packed = gzip.compress(self._plain, 1)
            return self._packed

    def _make(self) -> None:
        if time.monotonic() - self._made >= _SECONDS_NEW:
            self._plain = json.dumps(self._watched.answer({"ask": "job"}), default=str).encode()
            self._packed = b""
            self._made = time.monotonic()
