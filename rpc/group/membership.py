"""One worker's membership in a dynamic group: joins, watches who comes and goes, leaves.

Owns the thread that looks at the group's list again and again, and the calls that wait for a
worker to join. What the list looks like in the store is ``member_list``'s business; what a worker
that came or is gone means here is told to a :class:`MembershipListener`.

Static groups need none of this. One thread is the only one that asks: the process that hosts
the store may be frozen, and a request would then take long. When the store is gone, nobody
can join any more, which is logged once; the workers that are there go on.

A record that is absent or cannot be believed is no news: only a departure that names the
very record, or a later life of the same name, ends a life that is known.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final, Protocol

from rpc.errors import (
    AgentClosedError,
    BringUpError,
    RpcError,
    UnknownWorkerError,
    WorkerLeftError,
    WorkerLostError,
)
from rpc.group.job_roles import JobRoles
from rpc.group.member_list import Departure, End, MemberTable
from rpc.group.records import Record
from rpc.group.store_silence import StoreSilence
from rpc.group.store_watch import SECONDS_BETWEEN_READS, StoreWatch
from rpc.ids import Life
from rpc.runtime.clock import Alarm
from rpc.runtime.executor import blocking
from rpc.runtime.store_visits import ProcessEndsError, visit
from rpc.runtime.threads import Thread
from rpc.runtime.wait_log import WaitLog
from rpc.transports.base import Peer

_logger = logging.getLogger("rpc")

LOOK_SECONDS: Final = 0.2
_PRESSING_LOOK_SECONDS: Final = 0.05
_SECONDS_BETWEEN_LOGS: Final = 1.0
"""Seconds between two looks at long waits, to log them, where the store tells of changes."""
_FULL_LOOK_SECONDS, _FULL_LOOK_SECONDS_PER_MEMBER = 5.0, 0.1
"""Seconds after which everything is read again, as a stranger may have put an old value of
``changes`` back; and as many more for each member.
"""
_LEAVE_SECONDS: Final = 2.0

Check = Callable[[list[Record]], None]


class MembershipListener(Protocol):
    """The worker of a membership, which tells it some things and asks it others."""

    is_expelled: bool
    """True if the others declared this worker lost."""

    def lives(self, who: str | int) -> bool:
        """True if a worker of this name or id is a member and not lost."""

    def add_peer(self, peer: Peer) -> None:
        """Makes a worker known that joined, or came back in a new life; not if this raises."""

    def departed(self, life: Life, departure: Departure | None) -> None:
        """Removes a life that the group does not list any more; None if another took its place."""


class Membership:
    """One worker's membership in a dynamic group.

    Args:
        listener: is told who comes and goes.
        table: where members leave their records.
        me: this worker's record.
        check: raises if two members' records do not fit together. Then the one that joins
            later fails, and the other does not take it for a member.
        roles: of the job: a worker that none of them can have is not waited for. Default none
            are known.
    """

    def __init__(
        self,
        listener: MembershipListener,
        table: MemberTable,
        me: Record,
        check: Check,
        roles: JobRoles | None = None,
    ) -> None:
        self._listener = listener
        self._table = table
        self._me = me
        self._check = check
        self._roles = roles or JobRoles()
        self._known: dict[str, Record] = {}
        self._departed: dict[str, Departure] = {}
        self._unreadable: Set[str] = frozenset()
        self._changes: bytes | None = None
        self._next_full_look = 0.0
        self._lost: deque[_Loss] = deque()
        self._waits: dict[int, _Wait] = {}
        self._numbers = itertools.count()
        self._begun = 0
        self._finished = 0
        self._looked = threading.Condition()
        self._closed = False
        self._silence = StoreSilence()
        self._alarm = Alarm()
        self._watch = StoreWatch()
        self._stopping = False
        self._thread = Thread(target=self._run, name=f"rpc-{me.name}-membership", daemon=True)

    def join(self) -> None:
        """Becomes a member, learns of the others and begins to watch.

        Raises:
            BringUpError: the group does not take this worker, or the store does not
                answer; says why.
            ValueError: it does not fit together with a member.
        """
        try:
            self._table.join(self._me)
            self._look()
        except BaseException:  # such as Ctrl-C
            with contextlib.suppress(RpcError):
                self._table.leave(self._me)
            raise
        self._thread.start()

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

    def look_soon(self) -> None:
        """Asks the store soon, also to learn whether it answers."""
        self._alarm.set()

    def was_out_of_touch(self, seconds: float, within: float) -> bool:
        """True if the store left a question without an answer for so many seconds.

        Args:
            seconds: the shortest silence that counts.
            within: seconds; the silence lasts, or ended in the last so many.
        """
        return self._silence.lasted(seconds, within, time.monotonic())

    def remove(
        self, life: Life, reason: str, wanted: Callable[[], bool], done: Callable[[], None]
    ) -> None:
        """Strikes a worker off the list that was declared lost: its name is free.

        Args:
            life: which.
            reason: why.
            wanted: asked right before, on this membership's thread.
            done: called when it is not on the list any more, on this membership's thread or at
                once; not if the store does not answer, or does not list this worker any more.
        """
        record = self._record_of(life.worker)
        if record is not None and record.incarnation == life.incarnation:
            self._lost.append(_Loss(record, reason, wanted, done))
            self._alarm.set()
        else:
            done()

    def departure(self, who: str | int) -> Departure | None:
        """The departure of a worker that is no member now, as far as is known."""
        if self._listener.lives(who):
            return None
        if isinstance(who, str):
            return self._departed.get(who)
        departures = [each for each in list(self._departed.values()) if each.rank == who]
        return max(departures, key=lambda each: each.incarnation, default=None)

    def wait_for(self, who: str | int, timeout: float, for_return: bool = False) -> None:
        """Returns when ``who`` is a member, or after ``timeout`` seconds (0: no limit).

        Args:
            who: name or rank.
            timeout: seconds.
            for_return: wait, too, for one that left or was lost.

        Raises:
            AgentClosedError: this worker left the group.
            WorkerLostError: the worker is gone; says how, when and who says so.
            UnknownWorkerError: no worker of that name can ever be in this job.

        Returns at once, too, if this worker was declared lost.
        """
        over = threading.Event()
        number = self.when_joined(who, over.set, for_return)
        try:
            with blocking():
                over.wait(timeout or None)
        finally:
            self.hurry(number)
        self.refuse(who, for_return)

    def refuse(self, who: str | int, for_return: bool = False) -> None:
        """Raises if nobody need wait for a worker any more; see :meth:`wait_for`."""
        if self._stopping:
            raise AgentClosedError(f"{who!r} was waited for until this worker shut down")
        departure = None if for_return else self.departure(who)
        if departure is not None:
            raise error_of(departure)
        self.refuse_name(who)

    def refuse_name(self, who: str | int) -> None:
        """Raises if no worker of that name can ever be in this job, as far as is known now."""
        if refusal := self._refusal(who):
            error = UnknownWorkerError(refusal)
            error.is_final = True
            raise error

    def _refusal(self, who: str | int) -> str:
        """The reason for which a worker will never come; empty if it may, or is there."""
        if not isinstance(who, str) or self._listener.lives(who):
            return ""
        return self._roles.refusal(who, list(self._known))

    def when_joined(
        self, who: str | int, told: Callable[[], None], for_return: bool = False
    ) -> int:
        """Calls ``told`` once: when ``who`` is a member, is gone, or nobody can join any more.

        Args:
            who: name or rank.
            told: must neither block nor run user code.
            for_return: one that is gone is waited for, too.

        Returns:
            What :meth:`hurry` takes.
        """
        number = next(self._numbers)
        with self._looked:
            self._waits[number] = _Wait(who, told, for_return, self._begun)
        self._tell_who_waits()
        self._alarm.set()
        return number

    def hurry(self, number: int) -> None:
        """Calls what :meth:`when_joined` was given now, unless it was called before."""
        with self._looked:
            wait = self._waits.pop(number, None)
        if wait is not None:
            wait.told()

    def waited_for(self) -> list[str | int]:
        """The workers that are waited for and are not there, oldest first."""
        with self._looked:
            return [wait.who for wait in self._waits.values()]

    def look_again(self, timeout: float) -> None:
        """Returns when what the store says now is known, or after ``timeout`` seconds (0: none)."""
        with blocking(), self._looked:
            wanted = self._begun + 1
            self._alarm.set()
            self._looked.wait_for(lambda: self._finished >= wanted or self._closed, timeout or None)

    def _tell_who_waits(self) -> None:
        with self._looked:
            over = [number for number, wait in self._waits.items() if self._is_over(wait)]
        for number in over:
            self.hurry(number)

    def _is_over(self, wait: _Wait) -> bool:
        if self._closed or self._listener.is_expelled or self._listener.lives(wait.who):
            return True
        has_looked = self._finished > wait.since  # at least once, as it may be listed already
        if has_looked and self._refusal(wait.who):
            return True
        return not wait.for_return and self.departure(wait.who) is not None

    def _record_of(self, rank: int) -> Record | None:
        return next((each for each in list(self._known.values()) if each.rank == rank), None)

    # --- On the thread

    def _run(self) -> None:
        try:
            self._watch = self._table.watch_changes(self._alarm.set)
            while not self._stopping:
                self._begun += 1
                self._silence.asked(time.monotonic())
                with visit():
                    self._remove_lost()
                    self._look()
                self._silence.answered(time.monotonic())
                self._finish_look()
                self._alarm.wait(self._pause())
            with visit():
                self._remove_lost()
                self._table.leave(self._me)
        except ProcessEndsError:
            return
        except RpcError as error:
            _logger.error("nobody can join the group any more: %s", error)
        except Exception:
            _logger.exception("nobody can join the group any more; this is a bug in TensorWire")
        finally:
            self._watch.close()
            self._close()

    def _pause(self) -> float:
        """The longest time until the next look."""
        if self._watch.stands:
            return _SECONDS_BETWEEN_LOGS if self._waits else SECONDS_BETWEEN_READS
        return _PRESSING_LOOK_SECONDS if self._waits else LOOK_SECONDS

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
        self._log_waits(time.monotonic())

    def _log_waits(self, now: float) -> None:
        """Says for whom somebody waits that has not come for long."""
        with self._looked:
            due = [wait for wait in self._waits.values() if wait.log.is_due(now)]
        for wait in due:
            here = ", ".join(sorted(self._known))
            seconds = now - wait.log.began
            _logger.warning(
                "%s has waited %.0f s for worker %r to join; the group has: %s",
                self._me, seconds, wait.who, here,
            )  # fmt: skip

    def _remove_lost(self) -> None:
        while self._lost:
            self._look()  # who was itself declared lost meanwhile has no say any more
            loss = self._lost.popleft()
            if not self._listener.is_expelled and loss.wanted():
                self._table.strike_off(loss.record, repr(self._me.name), loss.reason)
                loss.done()

    def _look(self) -> None:
        """Asks the store who is there, unless it says that nothing changed."""
        changes, now = self._table.changes(), time.monotonic()
        if changes is not None and changes == self._changes and now < self._next_full_look:
            return
        listing = self._table.listing()
        self._log_unreadable(dict(listing.unreadable))
        if self._changes is None and not self._known:
            for record in listing.members:
                self._check([self._me, record])
        for departure in listing.departures:
            self._take_departure(departure)
        for record in listing.members:
            self._take_record(record)
        self._changes = changes
        pause = max(_FULL_LOOK_SECONDS, _FULL_LOOK_SECONDS_PER_MEMBER * len(self._known))
        self._next_full_look = now + pause

    def _take_departure(self, departure: Departure) -> None:
        known = self._known.get(departure.name)
        if known is not None and departure.incarnation < known.incarnation:
            return  # of an earlier life: somebody put an old value back
        if known is not None and not self._ends(departure, known):
            return
        former = self._departed.get(departure.name)
        if former is None or former.incarnation < departure.incarnation:
            self._departed[departure.name] = departure
        if known is not None:
            is_about_it = departure.incarnation == known.incarnation
            self._forget(known, departure if is_about_it else None)

    @staticmethod
    def _ends(departure: Departure, known: Record) -> bool:
        """True if it is about the very record that is known, or about a later life."""
        return departure.incarnation > known.incarnation or departure.ends(known)

    def _take_record(self, record: Record) -> None:
        known, departed = self._known.get(record.name), self._departed.get(record.name)
        latest = max(
            -1 if known is None else known.incarnation,
            -1 if departed is None else departed.incarnation,
        )
        if record.incarnation <= latest:
            return
        if known is not None and known.rank != record.rank:
            self._forget(known, None)
        former = self._record_of(record.rank)
        if former is not None and former.name != record.name:
            self._forget(former, None)
        self._known[record.name] = record
        self._departed.pop(record.name, None)
        self._meet(record)

    def _forget(self, record: Record, departure: Departure | None) -> None:
        del self._known[record.name]
        self._listener.departed(Life(record.rank, record.incarnation), departure)

    def _meet(self, member: Record) -> None:
        """Makes a member known; one that this worker cannot take keeps it from nobody else."""
        try:
            self._check([self._me, member])
            self._listener.add_peer(member.peer())
        except Exception as error:
            if member == self._me:
                raise
            _logger.error("%s cannot be reached from here: %s", member, error, exc_info=True)

    def _log_unreadable(self, unreadable: dict[str, BringUpError]) -> None:
        for name in unreadable.keys() - self._unreadable:
            _logger.error("what the store says of %s is not heeded: %s", name, unreadable[name])
        self._unreadable = unreadable.keys()


@dataclass(frozen=True, slots=True)
class _Loss:
    """A member that is to be struck off; see :meth:`Membership.remove`."""

    record: Record
    reason: str
    wanted: Callable[[], bool]
    done: Callable[[], None]


class _Wait:
    """A wait for a worker."""

    __slots__ = ("for_return", "log", "since", "told", "who")

    def __init__(
        self, who: str | int, told: Callable[[], None], for_return: bool, since: int
    ) -> None:
        self.log = WaitLog(time.monotonic())
        self.since = since
        self.who = who
        self.told = told
        self.for_return = for_return


def error_of(departure: Departure) -> WorkerLostError:
    """The error of calls to a worker whose membership has ended."""
    kind = WorkerLeftError if departure.end is End.LEFT else WorkerLostError
    return kind(departure.name, departure.incarnation, departure.told())
