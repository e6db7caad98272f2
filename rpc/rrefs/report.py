"""Describes a worker's references in words: who uses its values, and whose values it uses."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from rpc.ids import GlobalId
from rpc.outcomes.slot import Slot
from rpc.protocol.references import ReferenceTable


class ReferenceReport:
    """A view of one agent's references.

    Args:
        lock: guards the others.
        table: of the references.
        values: that are here.
    """

    def __init__(
        self, lock: threading.Lock, table: ReferenceTable, values: Mapping[GlobalId, Slot]
    ) -> None:
        self._lock = lock
        self._table = table
        self._values = values

    def shared_values(self) -> int:
        """Values of this worker that other workers hold, or have asked this one to make."""
        with self._lock:
            return len(self._table.leaks())

    def leaks(self) -> list[str]:
        """The values that other workers still use."""
        with self._lock:
            leaks = self._table.leaks()
        return [f"{leak.rref}, used by {', '.join(map(str, leak.users))}" for leak in leaks]

    def inventory(self) -> tuple[list[str], list[str]]:
        """This worker's shared values with their holders, and its handles to others' values."""
        with self._lock:
            lent, values = self._table.leaks(), dict(self._values)
            users = self._table.users()
        owned = [
            f"{leak.rref}: {_contents(values.get(leak.rref))}, "
            f"held by {', '.join(map(str, leak.users))}"
            for leak in lent
        ]
        return owned, [f"{h.reference.rref} on {h.reference.owner}: {how}" for h, how in users]


def _contents(slot: Slot | None) -> str:
    """Says in a word what a place for a value holds."""
    if slot is None or not slot.done():
        return "not there yet"
    try:
        return type(slot.value()).__qualname__
    except BaseException as error:
        return f"failed with {type(error).__qualname__}"
