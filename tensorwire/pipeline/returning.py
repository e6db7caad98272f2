"""Waits until workers that were lost have come back under their names."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import rpc
from rpc import extend


def wait_for_workers(names: Iterable[str], timeout: float) -> None:
    """Returns when workers of all these names are in the group.

    Args:
        names: of the workers.
        timeout: in seconds.

    Raises:
        TimeoutError: one is not there in time.
    """
    changed = threading.Condition()

    def wake(event: extend.MembershipEvent) -> None:
        with changed:
            changed.notify_all()

    end = extend.on_membership(wake)
    try:
        with changed:
            if not changed.wait_for(lambda: not _missing(names), timeout):
                raise TimeoutError(f"not back after {timeout} seconds: {_missing(names)}")
    finally:
        end()


def _missing(names: Iterable[str]) -> list[str]:
    missing = []
    for name in names:
        try:
            extend.life_of(name)
        except (rpc.WorkerLostError, rpc.UnknownWorkerError):
            missing.append(name)
    return missing
