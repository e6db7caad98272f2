"""Every worker gives an object, every worker gets all of them; and barriers, which give none.

Owns which gatherings are under way on one worker. The worker whose name sorts
first collects: the others bring it their objects and it brings them the
result, or says why there is none. Successive gatherings of the same lives of
the same workers are told apart by a number that each worker counts for itself.

None waits for somebody who is gone: the leader ends a gathering when one who
has not come yet is lost, or whoever it is if the leader itself has not, the others
when the leader is. None waits for somebody who has given a gathering up and tries again.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rpc.calls.caller import Caller
from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.current import current_agent
from rpc.errors import (
    AgentClosedError,
    CallCancelledError,
    RpcError,
    RpcTimeoutError,
    WorkerLostError,
)
from rpc.group.directory import Directory
from rpc.group.members import Group
from rpc.ids import Life
from rpc.outcomes.completions import Completions
from rpc.runtime import deadlines
from rpc.runtime.deadlines import Timeouts
from rpc.runtime.executor import blocking
from rpc.worker_info import WorkerInfo

Members = tuple[tuple[str, Life], ...]
"""The workers that take part, sorted by name."""


@dataclass(frozen=True, slots=True)
class GatheringId:
    """Names a gathering: by its workers, and its number among theirs."""

    members: Members
    number: int

    @property
    def leader(self) -> str:
        """The worker that collects."""
        return self.members[0][0]

    @property
    def names(self) -> list[str]:
        """The names of those who take part."""
        return [name for name, _ in self.members]


@dataclass(slots=True)
class AllGatherStates:
    """One gathering on one worker; the names are the original's, but for the last.

    Args:
        gathered_objects: what was given so far, by the name of the worker.
        proceed_signal: set when all have given, or it failed.
        error: why it failed.
    """

    gathered_objects: dict[str, Any] = field(default_factory=dict)
    proceed_signal: threading.Event = field(default_factory=threading.Event)
    error: RpcError | None = None


class Gatherings:
    """The gatherings under way on one worker.

    Args:
        me: the worker.
        group: the workers that it knows.
        completions: runs what may take long.
        caller: makes the calls.
        directory: finds the workers that are named.
        timeouts: how long all may take.
    """

    def __init__(
        self,
        me: WorkerInfo,
        group: Group,
        completions: Completions,
        caller: Caller,
        directory: Directory,
        timeouts: Timeouts,
    ) -> None:
        self._me = me
        self._group = group
        self._completions = completions
        self._caller = caller
        self._directory = directory
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._numbers: defaultdict[Members, int] = defaultdict(int)
        self._open: defaultdict[GatheringId, AllGatherStates] = defaultdict(AllGatherStates)
        self._failures: dict[Members, RpcError] = {}  # the latest, for those who come late
        self._wanted: defaultdict[Members, dict[str, int]] = defaultdict(dict)
        """The oldest gathering that each still takes part in, at the leader."""
        self._closed: RpcError | None = None

    def all_gather(
        self, obj: Any, worker_names: Collection[str] | None, timeout: float
    ) -> dict[str, Any]:
        """Gives ``obj`` and returns what every worker gave; see :func:`all_gather`."""
        members = self._members(worker_names, timeout)
        limit, patience = timeout, timeout
        if timeout == UNSET_RPC_TIMEOUT:
            limit, patience = self._timeouts.default, 0.0
        patience = self._timeouts.of(patience)
        me = self._me.name
        which, gathering = self.begin(members)
        try:
            if me == which.leader:
                self.bring(which, me, obj)
            else:
                brought = (which, me, obj, self.oldest(which))
                self._caller.rpc_sync(which.leader, take_object, brought, None, limit)
            objects = self.wait(which, gathering, patience)
            if me == which.leader:
                self._distribute(which, objects, limit)
        finally:
            self.over(which)
        return objects

    def _members(self, worker_names: Collection[str] | None, timeout: float) -> Members:
        if isinstance(worker_names, str):
            raise TypeError(
                f"worker_names={worker_names!r} is one name; give a collection of names"
            )
        if worker_names:
            names = sorted(set(worker_names))
            who = [self._directory.find(name, timeout) for name in names]
        else:
            who = sorted(self._group.living(), key=lambda worker: worker.name)
        if self._me not in who:
            raise ValueError(
                f"worker_names={[worker.name for worker in who]} lacks {self._me.name!r}, which "
                "calls this: all the workers named have to call it, and no others"
            )
        return tuple((worker.name, self._group.life(worker.id)) for worker in who)

    def _distribute(self, which: GatheringId, objects: dict[str, Any], timeout: float) -> None:
        answers = {
            name: self._caller.rpc_async(name, take_objects, (which, objects), None, timeout)
            for name in which.names[1:]
        }
        errors: dict[str, Exception] = {}
        for name, answer in answers.items():
            try:
                answer.wait()
            except RuntimeError as error:
                errors[name] = error
        if errors:
            first = next(iter(errors.values()))
            if isinstance(first, RpcTimeoutError):
                raise _followers_timed_out(list(errors), timeout, str(first)) from first
            raise first

    def begin(self, members: Members) -> tuple[GatheringId, AllGatherStates]:
        """Enters this worker into the next gathering of these; :meth:`over` must follow."""
        with self._lock:
            if self._closed is not None:
                raise copy(self._closed)
            which = GatheringId(members, self._numbers[members])
            self._numbers[members] += 1
            return which, self._open[which]

    def oldest(self, which: GatheringId) -> int:
        """The number of the first gathering of the same that this worker still takes part in."""
        with self._lock:
            open_ = [each.number for each in self._open if each.members == which.members]
            return min(open_, default=which.number)

    def bring(self, which: GatheringId, name: str, obj: Any, oldest: int = 0) -> None:
        """Takes, at the leader, the object that ``name`` gives.

        Args:
            which: to which gathering.
            name: of the worker.
            obj: the object.
            oldest: it has given up those before, to which the leader may never come.

        Raises:
            RpcError: the gathering failed before that; the error says why.
        """
        let_go: list[Any] = []  # until the lock is free, as their end may run code
        with self._lock:
            self._require_open(which)
            let_go += self._given_up(which.members, name, oldest)
            gathering = self._open[which]
            gathering.gathered_objects[name] = obj
            if len(gathering.gathered_objects) == len(which.members):
                gathering.proceed_signal.set()
                return
            gone = self._lost_before_they_came(which, gathering) or self._left_before_all_came(
                which, gathering
            )
        if gone is not None:
            self.fail(which, gone)
            raise copy(gone)

    def complete(self, which: GatheringId, objects: dict[str, Any]) -> None:
        """Takes, at the others, all objects from the leader.

        Raises:
            RpcError: this worker did not wait for that any more.
        """
        with self._lock:
            if which not in self._open:
                raise RpcError(f"{self._me.name!r} gave the _all_gather up before that")
            gathering = self._open[which]
            gathering.gathered_objects = objects
            gathering.proceed_signal.set()

    def wait(
        self, which: GatheringId, gathering: AllGatherStates, timeout: float
    ) -> dict[str, Any]:
        """Waits until all objects are there; ``timeout`` in seconds, 0 for none.

        Raises:
            RpcTimeoutError: names those that were missing.
            WorkerLostError: one that was waited for is gone.
            AgentClosedError: this worker shut down.
            CallCancelledError: nobody waits for the handler that this is called in.
        """
        cancelled = CallCancelledError("_all_gather: the caller of this handler gave it up")
        forget = deadlines.when_cancelled(partial(self.fail, which, cancelled))
        try:
            with blocking():
                if not gathering.proceed_signal.wait(timeout or None):
                    self.fail(which, self._timed_out(which, gathering, timeout))
        finally:
            forget()
        if gathering.error is not None:
            raise copy(gathering.error)
        return gathering.gathered_objects

    def fail(self, which: GatheringId, error: RpcError) -> None:
        """Ends a gathering that is not complete; the leader tells those who came."""
        with self._lock:
            gathering = self._open.get(which)
            if gathering is None or gathering.proceed_signal.is_set():
                return
            self._open.pop(which)
            gathering.error = error
            gathering.proceed_signal.set()
            me = self._me.name
            if which.leader != me:
                return
            told = error
            if not isinstance(error, RpcTimeoutError | WorkerLostError):
                told = RpcError(f"_all_gather: the leader {me!r} gave up: {error}")
            self._failures[which.members] = told
            came = [name for name in gathering.gathered_objects if name != me]
        if came:
            self._completions.submit(lambda: self._tell(which, came, told))

    def over(self, which: GatheringId) -> None:
        """Notes that this worker has left a gathering, whatever came of it."""
        self.fail(which, RpcError("its wait was ended"))
        with self._lock:
            self._open.pop(which, None)

    def worker_lost(self, life: Life, error: WorkerLostError) -> None:
        """Fails what would wait for a life of a worker that is over."""
        me = self._me.name
        with self._lock:
            failed = [
                which
                for which, gathering in self._open.items()
                for name, member in which.members
                if member == life
                and me != name
                and (which.leader == name or which.leader == me)
                and (name not in gathering.gathered_objects or not self._has_begun(which))
            ]
        for which in failed:
            self.fail(which, error)
        with self._lock:
            for of_members in (self._numbers, self._failures, self._wanted):
                for members in [m for m in of_members if any(life == who for _, who in m)]:
                    del of_members[members]

    def close(self, reason: str) -> None:
        """Fails those under way and refuses further ones."""
        with self._lock:
            self._closed = AgentClosedError(f"_all_gather: {reason}")
            under_way = list(self._open)
        for which in under_way:
            self.fail(which, self._closed)

    def _tell(self, which: GatheringId, names: list[str], error: RpcError) -> None:
        for name in names:
            with suppress(RpcError):  # of who is gone, or as this worker is closing
                self._caller.rpc_async(name, take_failure, (which, error))

    def _given_up(self, members: Members, name: str, oldest: int) -> Iterator[Any]:
        """Notes which gatherings a worker has left; takes back what it gave to those not begun.

        Needs the lock.
        """
        wanted = self._wanted[members]
        wanted[name] = max(oldest, wanted.get(name, 0))
        left = [w for w in self._open if w.members == members and w.number < oldest]
        for which in left:
            if self._has_begun(which):
                continue
            objects = self._open[which].gathered_objects
            yield objects.pop(name, None)
            if not objects:
                del self._open[which]

    def _has_begun(self, which: GatheringId) -> bool:
        """True if this worker itself has come. Needs the lock."""
        return which.number < self._numbers.get(which.members, 0)

    def _require_open(self, which: GatheringId) -> None:
        """Raises if this worker cannot go on waiting for a gathering. Needs the lock."""
        if self._closed is not None:
            raise copy(self._closed)
        if which in self._open or not self._has_begun(which):
            return
        failure = self._failures.get(which.members)
        if failure is None:
            failure = RpcError(f"this _all_gather of {which.names} is over")
        raise copy(failure)

    def _lost_before_they_came(
        self, which: GatheringId, gathering: AllGatherStates
    ) -> RpcError | None:
        group = self._group
        for name, life in which.members:
            if name not in gathering.gathered_objects and not group.has(life):
                lost = group.lost_error(life.worker)
                return lost or WorkerLostError(name, life.incarnation, "it was replaced")
        return None

    def _left_before_all_came(
        self, which: GatheringId, gathering: AllGatherStates
    ) -> RpcError | None:
        """The error if a missing worker has given this one up and waits in a later one."""
        left = [
            name
            for name, oldest in self._wanted[which.members].items()
            if oldest > which.number and name not in gathering.gathered_objects
        ]
        if not left:
            return None
        return RpcError(f"_all_gather: {left} gave this one up before all had come, and try again")

    def _timed_out(
        self, which: GatheringId, gathering: AllGatherStates, timeout: float
    ) -> RpcTimeoutError:
        if which.leader != self._me.name:
            return RpcTimeoutError(
                f"_all_gather: the leader {which.leader!r} did not bring the result within "
                f"{timeout:.2f} seconds; it does when every one of {which.names} has come"
            )
        missing = [name for name in which.names if name not in gathering.gathered_objects]
        return _followers_timed_out(missing, timeout, "they did not come")


def all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gives ``obj`` and returns what every worker gave, by name.

    All the workers named have to call this, with the same names.

    Args:
        obj: this worker's.
        worker_names: who takes part, this worker among them; default all.
        timeout: seconds for each message and each wait; 0 for no limit. By
            default each message has the default timeout, and waits have none. In a
            handler, the caller's deadline holds in any case.

    Raises:
        RpcTimeoutError: the others did not come, or do not answer.
        WorkerLostError: one that has not come is gone, or did not get the result.
        UnknownWorkerError: there is no worker of one of the names.
        ValueError: this worker's name is not among those given.
    """
    return _here().all_gather(obj, worker_names, timeout)


def barrier(worker_names: Collection[str]) -> None:
    """Returns when all the workers named have called this."""
    all_gather(None, worker_names)


def _here() -> Gatherings:
    gatherings: Gatherings = current_agent().gatherings
    return gatherings


def _followers_timed_out(names: list[str], timeout: float, reason: str) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"Followers {names} timed out in _all_gather after {timeout:.2f} seconds: {reason}"
    )


def take_object(which: GatheringId, name: str, obj: Any, oldest: int) -> None:
    """Takes another worker's object, at the leader."""
    _here().bring(which, name, obj, oldest)


def take_objects(which: GatheringId, objects: dict[str, Any]) -> None:
    """Takes the result, at the others."""
    _here().complete(which, objects)


def take_failure(which: GatheringId, error: RpcError) -> None:
    """Takes the leader's news, at the others, that it gave up."""
    _here().fail(which, error)
