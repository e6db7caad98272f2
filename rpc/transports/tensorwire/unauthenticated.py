"""Who has to go when too many wait who have not proven who they are. Sans-IO.

A flood of strangers must keep no member of the group out, and a crowd of members that
all come at once must not push each other out for ever. So somebody goes from where most
came from. Of those it is the oldest, which had most time; but where each is given some
time that is over for none, it is the newcomer, if it is one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)


class WaitingRoom(Generic[Guest]):
    """Guests in the order in which they came.

    Args:
        most: how many there may be.
        seconds: for how long none has to go in favour of another from the same place.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._guests: dict[Guest, tuple[Hashable, float]] = {}

    def enter(self, guest: Guest, origin: Hashable, now: float) -> Guest | None:
        """Takes a guest in.

        Args:
            guest: a new one.
            origin: where it came from.
            now: in seconds.

        Returns:
            Who has to go, and is in here no more; None if there is room for all.
        """
        self._guests[guest] = (origin, now)
        if len(self._guests) <= self._most:
            return None
        crowds = Counter(place for place, _ in self._guests.values())
        most = max(crowds.values())
        goes = next(each for each, (place, _) in self._guests.items() if crowds[place] == most)
        is_new = self._guests[goes][1] + self._seconds > now
        if is_new and crowds[origin] == most:
            goes = guest
        self.leave(goes)
        return goes

    def leave(self, guest: Guest) -> None:
        """A guest goes, if it is here."""
        self._guests.pop(guest, None)
