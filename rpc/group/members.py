"""Decides who is in the group: names, ids, lives, and who is gone. No I/O; any thread may ask."""

from __future__ import annotations

import threading
from copy import copy

from rpc.errors import UnknownWorkerError, WorkerLostError
from rpc.ids import Life
from rpc.transports.base import Peer
from rpc.wire import torch_objects
from rpc.worker_info import WorkerInfo


class Group:
    """The members that one worker knows of, itself included.

    Attributes:
        version: counts the changes.
        reachable: those that are not lost, by name and by id; asked without a lock.
        living_now: which life they are in, by id; asked without a lock.
    """

    def __init__(self) -> None:
        self.version = 0
        self.reachable: dict[str | int, WorkerInfo] = {}
        self._lock = threading.Lock()
        self._by_id: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._lost: dict[int, WorkerLostError] = {}
        self._expelled: WorkerLostError | None = None
        self.living_now: dict[int, Life] = {}  # asked without the lock, so one look must do

    def add(self, peer: Peer) -> bool:
        """Adds a worker that joined, or returned in a new life; its id may have been another's.

        Returns:
            False if this worker was declared lost: who joins knows it for no member, and would
            answer nothing.
        """
        with self._lock:
            if self._expelled is not None:
                return False
            former = self._by_id.get(peer.info.id)
            if former is not None and self._by_name.get(former.info.name) is former:
                del self._by_name[former.info.name]
                self.reachable.pop(former.info.name, None)
            self._by_id[peer.info.id] = peer
            self._by_name[peer.info.name] = peer
            self.reachable[peer.info.id] = self.reachable[peer.info.name] = peer.info
            self._lost.pop(peer.info.id, None)
            self.living_now[peer.info.id] = peer.life
            self.version += 1
            return True

    def lose(
        self, life: Life, reason: str, kind: type[WorkerLostError] = WorkerLostError
    ) -> WorkerLostError | None:
        """Marks a worker's life as over.

        Args:
            life: which.
            reason: what was observed.
            kind: of the error that its callers get.

        Returns:
            The error its callers get; None if that is no news, or of another life than the
            member's.
        """
        with self._lock:
            peer = self._by_id.get(life.worker)
            if peer is None or life.worker in self._lost or life.incarnation != peer.incarnation:
                return None
            error = kind(peer.info.name, peer.incarnation, reason)
            self._lost[life.worker] = error
            del self.living_now[life.worker]
            self._forget_way(peer)
            self.version += 1
            return copy(error)

    def expel(self, me: int, reason: str) -> tuple[WorkerLostError, list[Life]]:
        """Marks all others as gone to worker ``me``, this one, which they declared lost.

        Returns:
            The error that calls to any of them get, which names this worker, and who is
            gone only now.
        """
        with self._lock:
            here = self._by_id[me]
            error = WorkerLostError(here.info.name, here.incarnation, reason)
            self._expelled = self._expelled or error
            others = [i for i in sorted(self._by_id) if i != me]
            self._lost.update(dict.fromkeys(others, error))
            gone = [self.living_now.pop(i) for i in others if i in self.living_now]
            for other in others:
                self._forget_way(self._by_id[other])
            self.version += 1
            return copy(error), gone

    def _forget_way(self, peer: Peer) -> None:
        """Removes the way to a worker that was lost. Needs the lock."""
        self.reachable.pop(peer.info.id, None)
        if self._by_name.get(peer.info.name) is peer:
            self.reachable.pop(peer.info.name, None)

    def find(self, to: WorkerInfo | str | int) -> WorkerInfo:
        """Resolves a destination as users write it.

        Raises:
            UnknownWorkerError: no such worker.
            WorkerLostError: the worker is gone, or this one was declared lost.
            ValueError: ``to`` is neither a ``WorkerInfo``, a name nor an id.
        """
        if isinstance(to, WorkerInfo):
            peer = self._by_id.get(to.id)
            missing = f"id {to.id}"
            if peer is not None and peer.info is not to and peer.info != to:
                missing = f"{to}, as {peer.info.name} has that id"
                peer = None
        elif isinstance(to, str):
            peer = self._by_name.get(to)
            missing = f"name {to}"
        elif isinstance(to, int) and not isinstance(to, bool):
            peer = self._by_id.get(to)
            missing = f"id {to}"
        else:
            raise ValueError(
                f"Cannot get WorkerInfo from {to!r}: "
                "a destination is a WorkerInfo, a worker's name or its id"
                f"{torch_objects.import_remedy(to)}"
            )
        if peer is None and self._expelled is not None:
            raise copy(self._expelled)
        if peer is None:
            known = ", ".join(sorted(self._by_name))
            raise UnknownWorkerError(
                f"could not find destination {missing}; the group has: {known}"
            )
        if peer.info.id in self._lost:
            raise copy(self._lost[peer.info.id])
        return peer.info

    def knows(self, to: str | int) -> bool:
        """True if a worker of this name or id is or was a member."""
        return to in self._by_name or to in self._by_id

    def lives(self, who: str | int) -> bool:
        """True if a worker of this name or id is a member that is not lost."""
        peer = self._by_name.get(who) if isinstance(who, str) else self._by_id.get(who)
        return peer is not None and peer.info.id not in self._lost

    def has(self, life: Life) -> bool:
        """True if this life of a worker is a member's, and not over."""
        return self.living_now.get(life.worker) == life

    def peer(self, worker_id: int) -> Peer:
        """A member, living or lost, by id.

        Raises:
            UnknownWorkerError: no such worker.
        """
        try:
            return self._by_id[worker_id]
        except KeyError:
            raise UnknownWorkerError(f"could not find destination id {worker_id}") from None

    def life(self, worker_id: int) -> Life:
        """The latest life of a worker.

        Raises:
            UnknownWorkerError: no such worker.
        """
        return self.living_now.get(worker_id) or self.peer(worker_id).life

    def lost_error(self, worker_id: int) -> WorkerLostError | None:
        """The error to give to callers of a worker that is gone; None if it lives."""
        error = self._lost.get(worker_id)
        return None if error is None else copy(error)

    def living(self) -> list[WorkerInfo]:
        """The members that are not lost, by id."""
        return [p.info for i, p in sorted(self._by_id.items()) if i not in self._lost]

    def latest(self, worker_id: int) -> Peer | None:
        """The latest life of a worker, living or lost; None if there never was one."""
        return self._by_id.get(worker_id)
