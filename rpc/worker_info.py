"""Who a worker is: the pair of name and id that addresses it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME_PATTERN = re.compile(r"[A-Za-z0-9\-_:]+")
_MAX_NAME_LENGTH = 127


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """Identifies one worker of the group.

    Args:
        name: unique in the group; letters, digits, ``-``, ``_`` and ``:``, at most 127 long.
        id: the worker's rank, at least 0.

    Raises:
        RuntimeError: if the name is not acceptable.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        if not (_NAME_PATTERN.fullmatch(self.name) and len(self.name) <= _MAX_NAME_LENGTH):
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter "
                f"than 128 characters, but got {self.name!r}"
            )

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
