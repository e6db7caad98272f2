"""Tells when keys of a group's store are worth reading again.

Most stores cannot tell, so whoever needs news reads again and again. A store that tells of changes
(``etcd_watch``) has its keys read when they change, and seldom otherwise: a reader must not wait
for ever because a watch was lost in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SECONDS_BETWEEN_READS: Final = 5.0
"""Keys that are watched are read as often as this although nothing was told."""


class StoreWatch:
    """A watch over some keys of a store; this one is of a store that cannot tell of changes."""

    @property
    def stands(self) -> bool:
        """True while each change is told; otherwise the keys are to be read again and again."""
        return False

    def may_have_changed(self) -> bool:
        """True if the keys may have changed since this last said so."""
        return True

    def close(self) -> None:
        """Ends the watch."""


class ToldWatch(StoreWatch):
    """A watch that is told of changes.

    Args:
        told: called after each change, on the thread that learns of it.
    """

    def __init__(self, told: Callable[[], None]) -> None:
        self._told = told
        self._has_news = True
        self._due = 0.0
        self._stands = False

    @property
    def stands(self) -> bool:
        """See :class:`StoreWatch`."""
        return self._stands

    def may_have_changed(self) -> bool:
        """See :class:`StoreWatch`."""
        now = time.monotonic()
        if self._stands and not self._has_news and now < self._due:
            return False
        self._has_news = False  # before the caller reads, so that nothing later is missed
        self._due = now + SECONDS_BETWEEN_READS
        return True

    def tell(self) -> None:
        """Says that the keys may have changed."""
        self._has_news = True
        self._told()
