"""The three kinds of consistency between trainers, as a user names them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Reduce(enum.Enum):
    """The ways in which the gradients that trainers push for one step become one gradient."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous: a step is applied, as one update, when all trainers have pushed it.

    Results do not depend on timing: they are the same bits in every run.

    Args:
        reduce: ``MEAN``, as in ``DistributedDataParallel``, or ``SUM``.

    Raises:
        TypeError: ``reduce`` is no :class:`Reduce`.
    """

    reduce: Reduce = Reduce.MEAN

    def __post_init__(self) -> None:
        if not isinstance(self.reduce, Reduce):
            raise TypeError(f"BSP: reduce={self.reduce!r} is not Reduce.MEAN or Reduce.SUM")


@dataclass(frozen=True, slots=True)
class SSP:
    """Stale synchronous: pushes are applied as they come; fast trainers wait for slow ones.

    Args:
        staleness: steps that a trainer may be ahead of the slowest one, 0 or more.

    Raises:
        TypeError: ``staleness`` is no whole number.
        ValueError: it is negative.
    """

    staleness: int

    def __post_init__(self) -> None:
        if isinstance(self.staleness, bool) or not isinstance(self.staleness, int):
            raise TypeError(f"SSP: staleness={self.staleness!r} is not a whole number of steps")
        if self.staleness < 0:
            raise ValueError(f"SSP: staleness={self.staleness} must be 0 or more steps")


@dataclass(frozen=True, slots=True)
class Async:
    """Asynchronous: pushes are applied as they come, pulls answered at once."""


Consistency = BSP | SSP | Async

UNBOUNDED: Final = -1
"""The staleness of :class:`Async`."""


def staleness_of(consistency: Consistency) -> int:
    """Steps that a pull may be ahead of the slowest trainer; ``UNBOUNDED`` if any number."""
    if isinstance(consistency, SSP):
        return consistency.staleness
    return 0 if isinstance(consistency, BSP) else UNBOUNDED
