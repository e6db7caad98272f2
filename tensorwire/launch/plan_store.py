"""Keeps the plan under one key of the job's store, where whole plans replace each other.

Keys: ``plan`` is the plan as JSON, ``changes`` another value after each change of it. Both are
signed and have versions, as all values there: what a stranger writes is no news.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from rpc.errors import RpcError
from rpc.extend import KeyValueStore
from tensorwire.launch.plan import Plan
from tensorwire.launch.seats import Event, apply

_SECONDS_BETWEEN_READS = 1.0


class PlanStoreError(RpcError):
    """The agents of a job cannot read each other's plans."""


class PlanStore:
    """The plan of one job, as all of its agents see it.

    Args:
        values: of the job.
        min_nodes: what a plan begins with, if there is none yet.

    Raises:
        RpcError: the store was lost, here and in every method.
        PlanStoreError: other agents write plans of another version.
    """

    def __init__(self, values: KeyValueStore, min_nodes: int) -> None:
        self._values = values
        self._changes: bytes | None = None
        self._read_at = 0.0
        self._plan = Plan(min_nodes)
        self._data = self._plan.encode().encode()
        self._take(values.compare_and_set("plan", None, self._data))
        self._watch = values.watch("plan", "changes")

    def read(self) -> Plan:
        """The plan as it is."""
        if not self._watch.may_have_changed():
            return self._plan
        changes = self._values.get("changes")
        # Whoever replaced it last may have died before it could say so.
        if changes != self._changes or time.monotonic() - self._read_at > _SECONDS_BETWEEN_READS:
            self._take(self._values.get("plan"))
            self._changes, self._read_at = changes, time.monotonic()
        return self._plan

    def put(self, events: Sequence[Event]) -> Plan:
        """Puts events into the plan, whatever others put into it meanwhile.

        Raises:
            RoleError: this agent was given other things to run than the others.
        """
        while events:
            after = apply(self._plan, events)
            if after == self._plan:
                break
            data = after.encode().encode()
            stored = self._values.compare_and_set("plan", self._data, data)
            self._take(stored)
            if stored == data:
                self._changes = os.urandom(8)
                self._values.set("changes", self._changes)
                break
        return self._plan

    def close(self) -> None:
        """Hears of no more changes."""
        self._watch.close()

    def _take(self, data: bytes | None) -> None:
        if data is None or data == self._data:
            return
        try:
            self._plan = Plan.decode(data)
        except ValueError as error:
            raise PlanStoreError(
                "the job's plan cannot be read: its agents have different versions of TensorWire "
                f"({error})"
            ) from error
        self._data = data
