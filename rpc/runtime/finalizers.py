"""Knows whether the running code is a finalizer that the garbage collector has called.

The collector runs wherever Python allocates, so also where a lock of ours is held or a
table is half changed, and it runs finalizers and weak references' callbacks of anybody
there and then. One that came in to make a call would wait for a lock that its own thread
holds. So what a finalizer asks for is done later, on another thread, or refused.
"""

from __future__ import annotations

import gc
from _thread import get_ident

from rpc.errors import RpcError

collecting = 0
"""The thread that collects; there is only one at a time. 0, as nearly always: none."""


def watch() -> None:
    """Begins to know; does nothing more when called again."""
    if _note not in gc.callbacks:
        gc.callbacks.append(_note)


def _note(phase: str, _: dict[str, int]) -> None:
    global collecting
    collecting = get_ident() if phase == "start" else 0


def running() -> bool:
    """True on the thread that collects garbage."""
    if collecting == 0 or collecting != get_ident():
        return False
    gc.collect(0)  # does nothing then; or else a signal handler kept us from hearing of the end
    return collecting == get_ident()


def refuse(what: str) -> None:
    """Says that ``what`` cannot be done there.

    Raises:
        RpcError: the running code is a finalizer.
    """
    if collecting and running():
        raise RpcError(
            f"{what} was called by a finalizer that the garbage collector runs, which cannot wait; "
            "use rpc_async, which is done as soon as the collector has finished"
        )
