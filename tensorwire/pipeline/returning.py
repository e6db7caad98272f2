"""Waits until workers that were lost have come back under their names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import rpc
from rpc import extend


def is_there(name: str) -> bool:
    """Says whether a worker of this name is living."""
    try:
        extend.life_of(name)
    except (rpc.WorkerLostError, rpc.UnknownWorkerError):
        return False
    return True


def wait_for_change(is_so: Callable[[], bool], timeout: float) -> bool:
    """Waits until something is so that changes only with who is living; False if it is not.

    Args:
        is_so: asked at first, and whenever somebody came or went.
        timeout: in seconds.
    """
    changed = threading.Condition()

    def wake(event: extend.MembershipEvent) -> None:
        with changed:
            changed.notify_all()

    end = extend.on_membership(wake)
    try:
        with changed:
            return changed.wait_for(is_so, timeout)
    finally:
        end()


def wait_for_workers(names: Iterable[str], timeout: float) -> None:
    """Returns when workers of all these names are in the group.

    Args:
        names: of the workers.
        timeout: in seconds.

    Raises:
        TimeoutError: one is not there in time.
    """
    wanted = list(names)
    if not wait_for_change(lambda: all(map(is_there, wanted)), timeout):
        missing = [name for name in wanted if not is_there(name)]
        raise TimeoutError(f"not back after {timeout} seconds: {missing}")
