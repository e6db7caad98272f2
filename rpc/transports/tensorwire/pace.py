"""Decides whether requests should be delivered on several threads at once.

While deliveries are quick one thread makes them all: handing them out would cost more than
they take. That holds for longer ones, too, as long as they compute. An operator of torch
gives the interpreter lock up and wants it back tens of microseconds later, and who waited
for it meanwhile has been woken, mostly in vain. Two trainers whose handlers took about a
millisecond each and ran side by side made their server switch threads 18 times per step of
the main job; one after the other 2 times, for a sixth less of its processor time and a tenth
more steps. What computes for longer runs in operators that are worth a core, and what waits
leaves its core to others: those run side by side.
"""

from __future__ import annotations

from typing import Final

QUICK_SECONDS: Final = 0.0005
"""Shorter work is not measured: reading a thread's processor time takes half a microsecond."""
_LONG_SECONDS: Final = 0.002
_WAITED_SHARE: Final = 0.75


class Pace:
    """Learns from each delivery how the next is to be made."""

    def __init__(self) -> None:
        self.apart = False
        """Deliver each request on a thread of its own."""
        self.looking = False
        """Deliveries take long enough to ask how much of it they compute."""

    def took(self, seconds: float, computed: float | None) -> None:
        """A delivery ended.

        Args:
            seconds: how long it took.
            computed: how long its thread had a processor; None if nobody looked.
        """
        self.looking = seconds >= QUICK_SECONDS
        if not self.looking:
            self.apart = False
        elif computed is not None:
            waited = seconds - computed
            self.apart = computed > _LONG_SECONDS or waited > seconds * _WAITED_SHARE
