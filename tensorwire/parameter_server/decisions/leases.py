"""Decides for how long a head may answer pulls without a word from its backups.

A head that sleeps, or is cut off, may be replaced and not know it. If a backup knows a later chain,
it refuses the head's records. So a record that all backups have acknowledged proves that the head
had not been replaced when it *sent* that record; when the acknowledgement is read says nothing, as
the head may have slept before it. The proof holds for ``LEASE`` seconds. After half of them, the
next pull sends a record for this purpose; after all of them, pulls wait until one is acknowledged.
The clock of a machine that was paused may have stood still. So this does not replace the refusals
of those who know a later view; it makes them rare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

LEASE: Final = 1.0
"""Seconds for which a head answers pulls after it sent what its backups have acknowledged."""


@dataclass(frozen=True, slots=True)
class Renewal:
    """A record that changes nothing; its acknowledgement proves that the head is still one."""


class Lease:
    """The lease of one head.

    Attributes:
        renew_at: the time from which the next pull should renew it.
        pending: the position behind the record that was sent for it and is not acknowledged, and
            when it was sent; None if there is none.
    """

    def __init__(self) -> None:
        self.renew_at = -math.inf
        self._proven_at = -math.inf
        self.pending: tuple[int, float] | None = None

    def is_valid(self, now: float) -> bool:
        """True if the head may answer a pull."""
        return now - self._proven_at <= LEASE

    def is_to_ask(self, now: float) -> bool:
        """True if another record must be sent: none is under way, or it was sent long ago."""
        return self.pending is None or now - self.pending[1] > LEASE

    def asked(self, end: int, now: float) -> None:
        """Notes that a record was sent; ``end`` is the position behind it."""
        self.pending = end, now

    @property
    def end(self) -> int:
        """The position behind the record that was sent last; 0 if it is acknowledged."""
        return 0 if self.pending is None else self.pending[0]

    def durable(self, position: int) -> None:
        """Notes that all backups have everything before a position."""
        if self.pending is not None and position >= self.pending[0]:
            self._proven_at = max(self._proven_at, self.pending[1])
            self.renew_at = self._proven_at + LEASE / 2
            self.pending = None
