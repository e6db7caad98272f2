"""A virtual clock that moves only when what happens at one time has happened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rpc.agent import Agent
from rpc.runtime.clock import Alarm, VirtualClock
from tests.waiting import eventually

_SECONDS_TO_COME_TO_REST = 0.5
_THREADS_OF_AN_AGENT = 2  # its pulse, and what delivers to it


class SteadyClock(VirtualClock):
    """Knows which threads live by it, and whether they are all asleep.

    A test that moves time in steps, and only waits a moment after each, is faster than the
    agents on a busy machine: their time runs out while they had none to do anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads: dict[Alarm, threading.Thread] = {}
        self._asleep: dict[Alarm, float | None] = {}
        self.awakenings = 0

    def wait(self, alarm: Alarm, deadline: float | None) -> None:
        """Waits; a thread that wakes counts as awake from the moment that there is cause to."""
        with self._lock:
            self._threads[alarm] = threading.current_thread()
            self._asleep[alarm] = deadline
        while not self._wakes(alarm, deadline):
            time.sleep(0.001)

    def _wakes(self, alarm: Alarm, deadline: float | None) -> bool:
        with self._lock:
            due = deadline is not None and deadline <= self._now
            if due or alarm.unset.acquire(blocking=False):
                del self._asleep[alarm]
                self.awakenings += 1
                return True
            return False

    def is_at_rest(self, threads: int) -> bool:
        """True if as many threads at least live by this clock, and none is awake or about to be."""
        with self._lock:
            awake = any(t.is_alive() and a not in self._asleep for a, t in self._threads.items())
            waking = any(
                not alarm.unset.locked() or (deadline is not None and deadline <= self._now)
                for alarm, deadline in self._asleep.items()
            )
            return len(self._threads) >= threads and not awake and not waking

    def step(
        self, seconds: float, agents: Sequence[Agent], held: Callable[[], int] = lambda: 0
    ) -> None:
        """Lets the agents do what they have to do by now, moves time, and lets them again.

        Args:
            seconds: virtual, to move by.
            agents: over the memory transport, all on this clock.
            held: how many handlers the test keeps from ending.
        """
        self.settle(agents, held)
        self.advance(seconds)
        self.settle(agents, held)

    def settle(self, agents: Sequence[Agent], held: Callable[[], int] = lambda: 0) -> None:
        """Waits until nothing happens any more at the present time, but not for ever."""
        eventually(lambda: self._is_settled(agents, held), _SECONDS_TO_COME_TO_REST, 0.0005)

    def _is_settled(self, agents: Sequence[Agent], held: Callable[[], int]) -> bool:
        before = self.awakenings
        threads = _THREADS_OF_AN_AGENT * len(agents)
        if not self.is_at_rest(threads):
            return False
        busy = sum(a.executor.busy() + a.system_executor.busy() for a in agents)
        return busy <= held() and self.is_at_rest(threads) and self.awakenings == before
