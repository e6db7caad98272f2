"""What an agent sees and changes of the workers' own group, of which it is no member.

The one module of the launcher that knows how a group lists its members. An agent strikes off
a worker that died, so that nobody calls it any more and its successor may take its name; and
it looks which of its workers the group itself declared lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from torch._C._distributed_c10d import Store

from rpc.errors import RpcError
from rpc.group import member_list
from rpc.group.store import Record, our_part, text

_LOST = "!lost "


class GroupMembers:
    """The members of the workers' group.

    Args:
        store: the group's.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._struck_off: dict[str, int] = {}

    def find(self, name: str) -> Record | None:
        """What the group lists under a name; None if that is no member."""
        with contextlib.suppress(RpcError):
            return member_list.lookup(self._store, name)
        return None

    def strike_off(self, record: Record) -> None:
        """Ends the membership of that life of a worker, and of no later one."""
        self._struck_off[record.name] = max(
            record.incarnation, self._struck_off.get(record.name, 0)
        )
        with contextlib.suppress(RpcError):
            member_list.strike_off(self._store, record)

    def strike_off_process(self, name: str, process: int) -> None:
        """The same if it is this process that is listed under the name."""
        record = self.find(name)
        if record is not None and record.process.startswith(f"process {process} "):
            self.strike_off(record)

    def lost(self, names: Iterable[str]) -> set[str]:
        """Those of the workers that the group declared lost, of its own accord, and now."""
        ours = our_part(self._store)
        found = set()
        for name in names:
            key = f"member/{name}"
            value = text(ours.get(key)) if ours.check([key]) else ""
            if value.startswith(_LOST) and int(value[len(_LOST) :]) > self._begun_after(name):
                found.add(name)
        return found

    def begins(self, name: str) -> None:
        """A new life of a worker begins: what was said of earlier ones counts no more."""
        ours = our_part(self._store)
        life: int = ours.add(f"incarnation/{name}", 0)
        self._struck_off[name] = max(life, self._struck_off.get(name, 0))

    def _begun_after(self, name: str) -> int:
        return self._struck_off.get(name, 0)
