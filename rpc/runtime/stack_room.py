"""Checks that the running thread's stack has room for what must not stop half-way.

A call that runs out of stack while it is sent would leave a request that is counted but never
left, or a connection whose numbers have a gap; undoing that takes stack, too. So it is refused
before anything of it is done. Owns how that is found out, which every call pays for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

_FRAMES: Final = 32
"""Frames that sending a request and waiting for its reply take, and half as many more."""


def _nested(levels: int) -> Any:
    nest: Any = ()
    for _ in range(levels):
        nest = (nest,)
    return nest


def _look() -> None:
    """Walks the frames, which a thread has few of; what C code calls is counted apart."""
    frames = sys.getrecursionlimit() - _FRAMES
    if sys._getframemodulename(frames) is not None:  # type: ignore[attr-defined]
        raise RecursionError("maximum recursion depth exceeded: no room is left for a call")


_try: Final[Callable[[], object]] = partial(isinstance, None, _nested(_FRAMES))
"""Checks by going as deep; up to Python 3.11, C code counts as Python does."""

require: Final[Callable[[], object]] = _look if sys.version_info >= (3, 12) else _try
"""Raises ``RecursionError`` if too little is left for a call."""
