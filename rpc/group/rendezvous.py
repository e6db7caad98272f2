"""Bring-up of a static group: how its workers find each other through a c10d ``Store``.

Decides when a group is complete, and what is wrong when it is not. Connecting
to the peers found is the transports' business.

A static group meets in rounds, so that workers may shut down and meet again on
one store: a rank's n-th meeting is round n, unless that round ended without it.
Whoever sees that a round is complete, or cannot become so, writes its verdict,
for which all others wait. So a worker makes a fixed number of requests to the
store and one bulk read, and an error reaches everyone at once.

Keys, beside those of ``group_store``: ``round/RANK``, a rank's latest round and who
claims it there; ``ROUND/...`` belongs to one round.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError

from rpc.errors import BringUpError
from rpc.group.store import (
    STATIC,
    STORE,
    Record,
    disagreements,
    names_store_loss,
    our_part,
    read,
    set_mode,
    text,
    within,
)

_COMPLETE = "complete"
_SECONDS_TO_CONCLUDE = 5.0
_SECONDS_TO_STOP = 2.0
_SECONDS_TO_LOOK = 2.0
_MOST_NAMED = 8


def meet(store: Store, me: Record, timeout: float) -> list[Record]:
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
        return within(
            timeout + _SECONDS_TO_CONCLUDE,
            meeting.hold,
            meeting.given_up,
            waits_for=meeting.waits_for,
        )
    except KeyboardInterrupt:
        meeting.interrupt()
        raise


class _Meeting:
    """One worker's way through :func:`meet`."""

    def __init__(self, store: Store, me: Record, timeout: float) -> None:
        self.given_up = threading.Event()
        self._store = store
        self._me = me
        self._timeout = timeout
        self._round: _Round | None = None

    def hold(self) -> list[Record]:
        """See :func:`meet`."""
        me, deadline = self._me, time.monotonic() + self._timeout
        with names_store_loss():
            set_mode(our_part(self._store), STATIC)
            self._round = meeting = _enter(our_part(self._store), me)
            if self.given_up.is_set():
                meeting.conclude(self._interrupted())
            elif meeting.arrive(me):
                meeting.conclude(_COMPLETE)
            verdict = meeting.await_verdict(deadline)
            if verdict is None:
                verdict = meeting.conclude(meeting.describe_missing(me, self._timeout))
            if verdict != _COMPLETE:
                raise BringUpError(verdict)
            return meeting.records(range(me.world_size or 0))

    def waits_for(self) -> str:
        """Who has not come yet, for the log; asked while ``hold`` waits for them."""
        try:
            absent = within(_SECONDS_TO_LOOK, self._name_missing)
        except BringUpError:
            absent = STORE
        except RuntimeError:
            absent = "the others"
        return f"{absent}, and gives up after {self._timeout:g} s"

    def _name_missing(self) -> str:
        """On a connection of its own, as the other one waits; torch 2.6 cannot make one."""
        clone: Callable[[], Store] | None = getattr(self._store, "clone", None)
        if self._round is None:
            return STORE
        if clone is None:
            return "the others"
        size = self._me.world_size or 0
        missing = _Round(our_part(clone()), self._round.number).missing(range(size))
        first = list(itertools.islice(missing, _MOST_NAMED))
        return f"ranks {first}{' and others' if any(missing) else ''} of {size} workers"

    def interrupt(self) -> None:
        """Ends the round, for everybody, that this worker does not wait for any more."""
        if self._round is not None:
            number = self._round.number
            with contextlib.suppress(RuntimeError):
                within(_SECONDS_TO_STOP, lambda: self._conclude_elsewhere(number))

    def _conclude_elsewhere(self, number: int) -> None:
        """On a connection of its own, which torch 2.6 cannot make, as the other one waits."""
        clone: Callable[[], Store] | None = getattr(self._store, "clone", None)
        store = self._store if clone is None else clone()
        _Round(our_part(store), number).conclude(self._interrupted())

    def _interrupted(self) -> str:
        return f"{self._me} was interrupted while it waited for the others"


class _Round:
    """One attempt of a static group to form."""

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self._group = store
        self._store: Store = PrefixStore(str(number), store)

    def verdict(self) -> str | None:
        """What became of it, if that is known."""
        return text(self._store.get("verdict")) if self._store.check(["verdict"]) else None

    def conclude(self, verdict: str) -> str:
        """Writes the verdict, unless there is one; returns what it is then."""
        return text(self._store.compare_set("verdict", "", verdict))

    def await_verdict(self, deadline: float) -> str | None:
        """Returns the verdict, or None at the deadline."""
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            self._store.wait(["verdict"], left)
        except DistNetworkError:
            raise
        except RuntimeError:
            return None
        return text(self._store.get("verdict"))

    def arrive(self, me: Record) -> bool:
        """Publishes ``me`` and compares it with others; returns whether everybody is here."""
        record = me.encode().decode()
        for problem in self._problems(me, record):
            self._store.set("disagreement", problem)
            self.conclude(problem)
        self._store.set(f"record/{me.rank}", record)
        arrived: int = self._store.add("arrived", 1)
        return arrived == me.world_size

    def _problems(self, me: Record, record: str) -> Iterator[str]:
        first = Record.decode(self._store.compare_set("first", "", record))
        yield from disagreements(me, first)
        namesake = Record.decode(self._store.compare_set(f"name/{me.name}", "", record))
        if namesake.rank != me.rank:
            yield f"RPC worker name {me.name} is not unique: it is claimed by {namesake} and {me}"

    def raise_problems(self, rank: int) -> None:
        """Raises why it ended before ``rank``, whose round it is, could come.

        A latecomer shares what those who came disagreed about.
        """
        for problem in (f"claimed/{rank}", "disagreement"):
            if self._store.check([problem]):
                raise BringUpError(text(self._store.get(problem)))

    def refuse_beside(self, other: Record, me: Record) -> None:
        """Raises if ``me`` was begun before the round of its rank, ``other``'s, had ended."""
        problem = (
            f"rank {me.rank} is claimed by two processes, {other} and {me}: either both were "
            "started with this rank, or the first died while the group was forming"
        )
        if self.verdict() is None:
            self._store.compare_set(f"begun/{me.rank}", "", str(_latest_life(self._group, me.rank)))
            self._store.set(f"claimed/{me.rank}", problem)
            self.conclude(problem)
        elif me.incarnation > self._begun(me.rank):
            return
        raise BringUpError(problem)

    def _begun(self, rank: int) -> int:
        """The latest life of ``rank`` when two were seen to claim it; 0 if none were."""
        key = f"begun/{rank}"
        return int(text(self._store.get(key))) if self._store.check([key]) else 0

    def records(self, ranks: Iterable[int]) -> list[Record]:
        """The records of ``ranks``, which must be there."""
        return [Record.decode(each) for each in read(self._store, "record/", ranks)]

    def missing(self, ranks: Sequence[int]) -> Iterator[int]:
        """Those of ``ranks`` that did not come; asks little where most or few came."""
        if not ranks or self._store.check([f"record/{rank}" for rank in ranks]):
            return
        if len(ranks) == 1:
            yield ranks[0]
            return
        half = len(ranks) // 2
        yield from self.missing(ranks[:half])
        yield from self.missing(ranks[half:])

    def describe_missing(self, me: Record, timeout: float) -> str:
        """What to tell everyone when ``me`` gives up."""
        ranks = range(me.world_size or 0)
        missing = [*self.missing(ranks)]
        came = [rank for rank in ranks if rank not in missing]
        present = ", ".join(str(record) for record in self.records(came))
        return (
            f"{len(missing)} of {me.world_size} workers did not come within {timeout:g} s: "
            f"missing ranks {missing}; there were {present}"
        )


def _enter(store: Store, me: Record) -> _Round:
    """The first round, from this rank's next on, that did not end before it came."""
    record, number, last = me.encode().decode(), 1, ""
    while True:
        claim = f"{number} {record}"
        found = text(store.compare_set(f"round/{me.rank}", last, claim))
        if found == claim:
            meeting = _Round(store, number)
            if meeting.verdict() is None:
                return meeting
            meeting.raise_problems(me.rank)
        else:
            latest, _, other = found.partition(" ")
            number = int(latest)
            _Round(store, number).refuse_beside(Record.decode(other.encode()), me)
        number, last = number + 1, found


def _latest_life(store: Store, rank: int) -> int:
    """The highest incarnation that a worker of this rank has begun."""
    life: int = store.add(f"incarnation-of-rank/{rank}", 0)
    return life
