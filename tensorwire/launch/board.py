"""Keeps the plan under one key of the rendezvous' store, where whole plans replace each other.

Keys: ``plan`` is the plan as JSON, ``changes`` counts how often it was replaced.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from tensorwire.launch.plan import Plan
from tensorwire.launch.seats import Event, apply

_SECONDS_BETWEEN_READS = 1.0


class Board:
    """The plan of one job, as all of its agents see it.

    Args:
        store: the rendezvous', which only this job uses.
        min_nodes: what a plan begins with, if there is none yet.
    """

    def __init__(self, store: Store, min_nodes: int) -> None:
        self._store = store
        self._text: str = store.compare_set("plan", "", Plan(min_nodes).encode()).decode()
        self._changes = -1
        self._read_at = 0.0
        self._plan = Plan.decode(self._text)

    def read(self) -> Plan:
        """The plan as it is."""
        changes = self._store.add("changes", 0)
        # Whoever replaced it last may have died before it could count that.
        if changes != self._changes or time.monotonic() - self._read_at > _SECONDS_BETWEEN_READS:
            self._take(self._store.get("plan").decode())
            self._changes, self._read_at = changes, time.monotonic()
        return self._plan

    def put(self, events: Sequence[Event]) -> Plan:
        """Puts events into the plan, whatever others put into it meanwhile.

        Raises:
            RoleError: this agent describes a role otherwise than the others.
        """
        while events:
            after = apply(self._plan, events)
            if after == self._plan:
                break
            text = after.encode()
            found: str = self._store.compare_set("plan", self._text, text).decode()
            self._take(found)
            if found == text:
                self._changes = self._store.add("changes", 1)
                break
        return self._plan

    def _take(self, text: str) -> None:
        if text != self._text:
            self._text, self._plan = text, Plan.decode(text)
