"""Letters that have arrived for one worker of a pipeline, until its stages take them.

Letters may come in any order, also before the step that they belong to has begun here. Steps
run one after the other; one that is called off wakes up whoever waits in it, and what still
comes for it is dropped.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from tensorwire.pipeline.errors import StepAbortedError
from tensorwire.pipeline.letters import Address


@dataclass(frozen=True, slots=True)
class _Ended:
    """Every step up to this number is over, and why."""

    step: int
    reason: str


class Inbox:
    """The letters of one worker; every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._letters: dict[Address, Any] = {}
        self._arrived: set[Address] = set()
        self._ended = _Ended(-1, "")
        self._turn = 0
        self._is_running = False

    def put(self, address: Address, value: Any) -> None:
        """Takes in a letter, unless its step is over."""
        with self._changed:
            if address.step > self._ended.step:
                self._letters[address] = value
                self._arrived.add(address)
                self._changed.notify_all()

    def take(self, address: Address) -> Any:
        """Waits for a letter and hands it out.

        Raises:
            StepAbortedError: its step was called off.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: address in self._letters or address.step <= self._ended.step
            )
            self.require_running(address.step)
            return self._letters.pop(address)

    def begin(self, step: int) -> None:
        """Waits until all earlier steps are over here; from then on this one runs.

        Raises:
            StepAbortedError: the step was called off.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: step <= self._ended.step or (step <= self._turn and not self._is_running)
            )
            self.require_running(step)
            self._is_running = True

    def fail(self, step: int, reason: str) -> None:
        """Says that the step that runs has failed."""
        self.abort(step, reason)
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def end(self, step: int) -> None:
        """Says that a step is done, and forgets what came for it."""
        with self._changed:
            self._is_running = False
            self._turn = max(self._turn, step + 1)
            self._letters = {at: each for at, each in self._letters.items() if at.step > step}
            self._arrived = {each for each in self._arrived if each.step > step}
            self._changed.notify_all()

    def abort(self, step: int, reason: str) -> None:
        """Calls off a step and all before."""
        with self._changed:
            if step > self._ended.step:
                self._ended = _Ended(step, reason)
            self._turn = max(self._turn, step + 1)
            self._letters = {at: each for at, each in self._letters.items() if at.step > step}
            self._changed.notify_all()

    def wait_until_idle(self, seconds: float) -> bool:
        """Waits until no step runs here, at most so long; returns True if none does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running, seconds)

    def arrived(self, step: int) -> frozenset[Address]:
        """The letters that have come for a step that did not end well."""
        with self._changed:
            return frozenset(each for each in self._arrived if each.step == step)

    def require_running(self, step: int) -> None:
        """Checks that a step was not called off.

        Raises:
            StepAbortedError: it was.
        """
        if step <= self._ended.step:
            raise StepAbortedError(f"step {step} was called off: {self._ended.reason}")
