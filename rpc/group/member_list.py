"""The members of a dynamic group, who come and go, as its store lists them.

Each name has a key with its worker's record, in whose place it says later how that worker's
membership ended: a *departure*. A rank has a claim, the name and the incarnation, which says
so until it is confirmed. Watching the list is ``membership``'s business.

Anybody may write to a store, so only what was written with the group's key counts (see
``signed_store``), and only what is *later* than what is known: an absent record is no news,
and a departure ends the one life whose very record it names.

Keys: ``mode``; ``member/NAME``, ``id/RANK``, and ``names/N`` for N = 1, 2, ...; ``changes``, a
random value that is another after each change; ``first``, the record with which all others
must agree.
"""

from __future__ import annotations

import enum
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from torch._C._distributed_c10d import Store

from rpc.errors import BringUpError
from rpc.group.key_values import KeyValueStore
from rpc.group.records import DYNAMIC, PREFIX, Record, disagreements, set_mode
from rpc.group.signed_store import SignedStore
from rpc.group.store_watch import StoreWatch
from rpc.worker_info import WorkerInfo

_NOBODY: Final = b"!"
"""Stands where the name that has a rank would, and begins a departure."""
_JOINING: Final = b" joining"
_CHUNK: Final = 32
"""Keys of names that are read at once; a stranger may have deleted as many in a row."""
_SECONDS_BETWEEN_LOOKS: Final = 0.1


class End(enum.Enum):
    """The way a membership ended."""

    LEFT = "left"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Departure:
    """The end of the membership of one life of a worker.

    Args:
        name: the worker's.
        rank: its id.
        incarnation: which life.
        end: whether it left or was lost.
        author: who says so; the worker itself if it left.
        at: when, as seconds since 1970 on the author's clock.
        reason: what was observed, for people.
        record: the digest of the record that was there before.
    """

    name: str
    rank: int
    incarnation: int
    end: End
    author: str
    at: float
    reason: str
    record: str

    def encode(self) -> bytes:
        """Encodes it for the store."""
        fields = [self.name, self.rank, self.incarnation, self.end.value, self.author, self.at]
        return _NOBODY + json.dumps([*fields, self.reason, self.record]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Departure:
        """The inverse of :meth:`encode`.

        Raises:
            BringUpError: this is no departure.
        """
        try:
            name, rank, incarnation, end, author, at, reason, record = json.loads(data[1:])
            return cls(name, rank, incarnation, End(end), author, at, reason, record)
        except (ValueError, TypeError, RecursionError) as error:
            raise BringUpError(
                f"the store holds something else than a departure: {error}"
            ) from error

    def ends(self, record: Record) -> bool:
        """True if it is about that very life."""
        return self.record == record.digest()

    def told(self) -> str:
        """Tells people why a membership ended, by whom and when."""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
        if self.end is End.LEFT:
            return f"it left the group at {when}{': ' if self.reason else ''}{self.reason}"
        return f"{self.author} declared it lost at {when}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Listing:
    """The store's account of everybody.

    Args:
        members: the records of the members.
        departures: how the others' memberships ended, by name.
        unreadable: what cannot be read, by name.
    """

    members: Sequence[Record]
    departures: Sequence[Departure]
    unreadable: Sequence[tuple[str, BringUpError]]


class MemberTable:
    """The member list of one group. Every method raises ``BringUpError`` if the store is lost.

    Args:
        store: where the group meets, with the group's key.
    """

    def __init__(self, store: SignedStore) -> None:
        self._store = store

    def join(self, me: Record) -> None:
        """Makes ``me`` a member.

        A worker that comes back, under the same name and rank, takes its own place.

        Raises:
            BringUpError: the group is a static one, the name or the rank belongs to another
                member, or to a later life, or members use another backend, protocol or key.
        """
        self._refuse_another_key()
        set_mode(self._store, DYNAMIC)
        first = self._store.compare_and_set("first", None, me.encode()) or me.encode()
        for problem in disagreements(me, Record.decode(first)):
            raise BringUpError(problem)
        self._claim_rank(me)
        self._claim_name(me)
        self._confirm_rank(me)
        self._changed()

    def leave(self, me: Record, reason: str = "") -> None:
        """Ends this worker's membership; does nothing if this life is no member any more."""
        self._end(me, End.LEFT, repr(me.name), reason)

    def strike_off(self, lost: Record, author: str, reason: str) -> bool:
        """Ends the membership of a worker that was lost; False if it had ended."""
        return self._end(lost, End.LOST, author, reason)

    def lookup(self, who: str | int) -> Record | None:
        """The member with this name or rank, if there is one."""
        entry = self.find(who)
        return entry if isinstance(entry, Record) else None

    def find(self, who: str | int) -> Record | Departure | None:
        """The member with this name or rank, or how its membership ended; None if unknown."""
        name = who if isinstance(who, str) else self._name_of(who)
        if name is None:
            return None
        value = self._store.get(f"member/{name}")
        if value is None:
            return None
        entry = Departure.decode(value) if _is_over(value) else Record.decode(value)
        return entry if isinstance(who, str) or entry.rank == who else None

    def listing(self) -> Listing:
        """Reads what the store says of everybody, in the order in which names first joined."""
        names = self._names()
        values = self._store.get_all([f"member/{name}" for name in names])
        members: list[Record] = []
        departures: list[Departure] = []
        unreadable: list[tuple[str, BringUpError]] = []
        for name, value in zip(names, values, strict=True):
            try:
                if value is None:
                    continue
                if _is_over(value):
                    departures.append(Departure.decode(value))
                else:
                    members.append(Record.decode(value))
            except BringUpError as error:
                unreadable.append((name, error))
        return Listing(members, departures, unreadable)

    def members(self) -> list[Record]:
        """The records of all members."""
        return [*self.listing().members]

    def changes(self) -> bytes | None:
        """A value that is another one after each change; None if it cannot be believed."""
        return self._store.get("changes")

    def watch_changes(self, told: Callable[[], None]) -> StoreWatch:
        """Calls ``told`` after changes, if the store can tell; the caller closes the watch."""
        return self._store.watch(["changes"], told)

    def _changed(self) -> None:
        self._store.set("changes", os.urandom(8).hex().encode())

    def _refuse_another_key(self) -> None:
        """Raises if everything that lies there was written with another key.

        Where there is somebody who has this worker's key, the rest is a stranger's.
        """
        self._store.get_all(["mode", "first"])
        if self._store.forgeries.have_another_key and not self._names():
            raise BringUpError(
                "the workers disagree about group_key: the members that are listed were given "
                "another one than this worker; give every worker of the group the same"
            )

    def _names(self) -> list[str]:
        """The names that ever joined, in that order."""
        return [*dict.fromkeys(name for name in self._slots() if name is not None)]

    def _slots(self) -> list[str | None]:
        """Reads what the keys of names hold, up to a whole chunk that holds nothing."""
        slots: list[str | None] = []
        while True:
            numbers = range(len(slots) + 1, len(slots) + 1 + _CHUNK)
            stored = self._store.get_all([f"names/{number}" for number in numbers])
            slots += [None if name is None else name.decode() for name in stored]
            if not any(stored):
                return slots

    def _name_of(self, rank: int) -> str | None:
        """The name that has a rank, or had it last."""
        claim = self._store.get(f"id/{rank}")
        return None if claim is None else _claimed(claim)[0]

    def _end(self, member: Record, end: End, author: str, reason: str) -> bool:
        record = member.encode()
        life = (member.name, member.rank, member.incarnation)
        departure = Departure(*life, end, author, time.time(), reason, member.digest()).encode()
        key, claim = f"member/{member.name}", f"id/{member.rank}"
        stored = self._store.compare_and_set(key, record, departure)
        if stored is None:  # a stranger wrote there, or deleted it
            stored = self._store.compare_and_set(key, None, departure)
        if stored != departure:
            return False
        self._store.compare_and_set(claim, _claim(member), _NOBODY + _claim(member))
        self._changed()
        return True

    def _claim_rank(self, me: Record) -> None:
        """Claims a rank, which another worker may still take until the claim is confirmed."""
        key, mine = f"id/{me.rank}", _claim(me, _JOINING)
        holder = self._store.compare_and_set(key, None, mine)
        while holder != mine:
            if holder is not None and not _is_over(holder):
                self._give_way(me, holder)
            holder = self._store.compare_and_set(key, holder, mine)

    def _give_way(self, me: Record, holder: bytes) -> None:
        """Raises if the rank is that of another member, or of a later life."""
        name, incarnation = _claimed(holder)
        member = self.lookup(name)
        others = name != me.name and member is not None and member.rank == me.rank
        if others or incarnation > me.incarnation:
            raise BringUpError(
                f"rank {me.rank} is claimed by two workers, {member or repr(name)} and {me}"
            )

    def _confirm_rank(self, me: Record) -> None:
        """Confirms a claim, unless another worker took the rank before our record was there."""
        key = f"id/{me.rank}"
        holder = self._store.compare_and_set(key, _claim(me, _JOINING), _claim(me))
        if holder is not None and holder != _claim(me):
            self.leave(me)
            name, _ = _claimed(holder)
            raise BringUpError(f"rank {me.rank} is claimed by two workers, {name!r} and {me}")

    def _claim_name(self, me: Record) -> None:
        record, key = me.encode(), f"member/{me.name}"
        stored = self._store.compare_and_set(key, None, record)
        while stored != record:
            if stored is not None:
                try:
                    _check_name(stored, me)
                except BringUpError:
                    mine = _claim(me, _JOINING)
                    self._store.compare_and_set(f"id/{me.rank}", mine, _NOBODY + mine)
                    raise
            stored = self._store.compare_and_set(key, stored, record)
        self._list_name(me.name)

    def _list_name(self, name: str) -> None:
        """Sees to it that a name is among those that ever joined."""
        slots = self._slots()
        number = slots.index(None)
        while name not in slots:
            number += 1
            stored = self._store.compare_and_set(f"names/{number}", None, name.encode())
            slots = [None if stored is None else stored.decode()]


def _check_name(stored: bytes, me: Record) -> None:
    """Raises if the name is that of another rank, or of a later life."""
    if not _is_over(stored):
        other = Record.decode(stored)
        if other.rank != me.rank or other.incarnation > me.incarnation:
            raise BringUpError(
                f"RPC worker name {me.name} is not unique: it is claimed by {other} and {me}"
            )
    elif Departure.decode(stored).incarnation > me.incarnation:
        raise BringUpError(
            f"RPC worker name {me.name} is not unique: another {me.name} joined later than "
            f"{me}, and is gone already"
        )


def _claim(me: Record, how: bytes = b"") -> bytes:
    return f"{me.name} {me.incarnation}".encode() + how


def _claimed(claim: bytes) -> tuple[str, int]:
    """The name and the incarnation in a claim, whether it is over or not."""
    name, incarnation, *_ = claim.removeprefix(_NOBODY).split(b" ")
    return name.decode(), int(incarnation)


def _is_over(value: bytes) -> bool:
    return value.startswith(_NOBODY)


# --- For a process that is no worker


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of a dynamic group, as the group's store lists it.

    Args:
        info: its name and id.
        incarnation: which life of that name this is.
        host: the name of the host that it runs on.
        pid: its process id there.
    """

    info: WorkerInfo
    incarnation: int
    host: str
    pid: int


class MemberList:
    """The members of a dynamic group, for a process that is no worker, such as a launcher.

    A launcher that sees a worker's process end strikes its life off the list. Then nobody
    waits for it, and calls to its name fail at once, also before any worker has noticed.

    Args:
        store: where the group meets: one connection to it, used by one thread at a time.
        group_key: the group's key, if it has one; see :func:`rpc.extend.read_group_key`.
        author: says in the errors of others who struck a worker off.

    Raises:
        BringUpError: the store does not answer, here and in every method.

    Example::

        members = extend.MemberList(store, key, author="rpcrun on host7")
        member = members.find("trainer:3")
        if member is not None and member.pid == ended:
            members.strike_off(member, "its process ended with exit code 1")
    """

    def __init__(self, store: Store, group_key: bytes = b"", author: str = "the launcher") -> None:
        self._store = SignedStore(store, group_key, PREFIX)
        self._table = MemberTable(self._store)
        self._author = author
        self._seen = self._table.changes()

    def key_values(self, namespace: str) -> KeyValueStore:
        """The group's key-value store, as :func:`rpc.extend.store` gives it to workers.

        Args:
            namespace: the name of your package.
        """
        return KeyValueStore(self._store, namespace)

    def members(self) -> list[Member]:
        """All members, in the order in which their names first joined."""
        return [_member(record) for record in self._table.members()]

    def find(self, who: str | int) -> Member | None:
        """The member with this name or id; None if there is none now."""
        record = self._table.lookup(who)
        return None if record is None else _member(record)

    def watch_changes(self) -> StoreWatch:
        """A watch that says when the list may have changed; the caller closes it."""
        return self._table.watch_changes(lambda: None)

    def strike_off(self, member: Member, reason: str) -> bool:
        """Ends the membership of a worker whose process has ended.

        Args:
            member: as :meth:`find` returned it.
            reason: what was observed, for people.

        Returns:
            True if the list said until now that this life is a member.
        """
        record = self._table.lookup(member.info.name)
        if record is None or _member(record) != member:
            return False
        return self._table.strike_off(record, self._author, reason)

    def was_lost(self, member: Member) -> bool:
        """True if the group, or a launcher, declared this life lost, and none joined since.

        Args:
            member: as :meth:`find` returned it, when it was a member.
        """
        entry = self._table.find(member.info.name)
        if not isinstance(entry, Departure) or entry.incarnation != member.incarnation:
            return False
        return entry.end is End.LOST

    def wait_for_change(self, timeout: float) -> bool:
        """Waits until workers came or went since this object was made, or last said so.

        Args:
            timeout: seconds.

        Returns:
            False if nothing changed.
        """
        deadline = time.monotonic() + timeout
        while (now := self._table.changes()) == self._seen:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _SECONDS_BETWEEN_LOOKS))
        self._seen = now
        return True


def _member(record: Record) -> Member:
    info = WorkerInfo(record.name, record.rank)
    return Member(info, record.incarnation, record.host, record.pid)
