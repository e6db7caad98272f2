"""The members of a dynamic group, who come and go, as its store lists them.

Each name has a key with its worker's record, in whose place it says later whether
that worker left or was lost. A rank has a claim, the name and the incarnation, which
says so until it is confirmed. Watching the list is ``membership``'s business.

Keys, beside those of ``group_store``: ``member/NAME``, ``id/RANK`` and ``names/N``;
``joined`` counts names, ``changes`` comings and goings, ``first`` is the record with
which all others must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from rpc.errors import BringUpError
from rpc.group.store import (
    DYNAMIC,
    Record,
    disagreements,
    names_store_loss,
    our_part,
    read,
    set_mode,
    text,
)
from rpc.worker_info import WorkerInfo

_NOBODY = "!"
"""In the place of the name that has a rank, and at the start of what follows a member's record."""
_LEFT, _LOST = f"{_NOBODY}left", f"{_NOBODY}lost"
_GONE = _NOBODY.encode()
_JOINING = " joining"

_SECONDS_BETWEEN_LOOKS = 0.1

Skip = Callable[[str, BringUpError], object]


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

    Example::

        members = extend.MemberList(store, key, author="rpcrun on host7")
        member = members.find("trainer:3")
        if member is not None and member.pid == ended:
            members.strike_off(member, "its process ended with exit code 1")
    """

    def __init__(self, store: Store, group_key: bytes = b"", author: str = "the launcher") -> None:
        self._store = store
        self._author = author
        self._seen = changes(store)

    def members(self) -> list[Member]:
        """All members, in the order in which their names first joined.

        Raises:
            BringUpError: the store does not answer.
        """
        return [_member(record) for record in members(self._store)]

    def find(self, who: str | int) -> Member | None:
        """The member with this name or id; None if there is none now."""
        record = lookup(self._store, who)
        return None if record is None else _member(record)

    def strike_off(self, member: Member, reason: str) -> bool:
        """Ends the membership of a worker whose process has ended.

        Args:
            member: as :meth:`find` returned it.
            reason: what was observed, for people.

        Returns:
            True if the list said until now that this life is a member.
        """
        record = lookup(self._store, member.info.name)
        if record is None or _member(record) != member:
            return False
        strike_off(self._store, record)
        return True

    def was_lost(self, member: Member) -> bool:
        """True if the group, or a launcher, declared this life lost, and none joined since.

        Args:
            member: as :meth:`find` returned it, when it was a member.
        """
        with names_store_loss():
            ours, key = our_part(self._store), f"member/{member.info.name}"
            found = text(ours.get(key)).split(" ") if ours.check([key]) else []
            return found[:2] == [_LOST, str(member.incarnation)]

    def wait_for_change(self, timeout: float) -> bool:
        """Waits until workers came or went since this object was made, or last said so.

        Args:
            timeout: seconds.

        Returns:
            False if nothing changed.
        """
        deadline = time.monotonic() + timeout
        while (now := changes(self._store)) == self._seen:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _SECONDS_BETWEEN_LOOKS))
        self._seen = now
        return True


def _member(record: Record) -> Member:
    info = WorkerInfo(record.name, record.rank)
    return Member(info, record.incarnation, record.host, record.pid)


def join(store: Store, me: Record) -> None:
    """Makes ``me`` a member of the dynamic group on ``store``.

    A worker that comes back, under the same name and rank, takes its own place.

    Raises:
        BringUpError: the group is a static one, the name or the rank belongs to another
            member, or to a later life, or members use another backend or protocol.
    """
    with names_store_loss():
        ours = our_part(store)
        set_mode(ours, DYNAMIC)
        first = Record.decode(ours.compare_set("first", "", me.encode().decode()))
        for problem in disagreements(me, first):
            raise BringUpError(problem)
        _claim_rank(ours, me)
        _claim_name(ours, me)
        _confirm_rank(store, me)
        ours.add("changes", 1)


def leave(store: Store, me: Record) -> None:
    """Ends this worker's membership; does nothing if this life of it is no member any more."""
    _end(store, me, _LEFT)


def strike_off(store: Store, lost: Record) -> None:
    """Ends the membership of a worker that was lost, likewise."""
    _end(store, lost, _LOST)


def has_left(store: Store, member: Record) -> bool:
    """Whether that life, the last of its name, left of its own accord."""
    with names_store_loss():
        ours, key = our_part(store), f"member/{member.name}"
        return bool(ours.check([key])) and text(ours.get(key)) == _mark(_LEFT, member)


def _end(store: Store, member: Record, how: str) -> None:
    with names_store_loss():
        ours = our_part(store)
        record = member.encode().decode()
        if _value(ours, f"member/{member.name}") == record:
            ours.compare_set(f"member/{member.name}", record, _mark(how, member))
            ours.compare_set(f"id/{member.rank}", _claim(member), _NOBODY)
            ours.add("changes", 1)


def lookup(store: Store, who: str | int) -> Record | None:
    """The member with this name or rank, if there is one."""
    with names_store_loss():
        ours = our_part(store)
        claim = _value(ours, f"id/{who}") if isinstance(who, int) else who
        name = claim.split(" ")[0] if claim else None
        record = _value(ours, f"member/{name}") if name else None
        return Record.decode(record.encode()) if record else None


def members(store: Store, skip: Skip = lambda name, error: None) -> list[Record]:
    """All members, in the order in which their names first joined.

    Args:
        store: where the group meets.
        skip: is told the name of each whose record cannot be read, and why.
    """
    with names_store_loss():
        ours = our_part(store)
        slots = range(1, ours.add("joined", 0) + 1)
        names = [text(name) for name in read(ours, "names/", slots)]
        found = zip(names, read(ours, "member/", names), strict=True)
        return list(_readable(found, skip))


def _readable(found: Iterable[tuple[str, bytes]], skip: Skip) -> Iterator[Record]:
    for name, value in found:
        if value.startswith(_GONE):
            continue
        try:
            yield Record.decode(value)
        except BringUpError as error:
            skip(name, error)


def changes(store: Store) -> int:
    """How often members came or went so far: one cheap request to see if to ask again."""
    with names_store_loss():
        count: int = our_part(store).add("changes", 0)
        return count


def _claim(me: Record, how: str = "") -> str:
    return f"{me.name} {me.incarnation}{how}"


def _claim_rank(store: Store, me: Record) -> None:
    """Until it is confirmed, another worker may take the rank, which changes the claim."""
    key, mine = f"id/{me.rank}", _claim(me, _JOINING)
    holder = text(store.compare_set(key, "", mine))
    while holder != mine:
        if _is_there(holder):
            _give_way(store, me, holder)
        holder = text(store.compare_set(key, holder, mine))


def _give_way(store: Store, me: Record, holder: str) -> None:
    """Raises if the rank is that of another member, or of a later life."""
    name, incarnation, *_ = holder.split(" ")
    found = _value(store, f"member/{name}")
    member = None if found is None else Record.decode(found.encode())
    others = name != me.name and member is not None and member.rank == me.rank
    if others or int(incarnation) > me.incarnation:
        raise BringUpError(
            f"rank {me.rank} is claimed by two workers, {member or repr(name)} and {me}"
        )


def _confirm_rank(store: Store, me: Record) -> None:
    """Another worker may have taken the rank before our record was there to stop it."""
    key = f"id/{me.rank}"
    holder = text(our_part(store).compare_set(key, _claim(me, _JOINING), _claim(me)))
    if holder != _claim(me):
        leave(store, me)
        name = holder.split(" ")[0]
        raise BringUpError(f"rank {me.rank} is claimed by two workers, {name!r} and {me}")


def _claim_name(store: Store, me: Record) -> None:
    record = me.encode().decode()
    key = f"member/{me.name}"
    if not store.check([key]):
        found = text(store.compare_set(key, "", record))
        if found == record:
            store.set(f"names/{store.add('joined', 1)}", me.name)
            return
    found = text(store.get(key))
    while found != record:
        try:
            _check_name(found, me)
        except BringUpError:
            store.compare_set(f"id/{me.rank}", _claim(me, _JOINING), _NOBODY)
            raise
        found = text(store.compare_set(key, found, record))


def _check_name(found: str, me: Record) -> None:
    """Raises if the name is that of another rank, or of a later life."""
    if _is_there(found):
        other = Record.decode(found.encode())
        if other.rank != me.rank or other.incarnation > me.incarnation:
            raise BringUpError(
                f"RPC worker name {me.name} is not unique: it is claimed by {other} and {me}"
            )
    elif int(found.split(" ")[1]) > me.incarnation:
        raise BringUpError(
            f"RPC worker name {me.name} is not unique: another {me.name} joined later than "
            f"{me}, and is gone already"
        )


def _value(store: Store, key: str) -> str | None:
    """What a member's key holds, unless it is absent or left."""
    if not store.check([key]):
        return None
    value = text(store.get(key))
    return value if _is_there(value) else None


def _mark(how: str, member: Record) -> str:
    return f"{how} {member.incarnation}"


def _is_there(value: str) -> bool:
    return not value.startswith(_NOBODY)
