"""Locks files for as long as the process lives that locked them, and no longer.

A lock of ``flock`` belongs to the open file, which forked children have, too: a worker of a
DataLoader that outlives its killed parent by some seconds would keep the parent's next life out.
Children therefore let go of it as they begin.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final


class FileLock:
    """A locked file, until it is closed; at the latest until this process ends.

    Args:
        path: of the file, which is made if it is not there.
        refusal: what the error says.

    Raises:
        BlockingIOError: somebody else holds it; says ``refusal``.
    """

    def __init__(self, path: Path, refusal: str) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        _held.add(self)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.let_go()
            raise BlockingIOError(refusal) from None

    def close(self) -> None:
        """Lets somebody else have it; may be called again."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # for a child, too, that has just begun
            self.let_go()

    def let_go(self) -> None:
        """Closes the file, which stays locked if another process has it open."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


_held: Final[set[FileLock]] = set()


def _let_go_of_all() -> None:
    for lock in list(_held):
        lock.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
