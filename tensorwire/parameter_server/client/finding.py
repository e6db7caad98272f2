"""Finds the present lives of servers, given their names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

import rpc
from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.messaging.calling import own_incarnation

_SECONDS_TO_ANSWER: Final = 30.0
_SHORTEST: Final = 0.05
_LONGEST_PAUSE: Final = 0.5


def worker_names(where: str, servers: Sequence[str]) -> list[str]:
    """The argument ``servers`` of the function ``where``, if it is a list of names."""
    is_list = isinstance(servers, Iterable) and not isinstance(servers, (str, bytes))
    if not is_list or not all(isinstance(each, str) for each in servers):
        raise TypeError(f"{where}: servers={servers!r} must be a list of names of workers")
    names = list(servers)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"{where}: servers={names!r} must be at least one name, each once")
    return names


def present_life(worker: extend.Worker, name: str) -> Server:
    """The present life of a server, which it says itself."""
    try:
        worker.life_of(name)  # who was never there is not waited for
        return _asked(name, _SECONDS_TO_ANSWER)
    except rpc.RpcError as error:
        raise errors.ParameterServerError(f"server {name!r} is not in the group") from error


def lives_to_come(worker: extend.Worker, names: Sequence[str], timeout: float) -> list[Server]:
    """As :func:`present_life`, for servers that may be yet to come.

    What this worker has heard of one may be about a former life of that name.

    Raises:
        TimeoutError: one of them does not come.
    """
    deadline = time.monotonic() + timeout
    try:
        return [_life_to_come(worker, name, deadline) for name in names]
    except TimeoutError as error:
        present = ", ".join(sorted(each.name for each in rpc.workers()))
        raise TimeoutError(
            f"connect: server {error} did not come into the group within {timeout:g} s; "
            f"in it are {present}"
        ) from error


def _life_to_come(worker: extend.Worker, name: str, deadline: float) -> Server:
    changed = threading.Event()
    forget = worker.on_membership(lambda _: changed.set())
    try:
        while True:
            changed.clear()
            left = deadline - time.monotonic()
            try:
                return _asked(name, max(left, _SHORTEST))
            except (rpc.UnknownWorkerError, rpc.WorkerLostError, rpc.RpcTimeoutError) as error:
                if left < 0:
                    raise TimeoutError(repr(name)) from error
            changed.wait(min(max(left, 0), _LONGEST_PAUSE))
    finally:
        forget()


def _asked(name: str, timeout: float) -> Server:
    return Server(name, rpc.rpc_sync(name, own_incarnation, timeout=timeout))
