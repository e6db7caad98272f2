"""The driver's own state, which is backed up with stage 0."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kept:
    """The driver's state at a cut.

    Args:
        steps: how many training steps were done.
        place: where in the data the loop was, and what else :meth:`Pipeline.batches` keeps.
    """

    steps: int
    place: bytes
