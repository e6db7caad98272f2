"""Why a backward pass failed, as it travels from where that happened to the pass's root."""

from __future__ import annotations

from dataclasses import dataclass

from autograd_dist.errors import BackwardError, WorkerLostInBackwardError
from rpc.errors import WorkerLostError
from rpc.safe_text import text_of


@dataclass(frozen=True, slots=True)
class LostWorker:
    """What a ``WorkerLostError`` says."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Where and why, for people; and the worker that was lost, if that is why."""

    text: str
    lost: LostWorker | None = None

    @classmethod
    def of(cls, worker_id: int, error: BaseException, what: str = "") -> Failure:
        """An error on a worker.

        Args:
            worker_id: where it happened.
            error: what was raised.
            what: could not be done, for people, with a colon and a space behind it.
        """
        lost = None
        if isinstance(error, WorkerLostError):
            lost = LostWorker(error.name, error.incarnation, error.reason)
        return cls(f"Error on Node {worker_id}: {what}{_described(error)}", lost)

    def as_error(self) -> BackwardError:
        """What the caller of the pass is told."""
        lost = self.lost
        if lost is None:
            return BackwardError(self.text)
        return WorkerLostInBackwardError(self.text, lost.name, lost.incarnation, lost.reason)


def _described(error: BaseException) -> str:
    text, kind = text_of(error), type(error).__name__
    if isinstance(error, Exception):
        return text or kind
    return f"{kind}: {text}" if text else kind
