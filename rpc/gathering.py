"""Every worker gives an object, every worker gets all of them; and barriers, which give none.

Owns which gatherings are under way on one agent. The worker whose name sorts
first collects: the others bring it their objects and it brings them the
result. Successive gatherings of the same workers are told apart by a number
that each worker counts for itself.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.current import current_agent
from rpc.errors import RpcTimeoutError
from rpc.executor import blocking

if TYPE_CHECKING:
    from rpc.agent import Agent


@dataclass(frozen=True, slots=True)
class GatheringId:
    """Which gathering is meant: of whom, and the how manieth of theirs."""

    names: tuple[str, ...]
    number: int

    @property
    def leader(self) -> str:
        """The worker that collects."""
        return self.names[0]


@dataclass(slots=True)
class AllGatherStates:
    """One gathering on one worker; the names are the original's.

    Args:
        gathered_objects: what was given so far, by the name of the worker.
        proceed_signal: set when all have given.
    """

    gathered_objects: dict[str, Any] = field(default_factory=dict)
    proceed_signal: threading.Event = field(default_factory=threading.Event)


class Gatherings:
    """The gatherings under way on one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self._open: defaultdict[GatheringId, AllGatherStates] = defaultdict(AllGatherStates)

    def next_id(self, names: tuple[str, ...]) -> GatheringId:
        """Identifies this worker's next gathering with these workers."""
        with self._lock:
            number = self._numbers[names]
            self._numbers[names] += 1
        return GatheringId(names, number)

    def bring(self, which: GatheringId, name: str, obj: Any) -> None:
        """At the leader: ``name`` has given its object."""
        with self._lock:
            gathering = self._open[which]
            gathering.gathered_objects[name] = obj
            complete = len(gathering.gathered_objects) == len(which.names)
        if complete:
            gathering.proceed_signal.set()

    def complete(self, which: GatheringId, objects: dict[str, Any]) -> None:
        """At the others: the leader has all objects."""
        with self._lock:
            gathering = self._open[which]
        gathering.gathered_objects = objects
        gathering.proceed_signal.set()

    def wait(self, which: GatheringId, timeout: float | None) -> dict[str, Any]:
        """Waits until all objects are there; ``timeout`` in seconds.

        Raises:
            RpcTimeoutError: names those that were missing.
        """
        with self._lock:
            gathering = self._open[which]
        with blocking():
            if not gathering.proceed_signal.wait(timeout):
                missing = [name for name in which.names if name not in gathering.gathered_objects]
                raise RpcTimeoutError(_timed_out(missing, timeout or 0.0, "they did not come"))
        return gathering.gathered_objects

    def close(self, which: GatheringId) -> None:
        """Forgets a gathering."""
        with self._lock:
            self._open.pop(which, None)


def all_gather(
    obj: Any, worker_names: Collection[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Gives ``obj`` and returns what every worker gave, by name.

    All the workers named have to call this, with the same names.

    Args:
        obj: this worker's.
        worker_names: who takes part; default all.
        timeout: seconds for each message and each wait; 0 for no limit. By
            default each message has the default timeout, and waits have none.

    Raises:
        RpcTimeoutError: the others did not come, or do not answer.
    """
    agent = current_agent()
    everyone = worker_names or [worker.name for worker in agent.get_worker_infos()]
    which = agent.gatherings.next_id(tuple(sorted(set(everyone))))
    limit = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
    patience = None if timeout == UNSET_RPC_TIMEOUT else timeout or None
    me = agent.info.name
    try:
        if me == which.leader:
            agent.gatherings.bring(which, me, obj)
        else:
            agent.rpc_sync(which.leader, take_object, (which, me, obj), None, limit)
        objects = agent.gatherings.wait(which, patience)
        if me == which.leader:
            _distribute(agent, which, objects, limit)
    finally:
        agent.gatherings.close(which)
    return objects


def barrier(worker_names: Collection[str]) -> None:
    """Returns when all the workers named have called this."""
    all_gather(None, worker_names)


def _distribute(agent: Agent, which: GatheringId, objects: dict[str, Any], timeout: float) -> None:
    answers = {
        name: agent.rpc_async(name, take_objects, (which, objects), None, timeout)
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
        raise RpcTimeoutError(_timed_out(list(errors), timeout, str(first))) from first


def _timed_out(names: list[str], timeout: float, reason: str) -> str:
    return f"Followers {names} timed out in _all_gather after {timeout:.2f} seconds: {reason}"


def take_object(which: GatheringId, name: str, obj: Any) -> None:
    """At the leader: takes another worker's object."""
    current_agent().gatherings.bring(which, name, obj)


def take_objects(which: GatheringId, objects: dict[str, Any]) -> None:
    """At the others: takes the result."""
    current_agent().gatherings.complete(which, objects)
