"""Names what takes a Trainer long between two steps, so that nobody takes it for a standstill."""

from __future__ import annotations

from contextlib import ExitStack

import rpc
from rpc import extend


class SlowPhases:
    """The slow phase that a Trainer is in: evaluating, or saving.

    A Trainer tells when such a thing is over, and before it only, in what it means to do next,
    that it will come. So a phase begins at the end of the step before.
    """

    def __init__(self) -> None:
        self._phase = ExitStack()
        self._name = ""

    def step_ended(self, evaluates: bool, saves: bool) -> None:
        """Begins the phase that follows a step or an epoch."""
        if evaluates or saves:
            self._enter("evaluation" if evaluates else "save")

    def predicts(self) -> None:
        """Begins an evaluation, as a batch was evaluated, maybe for the program itself."""
        self._enter("evaluation")

    def evaluated(self, saves: bool) -> None:
        """Ends an evaluation."""
        self.ended()
        if saves:
            self._enter("save")

    def ended(self) -> None:
        """Ends the phase: steps follow again, or nothing does."""
        self._name = ""
        self._phase.close()

    def _enter(self, name: str) -> None:
        if name == self._name or extend.find_worker() is None:
            return
        self.ended()
        self._phase.enter_context(rpc.slow_phase(name))
        self._name = name
