"""Work that a worker does as soon as its gradients of a backward pass are complete: its sequel.

A pass may carry a *sequel*: the name of what is to be done, and a number of its own that tells
it from every other. A worker knows that its gradients are complete, whatever happens elsewhere,
when each message that it sent in the context got its gradients in this pass and the engine has
run. It then does what it keeps under the name, before it acknowledges. Not every worker gets to
know: where an output was not used, no gradient comes for it. So whoever started the pass is told
how many workers did the work, and asks the others for it after the pass.
"""

from __future__ import annotations

import secrets
import threading
from typing import Final, Protocol
from weakref import WeakValueDictionary

from autograd_dist.contexts import DistAutogradContext, entered

NAME_BYTES: Final = 12
_NUMBER_BYTES: Final = 12
SEQUEL_BYTES: Final = NAME_BYTES + _NUMBER_BYTES


class Step(Protocol):
    """A step that a worker keeps under a name."""

    def step(self, context_id: int) -> None:
        """Does the work with this worker's gradients in a context."""


def new_name() -> bytes:
    """A name for what several workers keep together."""
    return secrets.token_bytes(NAME_BYTES)


def new_sequel(name: bytes) -> bytes:
    """Makes the sequel of one pass, with which the work of that name is done once."""
    return name + secrets.token_bytes(_NUMBER_BYTES)


class Sequels:
    """The actions of one worker when its gradients are complete."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: WeakValueDictionary[bytes, Step] = WeakValueDictionary()

    def keep(self, name: bytes, step: Step) -> None:
        """Keeps ``step`` under a name for as long as something else keeps it alive."""
        with self._lock:
            self._steps[name] = step

    def run(self, sequel: bytes, context: DistAutogradContext) -> int:
        """Does the work unless it was begun before; returns how many workers did it here: 0 or 1.

        Raises:
            BaseException: what the work raised.
        """
        with self._lock:
            step = self._steps.get(sequel[:NAME_BYTES])
            if step is None or sequel in context.sequels:
                return 0
            context.sequels.append(sequel)
        with entered(context.context_id):
            step.step(context.context_id)
        with self._lock:
            context.sequels.append(sequel)
        return 1

    def has_run(self, sequel: bytes, context: DistAutogradContext) -> bool:
        """True if the work was done here, to its end."""
        with self._lock:
            return context.sequels.count(sequel) > 1
