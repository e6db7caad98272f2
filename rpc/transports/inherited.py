"""Replaces the transport in a forked child of a worker, and refuses everything.

The real one is kept, as it is: its threads are the parent's, and what it would read,
write or close are the parent's connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NoReturn

from rpc.errors import AgentClosedError
from rpc.transports.base import Frame, Peer, Receiver, Transport
from rpc.worker_info import WorkerInfo


class InheritedTransport:
    """See the module, and ``base.Transport``.

    Args:
        name: the parent's, in its group.
        inner: the parent's transport.
    """

    inline_handlers: ClassVar[int] = 0
    inline_completions: ClassVar[int] = 0
    delivers_while_waiting: ClassVar[bool] = True

    def __init__(self, name: str, inner: Transport) -> None:
        self._name = name
        self._inner = inner

    def _refuse(self) -> NoReturn:
        raise AgentClosedError(
            f"this process was forked from worker {self._name!r}, whose calls, futures and "
            "references it cannot use; use them in the worker itself"
        )

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """Raises AgentClosedError."""
        self._refuse()

    def add_peer(self, peer: Peer) -> None:
        """Raises AgentClosedError."""
        self._refuse()

    def remove_peer(self, worker_id: int) -> None:
        """Does nothing."""

    def send(self, to: int, frame: Frame) -> None:
        """Raises AgentClosedError."""
        self._refuse()

    def look_again(self, to: int) -> None:
        """Does nothing."""

    def attend(self) -> None:
        """Does nothing."""

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Raises AgentClosedError, as nothing will come, unless ``done()``."""
        if not done():
            self._refuse()

    def wake(self) -> None:
        """Does nothing."""

    def close(self, flush_seconds: float, handler_seconds: float = 0.0) -> None:
        """Does nothing."""
