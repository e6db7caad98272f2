"""Stops, in a forked child, what must not go on there as in its parent.

Owns the hooks that Python calls around a fork, and the table of what they tell:
mappings that both processes would write to, and workers whose connections both
would use. The hooks are there from the first member on, for good, as Python
cannot take them back; while there are no members they do nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from typing import Final

_logger = logging.getLogger("rpc")


class ForkAware:
    """Something that hears of forks, on the thread that forks."""

    def before_fork(self) -> None:
        """Prepares for a fork by this thread; others may fork too, and go on running."""

    def after_fork_in_parent(self) -> None:
        """Goes on in the parent: this thread has forked, or has failed to."""

    def after_fork_in_child(self) -> None:
        """Goes on in the child: of its parent's threads only this one is there.

        Another one may have held any lock.
        """


class _Forks:
    """The members, and the threads that are between the hooks."""

    def __init__(self) -> None:
        self._members: dict[int, ForkAware] = {}  # changed in single steps, so without a lock
        self.forking: dict[int, list[ForkAware]] = {}
        self._hooked = False

    def join(self, member: ForkAware) -> None:
        if not self._hooked:
            self._hooked = True
            os.register_at_fork(
                before=self._before,
                after_in_parent=self._after_in_parent,
                after_in_child=self._after_in_child,
            )
        self._members[id(member)] = member

    def leave(self, member: ForkAware) -> None:
        self._members.pop(id(member), None)

    def _before(self) -> None:
        told = self.forking[threading.get_ident()] = []
        for member in list(self._members.values()):
            told.append(member)
            _tell(member.before_fork)

    def _after_in_parent(self) -> None:
        for member in self.forking.pop(threading.get_ident(), []):
            _tell(member.after_fork_in_parent)

    def _after_in_child(self) -> None:
        for member in list(self._members.values()):
            _tell(member.after_fork_in_child)
        self.forking.clear()


def _tell(hook: Callable[[], None]) -> None:
    try:
        hook()
    except Exception:
        _logger.exception("what was to be done as this process forked failed")


_forks = _Forks()
FORKING: Final = _forks.forking
"""The threads that are about to fork; in the child, not empty until members have heard.

Not a function, as it is asked for every tensor that arrives."""


def join(member: ForkAware) -> None:
    """Has ``member`` hear of forks from now on, until it leaves."""
    _forks.join(member)


def leave(member: ForkAware) -> None:
    """Stops telling ``member`` of forks."""
    _forks.leave(member)


def keep_for_good(inherited: object) -> None:
    """Never frees what may not be freed in a child, such as a server that joins its threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
