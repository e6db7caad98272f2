"""Lets torch find its own modules by name while its agent starts.

torch's C++ looks up ``torch.distributed.rpc.internal`` and functions in it when it carries its
first call, and keeps them. In a program where that name stands for another module, whoever made
it so says here how to restore it for a while. torch has these names once per process, so this
is kept once per process, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

Restore = Callable[[], AbstractContextManager[None]]
_restores: list[Restore] = []


def restore_with(restore: Restore) -> Callable[[], None]:
    """Enters ``restore()`` whenever torch's agent starts; returns a function that ends this."""
    _restores.append(restore)
    return lambda: _restores.remove(restore)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Lets torch's names stand for torch's modules for a while."""
    with contextlib.ExitStack() as stack:
        for restore in _restores:
            stack.enter_context(restore())
        yield
