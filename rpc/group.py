"""Decides who is in the group: names, ids, lives, and who is gone. Sans-IO."""

from __future__ import annotations

from rpc.errors import UnknownWorkerError, WorkerLostError
from rpc.ids import Life
from rpc.transports.base import Peer
from rpc.worker_info import WorkerInfo


class Group:
    """The members that one worker knows of, itself included."""

    def __init__(self) -> None:
        self._by_id: dict[int, Peer] = {}
        self._by_name: dict[str, Peer] = {}
        self._lost: dict[int, str] = {}

    def add(self, peer: Peer) -> None:
        """A worker joined, or returned in a new life."""
        self._by_id[peer.info.id] = peer
        self._by_name[peer.info.name] = peer
        self._lost.pop(peer.info.id, None)

    def lose(self, worker_id: int, reason: str) -> WorkerLostError | None:
        """A worker is gone; None if that is no news. Returns the error its callers get."""
        peer = self._by_id.get(worker_id)
        if peer is None or worker_id in self._lost:
            return None
        self._lost[worker_id] = reason
        return self._error(peer, reason)

    def find(self, to: WorkerInfo | str | int) -> WorkerInfo:
        """Resolves a destination as users write it.

        Raises:
            UnknownWorkerError: no such worker.
            WorkerLostError: the worker is gone.
            ValueError: ``to`` is neither a ``WorkerInfo``, a name nor an id.
        """
        if isinstance(to, WorkerInfo):
            peer = self._by_id.get(to.id)
            missing = f"id {to.id}"
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
            )
        if peer is None:
            known = ", ".join(sorted(self._by_name))
            raise UnknownWorkerError(
                f"could not find destination {missing}; the group has: {known}"
            )
        reason = self._lost.get(peer.info.id)
        if reason is not None:
            raise self._error(peer, reason)
        return peer.info

    def knows(self, to: str | int) -> bool:
        """True if a worker of this name or id is or was a member."""
        return to in self._by_name or to in self._by_id

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
        return Life(worker_id, self.peer(worker_id).incarnation)

    def lost_error(self, worker_id: int) -> WorkerLostError | None:
        """The error to give to callers of a worker that is gone; None if it lives."""
        reason = self._lost.get(worker_id)
        return None if reason is None else self._error(self._by_id[worker_id], reason)

    def living(self) -> list[WorkerInfo]:
        """The members that are not lost, by id."""
        return [p.info for i, p in sorted(self._by_id.items()) if i not in self._lost]

    @staticmethod
    def _error(peer: Peer, reason: str) -> WorkerLostError:
        return WorkerLostError(peer.info.name, peer.incarnation, reason)
