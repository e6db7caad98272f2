"""Calls among servers and clients of one cluster: an answer, or ``LOST``."""

from __future__ import annotations

import enum
import importlib
import logging
from collections.abc import Callable
from typing import Final

import torch

import rpc
from rpc import extend
from tensorwire.parameter_server.decisions.lives import CUT_OFF, Latest, Verdict, verdict
from tensorwire.parameter_server.decisions.views import Client, Server
from tensorwire.parameter_server.messaging.messages import Exchange, Message
from tensorwire.parameter_server.opaque import Function, Response

_logger: Final = logging.getLogger("tensorwire")
_SERVER: Final = "tensorwire.parameter_server.server.host"


class Gone(enum.Enum):
    """Returned instead of an answer."""

    LOST = enum.auto()
    """The callee is gone, or this worker is leaving."""


LOST: Final = Gone.LOST


class Caller:
    """Calls of one worker in one cluster.

    Args:
        worker: the worker.
        cluster: the cluster's name.
    """

    def __init__(self, worker: extend.Worker, cluster: str) -> None:
        self._worker = worker
        self._cluster = cluster
        self._open: set[rpc.Future[Response]] = set()
        self._has_given_up = False

    def call(self, to: Server, message: Message, then: Callable[[object], object]) -> None:
        """Calls a server; ``then`` gets its answer, or ``LOST``, on some thread."""
        function = _function_for(message)
        self._call(to.name, function, (self._cluster, to.incarnation, message), then)

    def _call(
        self,
        to: str,
        function: Function,
        args: tuple[object, ...],
        then: Callable[[object], object],
    ) -> None:
        try:
            future = rpc.rpc_async(to, function, args=args, timeout=0)
        except rpc.RpcError as error:
            _note(error)
            then(LOST)
            return

        def done(future: rpc.Future[Response]) -> None:
            then(_answer_of(future))

        future.add_done_callback(done)
        self._keep(future)

    def _keep(self, future: rpc.Future[Response]) -> None:
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._has_given_up:
            future.cancel()

    def ask_trainer(
        self, to: Server, suspects: frozenset[Server], then: Callable[[object], object]
    ) -> None:
        """Asks a trainer if these lives are lost to it, too; ``then`` gets a bool, or ``LOST``."""
        self._call(to.name, are_lost_here, (to.incarnation, suspects), then)

    def look_for(self, life: Server) -> None:
        """Calls a worker whose answer does not matter: if it is lost, the group says so then."""
        try:
            future = rpc.rpc_async(life.name, own_incarnation)
        except rpc.RpcError as error:
            _note(error)
            return
        self._keep(future)

    def give_up(self) -> None:
        """Gives up all calls, now and from now on: a server may keep one for ever."""
        self._has_given_up = True
        for future in list(self._open):
            future.cancel()


def _function_for(message: Message) -> Function:
    """The function that takes a message; metrics and traces tell calls apart by its name."""
    if type(message) is not Exchange:
        return handle
    return pull if message.push is None else push


def _answer_of(future: torch.futures.Future[Response]) -> Response:
    try:
        return future.value()
    except rpc.RpcError as error:
        _note(error)
        return LOST


def _note(error: rpc.RpcError) -> None:
    expected = (rpc.WorkerLostError, rpc.UnknownWorkerError, rpc.AgentClosedError,
                rpc.CallCancelledError)  # fmt: skip
    if not isinstance(error, expected):
        _logger.error("a call of the parameter server failed: %s", error)


def latest_life(worker: extend.Worker, name: str) -> Latest | None:
    """The latest life of a worker that this one has heard of; None if of none."""
    try:
        return Latest(worker.life_of(name).incarnation, True)
    except rpc.WorkerLostError as error:
        mine = error.name == name  # else the group has expelled this worker
        is_proven = isinstance(error, rpc.WorkerLeftError) or error.has_ended
        return Latest(error.incarnation, False, is_proven) if mine else CUT_OFF
    except rpc.UnknownWorkerError:
        return None


def verdict_on(worker: extend.Worker, life: Server | Client) -> Verdict:
    """Says whether a life is over, as far as ``worker`` has heard."""
    server = Server(life.name, life.incarnation)
    return verdict(server, latest_life(worker, life.name))


def own_incarnation() -> int:
    """Returns, at any worker, which life of its name that is."""
    return extend.worker().life.incarnation


def are_lost_here(incarnation: int, suspects: frozenset[Server]) -> bool:
    """Says, at a trainer, if all of these lives are lost to it; not if it is another life."""
    worker = extend.worker()
    all_lost = all(verdict_on(worker, each) is Verdict.OVER for each in suspects)
    return worker.life.incarnation == incarnation and all_lost


@rpc.functions.async_execution
def handle(cluster: str, incarnation: int, message: Message) -> torch.futures.Future[Response]:
    """Takes, at a server, a message for that life of it.

    Args:
        cluster: the cluster's name.
        incarnation: of the server that is meant.
        message: one of ``messages``.
    """
    future: torch.futures.Future[Response] = torch.futures.Future()
    server = importlib.import_module(_SERVER)  # by name: a trainer never imports it
    server.host().take(cluster, incarnation, future, message)
    return future


@rpc.functions.async_execution
def push(cluster: str, incarnation: int, message: Exchange) -> torch.futures.Future[Response]:
    """Takes, at a server, a push, and the pull in the same message; see :func:`handle`."""
    return handle(cluster, incarnation, message)


@rpc.functions.async_execution
def pull(cluster: str, incarnation: int, message: Exchange) -> torch.futures.Future[Response]:
    """Takes, at a server, a pull that comes alone; see :func:`handle`."""
    return handle(cluster, incarnation, message)
