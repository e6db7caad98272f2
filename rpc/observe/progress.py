"""Counts the progress of one worker, and keeps what packages above tell of it.

Owns the count of steps, the phases in which steps may take long, and the sources of facts that a
reporter asks. A step is what the program counts: an optimizer's step, a push that a server took.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rpc.runtime.clock import Clock

Facts = Callable[[], Mapping[str, object]]
"""Tells facts as plain data: numbers, texts, lists and mappings of them."""

_LONGEST_NAME: Final = 100


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """The progress of a worker at one moment.

    Args:
        steps: counted so far.
        age: seconds since the last one; since the worker began, if there was none.
        phase: the name of the slow phase that it is in; empty for none.
        phase_age: seconds since that began.
        longest: seconds of the longest pause between two steps so far; slow phases do not count.
    """

    steps: int
    age: float
    phase: str
    phase_age: float
    longest: float


class Progress:
    """The steps and slow phases of one worker.

    Args:
        clock: the worker's time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = 0
        self._last = clock.now()
        self._longest = 0.0
        self._phases: list[tuple[str, float]] = []
        self._sources: dict[str, Facts] = {}

    def count(self, steps: int = 1) -> None:
        """Counts steps that were made; none leave everything as it is."""
        if not steps:
            return
        now = self._clock.now()
        with self._lock:
            self._end_pause(now)
            self._steps += steps
            self._last = now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Lets steps take long until the block ends, and reports the innermost block's name."""
        entry = name[:_LONGEST_NAME], self._clock.now()
        with self._lock:
            self._end_pause(entry[1])
            self._phases.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._phases.remove(entry)
                self._last = self._clock.now()

    def _end_pause(self, now: float) -> None:
        """Takes in a pause outside of slow phases; what comes before the first step is none."""
        if self._steps and not self._phases:
            self._longest = max(self._longest, now - self._last)

    def add_source(self, name: str, facts: Facts) -> Callable[[], None]:
        """Has reporters ask ``facts``; returns what ends that."""
        with self._lock:
            self._sources[name] = facts

        def end() -> None:
            with self._lock:
                if self._sources.get(name) is facts:
                    del self._sources[name]

        return end

    def report(self) -> ProgressReport:
        """The progress now."""
        now = self._clock.now()
        with self._lock:
            phase, since = self._phases[-1] if self._phases else ("", now)
            age = now - self._last
            return ProgressReport(self._steps, age, phase, now - since, self._longest)

    def facts(self) -> dict[str, dict[str, object]]:
        """The answer of each source; of one that fails, why."""
        with self._lock:
            sources = dict(self._sources)
        told: dict[str, dict[str, object]] = {}
        for name, source in sources.items():
            try:
                told[name] = dict(source())
            except Exception as error:  # the others are to be heard all the same
                told[name] = {"error": f"{type(error).__name__}: {error}"}
        return told
