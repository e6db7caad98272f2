"""Other workers' lives as the reference protocol sees them, and this worker's ids. Sans-IO."""

from __future__ import annotations

from typing import TypeVar

from rpc.ids import GlobalId, Life, new_tuple
from rpc.protocol.reference_terms import Effect, Send
from rpc.wire.control import ControlMessage

_V = TypeVar("_V")


class Lives:
    """This worker's life and ids, and the lives of others that are over.

    Args:
        worker_id: this worker's id.
        incarnation: which life of it.
    """

    def __init__(self, worker_id: int, incarnation: int) -> None:
        self._life = Life(worker_id, incarnation)
        self._next_counter = 0
        self._lost: dict[int, int] = {}  # worker: its highest incarnation known to be over
        self._is_expelled = False

    def _new_id(self) -> GlobalId:
        counter = self._next_counter
        self._next_counter += 1
        return new_tuple(GlobalId, (*self._life, counter))

    def _is_lost(self, life: Life) -> bool:
        if self._is_expelled:
            return life != self._life
        return life.incarnation <= self._lost.get(life.worker, -1)

    def _without_lost(self, by_life: dict[Life, _V]) -> dict[Life, _V]:
        return {life: value for life, value in by_life.items() if not self._is_lost(life)}

    def _send(self, to: Life, message: ControlMessage) -> list[Effect]:
        return [] if self._is_lost(to) else [Send(to, message)]
