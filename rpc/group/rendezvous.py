"""Bring-up of a static group: how its workers find each other through the group's store.

Decides when a group is complete, and what is wrong when it is not. Connecting to the peers
is the transports' business.

A static group meets in rounds, so that workers may shut down and meet again at one store: a
rank's n-th meeting is round n, unless that round ended without it. Each worker publishes its
record. Rank 0 waits until all are there and writes the *verdict*, which holds them all and
for which the others wait. Whoever sees that a round cannot become complete writes that as
the verdict, so an error reaches everyone at once.

Keys: ``mode``; ``round/RANK``, a rank's latest round and who claims it there; ``ROUND/...``
belongs to one round.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Final

from rpc.errors import BringUpError
from rpc.group.records import STATIC, Record, disagreements, set_mode
from rpc.group.signed_store import SignedStore
from rpc.group.tcp_store import SECONDS_OF_SILENCE

_logger = logging.getLogger("rpc")

_COMPLETE: Final = b"="
_PROBLEM: Final = b"!"
_BETWEEN_RECORDS: Final = b"\n"

_SHORTEST_LOOK, _LONGEST_LOOK = 0.002, 0.25
_SECONDS_AFTER_FORGERY = 0.05
_SECONDS_FOR_RANK_0 = 0.3
"""Seconds the others wait beyond the deadline, so that one of them looks for who is missing."""
_SECONDS_TO_BE_HEARD = 0.5
"""Seconds that rank 0, whose process is likely to end then, waits until others know the error."""
_SECONDS_TO_STOP = 2.0
_CHUNK = 64
_MOST_NAMED = 8


def meet(store: SignedStore, me: Record, timeout: float) -> list[Record]:
    """Publishes ``me`` and waits for the records of all other ranks of a static group.

    Args:
        store: where the workers meet.
        me: this worker; its ``world_size`` says how many records there will be.
        timeout: seconds.

    Returns:
        The records of all ranks, in the order of their ranks.

    Raises:
        BringUpError: ranks are missing at the deadline, two processes claim one rank, two
            workers have one name, or workers disagree about the world size, the backend
            or the protocol; names them.
    """
    if me.world_size is None:
        raise ValueError(f"{me} has no world size; use join for a dynamic group")
    meeting = _Meeting(store, me, timeout)
    try:
        return meeting.hold()
    except BringUpError:
        meeting.let_others_hear()
        raise
    except KeyboardInterrupt:
        meeting.interrupt()
        raise


class _Meeting:
    """One worker's way through :func:`meet`."""

    def __init__(self, store: SignedStore, me: Record, timeout: float) -> None:
        self._store = store
        self._me = me
        self._size = me.world_size or 0
        self._timeout = timeout
        self._began = time.monotonic()
        self._silence = SECONDS_OF_SILENCE
        self._round: Round | None = None

    def hold(self) -> list[Record]:
        """See :func:`meet`."""
        me = self._me
        set_mode(self._store, STATIC)
        self._round = meeting = _enter(self._store, me)
        meeting.arrive(me)
        verdict = self._await_verdict(meeting)
        if verdict is None:
            verdict = meeting.conclude(self._describe_missing(meeting))
        records = _records(verdict)
        if records[me.rank] != me:
            raise BringUpError("the group's store holds the records of another group's workers")
        return records

    def _await_verdict(self, meeting: Round) -> bytes | None:
        """Returns the verdict, or None at the deadline."""
        deadline = self._began + self._timeout
        if self._me.rank != 0:
            deadline += min(_SECONDS_FOR_RANK_0, self._timeout)
        while (left := deadline - time.monotonic()) > 0:
            if self._me.rank == 0:
                meeting.await_records(self._size, min(left, self._until_look()))
            else:
                meeting.await_verdict(min(left, self._until_told()))
            verdict = meeting.verdict()
            if verdict is not None:
                return verdict
            self._say_what_is_missing(meeting)
        return None

    def _until_look(self) -> float:
        """Seconds until rank 0, which waits for records, looks for a verdict of somebody else."""
        waited = time.monotonic() - self._began
        return min(_LONGEST_LOOK, _SHORTEST_LOOK + waited / 4)

    def _until_told(self) -> float:
        """Seconds until the log says again what is waited for; short enough for Ctrl-C."""
        return min(1.0, max(0.001, self._began + self._silence - time.monotonic()))

    def _say_what_is_missing(self, meeting: Round) -> None:
        """After five seconds, and then whenever it has waited twice as long."""
        if time.monotonic() < self._began + self._silence:
            return
        missing = meeting.missing(self._size)
        first = list(itertools.islice(missing, _MOST_NAMED))
        others = " and others" if any(True for _ in missing) else ""
        whom = f"ranks {first}{others} of {self._size} workers" if first else "rank 0"
        _logger.warning(
            "init_rpc has waited %g s for %s, and gives up after %g s",
            self._silence,
            whom,
            self._timeout,
        )
        self._silence *= 2

    def _describe_missing(self, meeting: Round) -> bytes:
        """The message to everyone when this worker gives up."""
        missing = [*meeting.missing(self._size)]
        came = [rank for rank in range(self._size) if rank not in missing]
        present = ", ".join(str(record) for record in meeting.records(came) if record is not None)
        if not missing:
            return _problem(f"all workers came, but rank 0 did not go on; there were {present}")
        another = self._store.forgeries.have_another_key
        hint = "; some were given another group_key, see the log" if another else ""
        return _problem(
            f"{len(missing)} of {self._size} workers did not come within {self._timeout:g} s: "
            f"missing ranks {missing}; there were {present}{hint}"
        )

    def let_others_hear(self) -> None:
        """Tells rank 0 that this worker knows the error; there, waits until the others do.

        Rank 0's process usually hosts the store, and ends when ``init_rpc`` fails.
        """
        if self._round is None:
            return
        with contextlib.suppress(BringUpError):
            self._round.heard(self._me.rank)
            if self._me.rank == 0:
                self._round.await_hearing(self._size, _SECONDS_TO_BE_HEARD)

    def interrupt(self) -> None:
        """Ends the round, for everybody, that this worker does not wait for any more."""
        if self._round is not None:
            self._store.answer_by(time.monotonic() + _SECONDS_TO_STOP)
            with contextlib.suppress(BringUpError):
                told = f"{self._me} was interrupted while it waited for the others"
                self._round.conclude(_problem(told))


class Round:
    """One attempt of a static group to form."""

    def __init__(self, group: SignedStore, number: int) -> None:
        self.number = number
        self._group = group
        self._store = group.below(str(number))

    def verdict(self) -> bytes | None:
        """The verdict on it, if that is known.

        It is looked for before it is read: torch's server wakes all who wait for a key
        whenever somebody reads it as ``SignedStore`` does, though it is not there.
        """
        return self._store.get("verdict") if self._store.may_have("verdict") else None

    def conclude(self, verdict: bytes) -> bytes:
        """Writes the verdict, unless there is one; returns what it is then."""
        return self._store.compare_and_set("verdict", None, verdict) or verdict

    def await_verdict(self, seconds: float) -> None:
        """Returns when there may be a verdict, or the time is over."""
        if self._store.wait(["verdict"], seconds) and self.verdict() is None:
            time.sleep(min(seconds, _SECONDS_AFTER_FORGERY))

    def await_records(self, size: int, seconds: float) -> None:
        """Writes the verdict if all records come in time."""
        if not self._store.wait([f"record/{rank}" for rank in range(size)], seconds):
            return
        answers = self.records(range(size))
        records = [record for record in answers if record is not None]
        if len(records) == size:
            encoded = _BETWEEN_RECORDS.join(record.encode() for record in records)
            self.conclude(_COMPLETE + encoded)
        else:
            time.sleep(min(seconds, _SECONDS_AFTER_FORGERY))

    def arrive(self, me: Record) -> None:
        """Publishes ``me`` and compares it with others."""
        for problem in self._problems(me):
            self._store.set("disagreement", problem.encode())
            self.conclude(_problem(problem))
        self._store.set(f"record/{me.rank}", me.encode())

    def _problems(self, me: Record) -> Iterator[str]:
        yield from disagreements(me, self._first("first", me))
        namesake = self._first(f"name/{me.name}", me)
        if namesake.rank != me.rank:
            yield f"RPC worker name {me.name} is not unique: it is claimed by {namesake} and {me}"

    def _first(self, key: str, me: Record) -> Record:
        """The record under a key, which is ``me`` if it is the first there."""
        return Record.decode(self._store.compare_and_set(key, None, me.encode()) or me.encode())

    def raise_problems(self, rank: int) -> None:
        """Raises why it ended before ``rank``, whose round it is, could come.

        Whoever comes late shares what those who came disagreed about.
        """
        for problem in self._store.get_all([f"claimed/{rank}", "disagreement"]):
            if problem is not None:
                raise BringUpError(problem.decode())

    def refuse_beside(self, other: Record, me: Record) -> None:
        """Raises if ``me`` was begun before the round of its rank, ``other``'s, had ended."""
        problem = (
            f"rank {me.rank} is claimed by two processes, {other} and {me}: either both were "
            "started with this rank, or the first died while the group was forming"
        )
        if self.verdict() is None:
            latest = self._group.add(f"incarnation-of-rank/{me.rank}", 0)
            self._store.compare_and_set(f"begun/{me.rank}", None, b"%d" % latest)
            self._store.set(f"claimed/{me.rank}", problem.encode())
            self.conclude(_problem(problem))
        elif me.incarnation > self._begun(me.rank):
            return
        raise BringUpError(problem)

    def _begun(self, rank: int) -> int:
        """The latest life of ``rank`` when two were seen to claim it; 0 if none were."""
        return int(self._store.get(f"begun/{rank}") or 0)

    def records(self, ranks: Iterable[int]) -> list[Record | None]:
        """The records of ``ranks``, None for each that is not there."""
        stored = self._store.get_all([f"record/{rank}" for rank in ranks])
        return [None if each is None else Record.decode(each) for each in stored]

    def missing(self, size: int) -> Iterator[int]:
        """The ranks that did not come."""
        for start in range(0, size, _CHUNK):
            ranks = range(start, min(start + _CHUNK, size))
            records = self.records(ranks)
            yield from (rank for rank, record in zip(ranks, records, strict=True) if record is None)

    def heard(self, rank: int) -> None:
        """Says that a rank knows what became of the round."""
        self._store.set(f"heard/{rank}", b"")

    def await_hearing(self, size: int, seconds: float) -> None:
        """Returns when all who came know what became of it, or the time is over."""
        missing = {*self.missing(size)}
        self._store.wait([f"heard/{rank}" for rank in range(size) if rank not in missing], seconds)


def _enter(store: SignedStore, me: Record) -> Round:
    """The first round, from this rank's next on, that did not end before it came."""
    number, last = 1, None
    while True:
        claim = b"%d %s" % (number, me.encode())
        stored = store.compare_and_set(f"round/{me.rank}", last, claim) or claim
        if stored == claim:
            meeting = Round(store, number)
            if meeting.verdict() is None:
                return meeting
            meeting.raise_problems(me.rank)
        else:
            latest, _, other = stored.partition(b" ")
            number = int(latest)
            Round(store, number).refuse_beside(Record.decode(other), me)
        number, last = number + 1, stored


def _problem(told: str) -> bytes:
    return _PROBLEM + told.encode()


def _records(verdict: bytes) -> list[Record]:
    """The records that a verdict holds.

    Raises:
        BringUpError: it says what is wrong instead.
    """
    kind, text = verdict[:1], verdict[1:]
    if kind != _COMPLETE:
        raise BringUpError(text.decode())
    return [Record.decode(record) for record in text.split(_BETWEEN_RECORDS)]
