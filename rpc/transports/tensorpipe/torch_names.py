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


def restore_torch_names(restore: Restore) -> Callable[[], None]:
    """Has the names of torch's RPC modules restored while torch's agent starts.

    For a program in which ``torch.distributed.rpc`` stands for another module: torch's C++
    looks functions up by that name when it carries its first call, over TENSORPIPE.

    Args:
        restore: makes a context manager, inside of which the names are torch's.

    Returns:
        A function that ends this.
    """
    _restores.append(restore)
    return lambda: _restores.remove(restore)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Lets torch's names stand for torch's modules for a while."""
    with contextlib.ExitStack() as stack:
        for restore in _restores:
            stack.enter_context(restore())
        yield
