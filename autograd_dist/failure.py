"""The failure of a backward pass, as it travels from where it happened to the pass's root."""

from __future__ import annotations

from dataclasses import dataclass

from autograd_dist.errors import BackwardError, WorkerLostInBackwardError
from rpc.errors import WorkerLostError
from rpc.extend import text_of

_LIVES = 1 << 64
_CHANGED = "modified by an inplace operation"
"""Words of torch's error about a tensor that was changed after a backward pass began to need it."""
_REMEDY = (
    "If that is a parameter, a step of an optimizer, maybe another trainer's, changed it between "
    'this forward and this backward pass; the guide docs/guides/autograd.md, "Optimizers", says '
    "how a module that several trainers share computes with copies of its parameters."
)


@dataclass(frozen=True, slots=True)
class LostWorker:
    """The contents of a ``WorkerLostError``."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Tells people where and why a pass failed, and names the worker that was lost, if one was."""

    text: str
    lost: LostWorker | None = None

    @classmethod
    def of(cls, worker_id: int, error: BaseException, what: str = "") -> Failure:
        """An error on a worker. Raises nothing, whatever the error's class does.

        Args:
            worker_id: where it happened.
            error: what was raised.
            what: could not be done, for people, with a colon and a space behind it.
        """
        text = f"Error on Node {worker_id}: {what}{_described(error)}"
        return cls(text, _lost_worker(error))

    def as_error(self) -> BackwardError:
        """The error that the caller of the pass is told."""
        lost = self.lost
        if lost is None:
            return BackwardError(self.text)
        return WorkerLostInBackwardError(self.text, lost.name, lost.incarnation, lost.reason)


def _lost_worker(error: BaseException) -> LostWorker | None:
    """The contents of a ``WorkerLostError``; None of one a program made and that cannot travel."""
    if not issubclass(type(error), WorkerLostError):  # its class may answer as it likes, or raise
        return None
    try:
        name, incarnation, reason = error.name, error.incarnation, error.reason  # type: ignore[attr-defined]
    except Exception:
        return None
    fits = type(name) is type(reason) is str and type(incarnation) is int
    return LostWorker(name, incarnation, reason) if fits and 0 <= incarnation < _LIVES else None


def _described(error: BaseException) -> str:
    text, kind = text_of(error), type(error).__name__
    if issubclass(type(error), Exception):
        return f"{text}\n{_REMEDY}" if _CHANGED in text else text or kind
    return f"{kind}: {text}" if text else kind
