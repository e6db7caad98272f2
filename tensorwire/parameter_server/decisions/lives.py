"""Decides, at a server, which lives of others it takes to be over, and which calls wait for one.

A view may name a life of which this server has not heard yet: who made the view asked that life
itself, and news of it is on its way. To take it for lost would give up state that is there. So it
is *trusted*: until it is heard of, until a later life of its name or its own end is, or until
``TRUST`` seconds have passed. A call to it may meet the life before it, and fail with that one;
then the call is kept, and made again once the right life is heard of.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tensorwire.parameter_server.decisions.views import Client, Server

Call = TypeVar("Call")
TRUST: Final = 10.0
"""Seconds for which a life is trusted of which nothing is heard."""


class Verdict(enum.Enum):
    """The states of a life, as far as this server has heard."""

    LIVING = enum.auto()
    OVER = enum.auto()
    UNHEARD = enum.auto()
    """Unheard of: nothing was heard of it, nor of a later life of its name."""


class Fate(enum.Enum):
    """The ways on for a call that failed as its callee was lost."""

    AGAIN = enum.auto()
    KEPT = enum.auto()
    """It is made again, or given up, when news of its callee comes."""
    GIVEN_UP = enum.auto()


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest life of a name that was heard of.

    Args:
        incarnation: which.
        lives: nothing was heard of its end.
        proven: its end is certain, not only silence or another's word.
    """

    incarnation: int
    lives: bool
    proven: bool = False


CUT_OFF: Final = Latest(sys.maxsize, False)
"""The loss that a worker hears of everybody once the others took it for lost; it says nothing about
them.
"""


@dataclass(frozen=True, slots=True)
class News(Generic[Call]):
    """The consequences of hearing of a life.

    Args:
        over: trusted lives that are over, as this one came after them.
        again: calls to be made again.
    """

    over: tuple[Server, ...] = ()
    again: tuple[Call, ...] = ()


def verdict(server: Server, latest: Latest | None) -> Verdict:
    """The verdict on a life, given the latest life of its name."""
    if latest is None or latest.incarnation < server.incarnation:
        return Verdict.UNHEARD
    if latest.incarnation > server.incarnation or not latest.lives:
        return Verdict.OVER
    return Verdict.LIVING


class Lives(Generic[Call]):
    """The lives of servers and trainers as one server sees them.

    Args:
        latest: tells the latest life of a name that this server has heard of.
    """

    def __init__(self, latest: Callable[[str], Latest | None]) -> None:
        self._latest = latest
        self._over: set[Server] = set()
        self._trusted: set[Server] = set()
        self._kept: dict[Server, list[Call]] = {}

    def verdict(self, server: Server) -> Verdict:
        """The verdict on a life."""
        if server in self._over:
            return Verdict.OVER
        return verdict(server, self._latest(server.name))

    def is_proven_over(self, server: Server) -> bool:
        """True if the end of a life is certain: its process ended, or a later one has its name."""
        latest = self._latest(server.name)
        if latest is None or latest.incarnation < server.incarnation or latest == CUT_OFF:
            return False
        return latest.incarnation > server.incarnation or (latest.proven and not latest.lives)

    def is_cut_off(self, others: Iterable[Server | Client]) -> bool:
        """True if this server was taken for lost by the others, and knows it."""
        return any(self._latest(each.name) == CUT_OFF for each in others)

    def trust(self, server: Server) -> bool:
        """Trusts a life that is unheard; True if that is new, so that :meth:`doubt` must follow."""
        is_new = server not in self._trusted and self.verdict(server) is Verdict.UNHEARD
        if is_new:
            self._trusted.add(server)
        return is_new

    def doubt(self, server: Server) -> bool:
        """True if the life is taken for lost now, ``TRUST`` seconds after it was first trusted."""
        return server in self._trusted and self.verdict(server) is Verdict.UNHEARD

    def failed(self, to: Server, call: Call, was_heard_of: bool) -> Fate:
        """Says how to go on after a call that failed as its callee was lost.

        Args:
            to: the life that was meant.
            call: what to keep.
            was_heard_of: that life had been heard of when the call was made, so that it met
                no former one.
        """
        state = self.verdict(to)
        if was_heard_of or state is Verdict.OVER:
            return Fate.GIVEN_UP
        if state is Verdict.LIVING:
            return Fate.AGAIN
        self._kept.setdefault(to, []).append(call)
        return Fate.KEPT

    def came(self, server: Server) -> News[Call]:
        """Takes note of a life that was heard of."""
        former = {*self._trusted, *self._kept}
        over = [each for each in former if is_before(each, server)]
        self._trusted.discard(server)
        return News(tuple(sorted(over)), tuple(self._kept.pop(server, ())))

    def lost(self, server: Server) -> list[Call]:
        """Ends a life; returns the calls that are given up."""
        self._over.add(server)
        self._trusted.discard(server)
        return self._kept.pop(server, [])


def is_before(server: Server, other: Server) -> bool:
    """True if ``other`` is a later life of the same worker."""
    return server.name == other.name and server.incarnation < other.incarnation
