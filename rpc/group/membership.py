"""Keeps one worker's view of a dynamic group up to date, by asking the store.

Static groups need none of this. One thread asks the store a few times a second
whether anybody came or went, and is the only one that asks: the process that hosts
the store may be frozen, and a request would then take for ever. When the store is
gone, nobody can join any more, which is logged once; the workers that are there go
on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Protocol

from torch._C._distributed_c10d import Store

from rpc.errors import AgentClosedError, BringUpError, RpcError
from rpc.group import member_list
from rpc.group.store import Record, within
from rpc.ids import Life
from rpc.runtime.clock import Alarm
from rpc.runtime.executor import blocking
from rpc.runtime.store_visits import ProcessEndsError, visit
from rpc.runtime.threads import Thread
from rpc.transports.base import Peer
from rpc.worker_info import WorkerInfo

_logger = logging.getLogger("rpc")
_LOOK_SECONDS = 0.2
_PRESSING_LOOK_SECONDS = 0.05
_LEAVE_SECONDS = 2.0

Check = Callable[[list[Record]], None]

LIVENESS = "liveness"
"""What a record's extras call the way to ask for signs of life."""


def peer_of(record: Record) -> Peer:
    """What the others need to know of the worker that left this record."""
    info = WorkerInfo(record.name, record.rank)
    return Peer(info, record.incarnation, record.address, str(record.extras.get(LIVENESS, "")))


class Lives(Protocol):
    """The workers that are known to be there."""

    def lives(self, who: str | int) -> bool:
        """True if a worker of this name or id is a member that is not lost."""


class JoiningWorker(Protocol):
    """What a membership uses of its worker."""

    is_expelled: bool
    """The others declared it lost."""

    @property
    def group(self) -> Lives:
        """The workers that it knows."""

    def add_peer(self, peer: Peer) -> None:
        """Makes a worker known that joined or came back."""

    def struck_off(self, life: Life, left: bool) -> None:
        """Removes a worker that the store does not list any more; ``left`` of its own accord."""


class Membership:
    """One worker's membership in a dynamic group.

    Args:
        agent: the worker.
        store: where members leave their records.
        me: this worker's record.
        check: raises if two members' records do not fit together. Then the one that joins
            later fails, and the other does not take it for a member.
    """

    def __init__(self, agent: JoiningWorker, store: Store, me: Record, check: Check) -> None:
        self._agent = agent
        self._store = store
        self._me = me
        self._check = check
        self._known: dict[int, Record] = {}
        self._unreadable: Set[str] = frozenset()
        self._changes = -1
        self._lost: deque[Record] = deque()
        self._waits: dict[int, tuple[str | int, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._begun = 0
        self._finished = 0
        self._looked = threading.Condition()
        self._closed = False
        self._alarm = Alarm()
        self._stopping = False
        self._thread = Thread(target=self._run, name=f"rpc-{me.name}-membership", daemon=True)

    def join(self, timeout: float) -> None:
        """Becomes a member, learns of the others and begins to watch.

        Args:
            timeout: seconds.

        Raises:
            BringUpError: the group does not take this worker, or the store does not
                answer; says why.
            ValueError: it does not fit together with a member.
        """
        given_up = threading.Event()
        within(timeout, lambda: self._join(given_up), given_up, self._resign)
        self._thread.start()

    def _join(self, given_up: threading.Event) -> None:
        member_list.join(self._store, self._me)
        if given_up.is_set():
            return
        try:
            self._look()
        except BaseException:
            self._resign()
            raise

    def _resign(self) -> None:
        """Ends a membership that was never watched."""
        with contextlib.suppress(RpcError):
            member_list.leave(self._store, self._me)

    def leave(self) -> None:
        """Ends the membership and stops watching."""
        self._stopping = True
        self._alarm.set()
        if not self._thread.ident:
            return
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            _logger.warning("%s left, but the store does not answer", self._me)
            self._close()

    def remove(self, life: Life) -> None:
        """A worker was declared lost: its name is free."""
        record = self._known.get(life.worker)
        if record is not None and record.incarnation == life.incarnation:
            self._lost.append(record)
            self._alarm.set()

    def wait_for(self, who: str | int, timeout: float) -> None:
        """Returns when ``who`` is a member, or after ``timeout`` seconds (0: no limit).

        Raises:
            AgentClosedError: this worker left the group.
        """
        over = threading.Event()
        number = self.when_joined(who, over.set)
        try:
            with blocking():
                over.wait(timeout or None)
        finally:
            self.hurry(number)
        self.refuse_if_leaving(who)

    def refuse_if_leaving(self, who: str | int) -> None:
        """Changes nothing.

        Raises:
            AgentClosedError: this worker left the group, and nobody joins any more.
        """
        if self._stopping:
            raise AgentClosedError(f"{who!r} was waited for until this worker shut down")

    def when_joined(self, who: str | int, told: Callable[[], None]) -> int:
        """Calls ``told`` once, when ``who`` is a member, or nobody can join any more.

        Args:
            who: name or rank.
            told: must neither block nor run user code.

        Returns:
            What :meth:`hurry` takes.
        """
        number = next(self._numbers)
        with self._looked:
            self._waits[number] = (who, told)
        self._tell_who_waits()
        self._alarm.set()
        return number

    def hurry(self, number: int) -> None:
        """Calls what :meth:`when_joined` was given now, unless it was called before."""
        with self._looked:
            _, told = self._waits.pop(number, (None, None))
        if told is not None:
            told()

    def waited_for(self) -> list[str | int]:
        """Who is waited for and is not there, oldest first."""
        with self._looked:
            return [who for who, _ in self._waits.values()]

    def _tell_who_waits(self) -> None:
        group = self._agent.group
        with self._looked:
            waits = self._waits.items()
            over = [number for number, (who, _) in waits if self._closed or group.lives(who)]
        for number in over:
            self.hurry(number)

    def look_again(self, timeout: float) -> None:
        """Returns when what the store says now is known, or after ``timeout`` seconds (0: none)."""
        with blocking(), self._looked:
            wanted = self._begun + 1
            self._alarm.set()
            self._looked.wait_for(lambda: self._finished >= wanted or self._closed, timeout or None)

    # --- On the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._begun += 1
                with visit():
                    self._remove_lost()
                    self._look()
                self._finish_look()
                self._alarm.wait(_PRESSING_LOOK_SECONDS if self._waits else _LOOK_SECONDS)
            with visit():
                self._remove_lost()
                member_list.leave(self._store, self._me)
        except ProcessEndsError:
            return
        except RpcError as error:
            _logger.error("nobody can join the group any more: %s", error)
        except Exception:
            _logger.exception("nobody can join the group any more; this is a bug in TensorWire")
        finally:
            self._close()

    def _close(self) -> None:
        with self._looked:
            self._closed = True
            self._looked.notify_all()
        self._tell_who_waits()

    def _finish_look(self) -> None:
        with self._looked:
            self._finished = self._begun
            self._looked.notify_all()
        self._tell_who_waits()

    def _remove_lost(self) -> None:
        while self._lost:
            self._look()  # who was itself declared lost meanwhile has no say any more
            record = self._lost.popleft()
            if not self._agent.is_expelled:
                member_list.strike_off(self._store, record)

    def _look(self) -> None:
        """Asks the store who is there."""
        changes = member_list.changes(self._store)
        if changes == self._changes:
            return
        unreadable: dict[str, BringUpError] = {}
        found = member_list.members(self._store, unreadable.__setitem__)
        self._log_unreadable(unreadable)
        if self._changes < 0:
            for record in found:
                self._check([self._me, record])
        records = {record.rank: record for record in found}
        for rank, record in list(self._known.items()):
            if rank not in records and record.name not in unreadable:
                del self._known[rank]
                life = Life(rank, record.incarnation)
                self._agent.struck_off(life, member_list.has_left(self._store, record))
        for rank, record in records.items():
            known = self._known.get(rank)
            if known is None or known.incarnation < record.incarnation:
                self._known[rank] = record
                self._meet(record)
        self._changes = changes

    def _meet(self, member: Record) -> None:
        """One that this worker cannot take keeps it from nobody else."""
        try:
            self._check([self._me, member])
            self._agent.add_peer(peer_of(member))
        except Exception as error:
            if member == self._me:
                raise
            _logger.error("%s cannot be reached from here: %s", member, error, exc_info=True)

    def _log_unreadable(self, unreadable: Mapping[str, BringUpError]) -> None:
        for name in unreadable.keys() - self._unreadable:
            _logger.error("what the store says of %s is not heeded: %s", name, unreadable[name])
        self._unreadable = unreadable.keys()
