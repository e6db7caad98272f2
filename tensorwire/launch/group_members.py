"""The workers' own group as an agent, which is no member of it, sees and changes it.

An agent strikes off a worker that died, so that nobody calls it any more and its successor
may take its name at once; and it looks which of its workers the group itself declared lost.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator

from torch._C._distributed_c10d import Store

from rpc.errors import RpcError
from rpc.extend import KeyValueStore, Member, MemberList


class FormerLifeError(Exception):
    """A process was about to start whose seat is another process's by now."""


def note_life(lives: KeyValueStore, name: str, life: int) -> None:
    """Says in the group's store that a life of a seat begins, and that earlier ones are over.

    Raises:
        FormerLifeError: a later one was begun.
    """
    key, mine = f"life/{name}", str(life).encode()
    noted = lives.compare_and_set(key, None, mine)
    while noted != mine:
        if int(noted or b"0") > life:
            raise FormerLifeError(f"{name} was started for the {int(noted or 0)}. time elsewhere")
        noted = lives.compare_and_set(key, noted, mine)


def life_noted(lives: KeyValueStore, name: str) -> int:
    """The latest life of a seat that began, as the group's store says; 0 if none did."""
    return int(lives.get(f"life/{name}") or b"0")


class GroupMembers:
    """The members of the workers' group. Where its store does not answer, there are none.

    Args:
        store: the group's.
        group_key: its key, empty for none.
        author: says in the errors of others who struck a worker off.
    """

    def __init__(self, store: Store, group_key: bytes, author: str) -> None:
        self._list = MemberList(store, group_key, author)
        self._lives = self._list.key_values("rpcrun")
        self._watch = self._list.watch_changes()
        self._host = socket.gethostname()
        self._joined: dict[str, Member] = {}
        """This agent's workers that were seen as members, by name."""

    def find(self, names: Iterable[str]) -> list[Member]:
        """Those of the workers that are members now."""
        members: list[Member] = []
        with contextlib.suppress(RpcError):
            members += [each for name in names if (each := self._list.find(name)) is not None]
        return members

    def up_to(self, name: str, life: int) -> list[Member]:
        """The member of a name, if it is of that life of its seat or of an earlier one.

        A life is noted before its process joins. So the member comes first: what is noted
        afterwards tells of its life or of a later one, however long this agent sleeps in between.
        """
        members = self.find([name])
        with contextlib.suppress(RpcError):
            return members if life_noted(self._lives, name) <= life else []
        return []

    def strike_off(self, member: Member, reason: str) -> None:
        """Ends the membership of that life of a worker, and of no later one."""
        with contextlib.suppress(RpcError):
            self._list.strike_off(member, reason)

    def ended(self, name: str, process: int, reason: str) -> bool:
        """Strikes off a process of this host that ended, if it is listed under its name.

        Returns:
            True if it was seen as a member.
        """
        was_member = self._joined.pop(name, None) is not None
        for member in self.find([name]):
            if (member.host, member.pid) == (self._host, process):
                self.strike_off(member, reason)
                was_member = True
        return was_member

    def begins(self, name: str, life: int) -> None:
        """Strikes off whoever is listed under the name of a seat of which a life begins.

        From now on ``init_rpc`` refuses processes of earlier lives, whose agents were taken for
        dead.

        Raises:
            FormerLifeError: a later life was begun: it is this agent that was taken for dead.
        """
        self._joined.pop(name, None)
        former = self.find([name])  # before the note: after it, it may be of a later life
        with contextlib.suppress(RpcError):
            note_life(self._lives, name, life)
        for member in former:
            self.strike_off(member, "its agent is gone, and another one took its seat over")

    def may_have_changed(self) -> bool:
        """True if the list may be another one than when this last said so."""
        return self._watch.may_have_changed()

    def close(self) -> None:
        """Hears of no more changes."""
        self._watch.close()

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
