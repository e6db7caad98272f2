"""What an agent sees and changes of the workers' own group, of which it is no member.

An agent strikes off a worker that died, so that nobody calls it any more and its successor
may take its name at once; and it looks which of its workers the group itself declared lost.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

from torch._C._distributed_c10d import Store

from rpc.errors import RpcError
from rpc.extend import Member, MemberList


class GroupMembers:
    """The members of the workers' group. Where its store does not answer, there are none.

    Args:
        store: the group's.
        group_key: its key, empty for none.
        author: says in the errors of others who struck a worker off.
    """

    def __init__(self, store: Store, group_key: bytes, author: str) -> None:
        self._list = MemberList(store, group_key, author)
        self._host = socket.gethostname()
        self._joined: dict[str, Member] = {}
        """This agent's workers that were seen as members, by name."""

    def find(self, names: Iterable[str]) -> list[Member]:
        """Those of the workers that are members now."""
        found: list[Member] = []
        with contextlib.suppress(RpcError):
            found += [each for name in names if (each := self._list.find(name)) is not None]
        return found

    def strike_off(self, member: Member, reason: str) -> None:
        """Ends the membership of that life of a worker, and of no later one."""
        with contextlib.suppress(RpcError):
            self._list.strike_off(member, reason)

    def ended(self, name: str, process: int, reason: str) -> None:
        """Strikes off a process of this host that ended, if it is listed under the name."""
        self._joined.pop(name, None)
        for member in self.find([name]):
            if (member.host, member.pid) == (self._host, process):
                self.strike_off(member, reason)

    def begins(self, name: str) -> None:
        """Strikes off whoever is listed under a name that another process takes now."""
        self._joined.pop(name, None)
        for member in self.find([name]):
            self.strike_off(member, "its agent is gone, and another one took its seat over")

    def lost(self, processes: Iterable[tuple[str, int]]) -> Iterator[str]:
        """The names of those that joined, live on, and were declared lost.

        Args:
            processes: this agent's workers, by name, and their process ids.
        """
        for name, process in processes:
            joined = self._joined.get(name)
            listed = next(iter(self.find([name])), None)
            if listed is not None and (listed.host, listed.pid) == (self._host, process):
                self._joined[name] = listed
            elif joined is not None and self._was_lost(joined):
                yield name

    def _was_lost(self, member: Member) -> bool:
        with contextlib.suppress(RpcError):
            return self._list.was_lost(member)
        return False
