"""The one thread of an agent that watches the clock and tidies up.

Ends calls past their deadline, sends what references gave up in ``__del__``
left to be sent, and answers shutdown's probes. Never runs user code.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from rpc.runtime.clock import Alarm, Clock
from rpc.runtime.threads import Thread

_SECONDS_AFTER_FAILURE = 1.0

_logger = logging.getLogger("rpc")


class Pulse:
    """Calls ``beat(now)`` when woken, and at the time its last call returned.

    Args:
        name: of the thread.
        clock: tells the time.
        beat: returns when it wants to run next, None for when woken.
    """

    def __init__(self, name: str, clock: Clock, beat: Callable[[float], float | None]) -> None:
        self._clock = clock
        self._beat = beat
        self._alarm = Alarm()
        self._stopping = False
        self._thread = Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread run ``beat`` soon; safe in finalizers and under locks."""
        self._alarm.set()

    def stop(self) -> None:
        """Ends the thread and joins it."""
        self._stopping = True
        self._alarm.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            now = self._clock.now()
            try:
                self._wait(self._beat(now))
            except Exception:
                with suppress(Exception):  # where the log goes may be broken, too
                    _logger.exception("the pulse of an agent failed; this is a bug in TensorWire")
                self._wait(now + _SECONDS_AFTER_FAILURE)

    def _wait(self, deadline: float | None) -> None:
        if not self._stopping:
            self._clock.wait(self._alarm, deadline)
