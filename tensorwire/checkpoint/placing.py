"""Puts a finished folder in its place, which is empty or whose folder it replaces."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from pathlib import Path
from typing import Final

DRAFT: Final = ".tmp-"
"""Stands in the names of folders that are no checkpoints, or not yet."""

_AT_FDCWD: Final = -100
_EXCHANGE: Final = 2  # RENAME_EXCHANGE of Linux's renameat2
_UNSUPPORTED: Final = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM}


def remove(path: Path) -> None:
    """Takes a checkpoint out of sight at once, then removes it file by file."""
    unseen = path.with_name(f"{path.name}{DRAFT}{uuid.uuid4().hex[:12]}")
    path.rename(unseen)
    shutil.rmtree(unseen, ignore_errors=True)


def replace(new: Path, old: Path) -> None:
    """Puts one folder in the place of another, which is removed.

    Where the file system can exchange names, ``old`` is there all the time: first as it was, then
    as it is from now on. Otherwise there is a moment in which nothing is there.
    """
    if not exchange(new, old):
        remove(old)
        new.rename(old)
        return
    sync(old.parent)
    shutil.rmtree(new, ignore_errors=True)


def sync(folder: Path) -> None:
    """Forces the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two names at once; False where that is not supported."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if library.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(other))
