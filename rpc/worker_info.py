"""The pair of name and id that addresses a worker."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass

from rpc.constants import MAX_RANK

_NAME_PATTERN = re.compile(r"[A-Za-z0-9\-_:]+")
_MAX_NAME_LENGTH = 127


@dataclass(frozen=True, slots=True, repr=False)
class WorkerInfo:
    """Identifies one worker of the group.

    Args:
        name: unique in the group; letters, digits, ``-``, ``_`` and ``:``, at most 127 long.
        id: the worker's rank, at least 0: any whole number, such as one of numpy's, kept as an int.

    Raises:
        TypeError: if the name is no text, or the id no whole number.
        RuntimeError: if the name is not acceptable.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        for what, value, fits in (
            ("name", self.name, isinstance(self.name, str)),
            ("id", self.id, hasattr(self.id, "__index__") and not isinstance(self.id, bool)),
        ):
            if not fits:
                raise TypeError(
                    "incompatible constructor arguments: WorkerInfo takes a name and a whole "
                    f"number, but got {what}={value!r}, which is a {type(value).__name__}"
                )
        if not _is_name(self.name):
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter "
                f"than 128 characters, but got {self.name!r}"
            )
        object.__setattr__(self, "id", operator.index(self.id))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


def may_exist(who: str | int) -> bool:
    """True if a worker can have this name or id."""
    if isinstance(who, str):
        return _is_name(who)
    return not isinstance(who, bool) and 0 <= who <= MAX_RANK


def _is_name(text: str) -> bool:
    return _NAME_PATTERN.fullmatch(text) is not None and len(text) <= _MAX_NAME_LENGTH
