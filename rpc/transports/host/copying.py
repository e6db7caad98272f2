"""Copies large stretches of memory with several cores.

One core moves several gigabytes per second, and the memory of most machines several
times that. A share is one call of ``memmove``, during which Python runs elsewhere.
"""

from __future__ import annotations

from ctypes import memmove
from functools import partial

from rpc.transports.host.helpers import Helpers

_SHARE = 4 << 20
"""Bytes from which a share is worth the waking of a helper."""
_PAGE = 4096


class CopyThreads:
    """The threads with which one worker copies; they start with the first copy that is worth it.

    Args:
        name: what its threads are called.
        helpers: how many at most; by default one for each other core, up to three.
    """

    def __init__(self, name: str, helpers: int | None = None) -> None:
        self._helpers = Helpers(f"{name}-copy", helpers)

    def copy(self, target: int, source: int, length: int) -> None:
        """Copies ``length`` bytes between two addresses; the stretches do not overlap."""
        parts = min(self._helpers.count + 1, length // _SHARE)
        if parts < 2 or not self._helpers.are_there():
            memmove(target, source, length)
            return
        size = -(-length // parts // _PAGE) * _PAGE
        self._helpers.run(
            [
                partial(memmove, target + start, source + start, min(size, length - start))
                for start in range(0, length, size)
            ]
        )

    def close(self) -> None:
        """Ends the threads. Copies that are under way, or come later, are made without them."""
        self._helpers.close()
