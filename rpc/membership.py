"""Keeps one worker's view of a dynamic group up to date, by asking the store.

Static groups need none of this. A thread asks the store a few times a second
whether anybody came or went; a call to a worker that is not known yet asks at
once, and waits for it. When the store is gone, nobody can join any more, which
is logged once; the workers that are there go on.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from rpc import rendezvous
from rpc.errors import BringUpError, RpcError
from rpc.rendezvous import Record
from rpc.transports.base import Peer
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.agent import Agent

_logger = logging.getLogger("rpc")
_LOOK_SECONDS = 0.1


def peer_of(record: Record) -> Peer:
    """What the transport needs to know of the worker that left this record."""
    return Peer(WorkerInfo(record.name, record.rank), record.incarnation, record.address)


class Membership:
    """One worker's membership in a dynamic group.

    Args:
        agent: the worker.
        store: where members leave their records.
        me: this worker's record.
    """

    def __init__(self, agent: Agent, store: Store, me: Record) -> None:
        self._agent = agent
        self._store = store
        self._me = me
        self._lock = threading.Lock()
        self._known: dict[int, int] = {}
        self._changes = -1
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name=f"rpc-{me.name}-membership", daemon=True
        )

    def join(self) -> None:
        """Becomes a member, learns of the others and begins to watch.

        Raises:
            BringUpError: the group does not take this worker; says why.
        """
        rendezvous.join(self._store, self._me)
        self.refresh()
        self._thread.start()

    def leave(self) -> None:
        """Ends the membership and stops watching."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            rendezvous.leave(self._store, self._me)
        except RpcError as error:
            _logger.warning("%s left, but the store could not be told: %s", self._me, error)

    def refresh(self) -> None:
        """Asks the store who is there."""
        with self._lock:
            changes = rendezvous.changes(self._store)
            if changes == self._changes:
                return
            for record in rendezvous.members(self._store):
                if self._known.get(record.rank, 0) < record.incarnation:
                    self._known[record.rank] = record.incarnation
                    self._agent.add_peer(peer_of(record))
            self._changes = changes

    def wait_for(self, who: str | int, timeout: float) -> None:
        """Returns when ``who`` is a member, or after ``timeout`` seconds (0: no limit)."""
        deadline = time.monotonic() + timeout if timeout else None
        while not self._stopping.is_set():
            self.refresh()
            if self._agent.group.knows(who):
                return
            if deadline is not None and time.monotonic() >= deadline:
                return
            self._stopping.wait(_LOOK_SECONDS)

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            try:
                self.refresh()
            except BringUpError as error:
                _logger.error("nobody can join the group any more: %s", error)
                return
