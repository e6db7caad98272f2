"""Lets other packages ride on calls without ``rpc`` knowing them.

An extension belongs to one agent. It may attach a few bytes of metadata to
requests and replies, look at (and on receipt replace) the tensors they carry,
wrap the running of a handler, and exchange messages of its own. Distributed
autograd, profiling and tracing are such.

The wire names an extension by the module that defines it. A worker that gets a
message for an extension it has not loaded imports that module and instantiates
its ``RPC_EXTENSION`` class, so a server need not import what its clients use.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from rpc.outcomes.futures import Future
from rpc.worker_info import WorkerInfo

AUTOGRAD = "autograd_dist"
"""The extension that runs distributed backward passes, loaded by name where one begins."""


def run_distributed_backward(
    context_id: int, roots: list[torch.Tensor], retain_graph: bool
) -> None:
    """Runs a distributed backward pass."""
    importlib.import_module(AUTOGRAD).backward(context_id, roots, retain_graph=retain_graph)


Answer = bytes | tuple[Any, ...]
"""The answer to a message of an extension: bytes, or a tuple of bytes and the tensors that go with
them.
"""


class CallExtension(Protocol):
    """Something that rides on calls. Every hook runs outside the agent's locks.

    In each hook ``tensors`` are all tensors of the value in the order the codec
    met them. Hooks on the receiving side return the list to use in their place.
    """

    name: ClassVar[str]
    """The importable module whose ``RPC_EXTENSION`` is this class."""

    def __init__(self, worker: Any) -> None:
        """Makes it for one worker; ``worker`` is its :class:`rpc.extend.Worker`."""

    def outgoing_request(self, to: int, tensors: Sequence[torch.Tensor]) -> bytes | None:
        """Runs at the caller, in the calling thread; None attaches nothing."""

    def incoming_request(
        self, sender: int, metadata: bytes, tensors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], AbstractContextManager[object] | None]:
        """Runs at the callee, in the request's own ``contextvars`` context; the handler and the
        encoding of its result run inside the returned context manager, if there is one, on
        whatever thread they are."""

    def outgoing_reply(
        self, to: int, request_metadata: bytes, tensors: Sequence[torch.Tensor]
    ) -> bytes | None:
        """Runs at the callee, inside the context manager, for a request that had metadata."""

    def incoming_reply(
        self, sender: int, request_metadata: bytes, metadata: bytes, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Runs at the caller for a reply that carries metadata."""

    def on_message(
        self, sender: int, body: bytes, tensors: list[torch.Tensor]
    ) -> Future[Answer] | Answer:
        """Handles a message of ``Worker.message`` or ``Worker.ask``; the (eventual) result
        travels back. Runs on a system thread that may block."""

    def on_worker_lost(self, worker_id: int, reason: str) -> None:
        """Releases whatever waits for, or belongs to, a lost worker."""

    def debug_info(self) -> dict[str, int]:
        """Counts worth showing in ``rpc.debug_info()``; what it raises is shown in their place."""

    def close(self) -> None:
        """Releases everything, as the agent is shutting down."""


class ObservedHandler(Protocol):
    """Looks at one handler, from before it is called until what it makes is there."""

    def ended(self, error: BaseException | None) -> None:
        """Called once, on any thread, when it returned or raised ``error``; if it returned a future
        or a coroutine, when that has.
        """


class ObservedCall(ObservedHandler, Protocol):
    """Looks at one call, from before its arguments are encoded until its result is there."""

    def sending(self) -> AbstractContextManager[object]:
        """Entered while the request is encoded and sent, on the calling thread; the extension's
        ``outgoing_request`` runs inside."""

    def replied(self) -> None:
        """The reply arrived, or it is known that none will; its value may not be decoded yet."""


class CallObserver(CallExtension, Protocol):
    """A call extension that looks at calls: their names, how long they take and how they end.

    A call costs nothing more than before in workers that have loaded none.
    """

    def call_begins(self, kind: str, name: str, to: WorkerInfo) -> ObservedCall | None:
        """Runs at the caller, on the calling thread, before anything is encoded.

        Args:
            kind: ``sync``, ``async``, ``remote``, ``to_here``, or ``message`` for one of an
                extension's.
            name: of the function, of the method as ``RRef.<name>``, or ``<extension> message``.
            to: the worker that is asked.

        Returns:
            What looks at the call; None to pass it over.
        """

    def handler_begins(self, name: str, caller: WorkerInfo) -> ObservedHandler | None:
        """Runs at the callee before the handler, in its context, and only for requests that
        carry metadata; the extension's ``incoming_request`` has run. None to pass it over."""
