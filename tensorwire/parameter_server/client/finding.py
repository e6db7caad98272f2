"""Finds the present lives of servers, given their names."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

import rpc
from rpc import extend
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.messaging.calling import own_incarnation

_logger: Final = logging.getLogger("tensorwire")
_SECONDS_TO_ANSWER: Final = 30.0
_SHORTEST: Final = 0.05
_LONGEST_PAUSE: Final = 0.5


def role_or_names(where: str, servers: Sequence[str] | str) -> tuple[str, list[str]]:
    """Reads the argument ``servers`` of the function ``where``: a role, or a list of names.

    Returns:
        The role, empty if names are given; the names, of a role those that had been started by
        the time this worker was, and those that are there.

    Raises:
        TypeError: it is neither.
        ValueError: there is no such role, or a name is there twice.
    """
    if not isinstance(servers, str):
        return "", worker_names(where, servers)
    roles = extend.JobRoles.of(os.environ).roles
    if roles and servers not in roles:
        raise ValueError(
            f"{where}: servers={servers!r} is no role of this job; its roles are {', '.join(roles)}"
        )
    started = roles[servers].started if servers in roles else 0
    names = {f"{servers}:{number}" for number in range(started)} | {*role_members(servers)}
    if not names:
        raise ValueError(
            f"{where}: there is no worker of a role servers={servers!r}, such as '{servers}:0', in "
            "the group; give the servers' names, as ['ps0', 'ps1']"
        )
    return servers, sorted(names, key=_number)


def role_of(servers: Iterable[Server]) -> str:
    """The role of servers, for whoever names no others.

    Raises:
        ValueError: they are of several roles, or of none.
    """
    names = [server.name for server in servers]
    roles = {name.rpartition(":")[0] for name in names}
    if len(roles) != 1 or roles == {""}:
        raise ValueError(
            f"resize: the servers {', '.join(names)} are not of one role, as 'ps:0' and 'ps:1' "
            "are; give the names of those that are to keep everything"
        )
    return roles.pop()


def most_servers(role: str, names: Sequence[str]) -> int:
    """The number of servers that there can be: those named, or as many as the role can have."""
    roles = extend.JobRoles.of(os.environ).roles
    return max(len(names), roles[role].most) if role in roles else len(names)


def role_members(role: str) -> list[str]:
    """The names of the workers of a role that are in the group now, by number."""
    members = [each.name for each in rpc.workers(f"{role}:") if Server(each.name, 0).is_of(role)]
    return sorted(members, key=_number)


def _number(name: str) -> int:
    return Server(name, 0).number_in_role()


def those_there(role: str) -> list[Server]:
    """The present lives of the workers of a role that answer."""
    servers = []
    for name in role_members(role):
        with contextlib.suppress(rpc.RpcError):  # it leaves just now
            servers.append(_asked(name, _SECONDS_TO_ANSWER))
    return servers


def worker_names(where: str, servers: Sequence[str]) -> list[str]:
    """Reads the argument ``servers`` of the function ``where`` as a list of names."""
    is_list = isinstance(servers, Sequence) and not isinstance(servers, (str, bytes))
    if not is_list or not all(isinstance(each, str) for each in servers):
        raise TypeError(f"{where}: servers={servers!r} must be a list of names of workers")
    names = list(servers)
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{where}: servers={names!r} must be at least one name, each once")
    return names


def lives_to_come(
    where: str, worker: extend.Worker, names: Sequence[str], timeout: float
) -> list[Server]:
    """The present lives of servers, which may be yet to come; they say it themselves.

    What this worker has heard of one may be about a former life of that name.

    Args:
        where: who asks, for the error.
        worker: this one.
        names: of the servers.
        timeout: seconds.

    Raises:
        TimeoutError: one of them does not come.
    """
    began = time.monotonic()
    deadline, log = began + timeout, extend.WaitLog(began)
    try:
        return [_life_to_come(where, worker, name, deadline, log) for name in names]
    except TimeoutError as error:
        present = ", ".join(sorted(each.name for each in rpc.workers()))
        raise TimeoutError(
            f"{where}: server {error} did not come into the group within {timeout:g} s; "
            f"in it are {present}"
        ) from error


def _life_to_come(
    where: str, worker: extend.Worker, name: str, deadline: float, log: extend.WaitLog
) -> Server:
    changed = threading.Event()
    forget = worker.on_membership(lambda _: changed.set())
    try:
        while True:
            changed.clear()
            left = deadline - time.monotonic()
            until_told = max(log.next_at() - time.monotonic(), _SHORTEST)
            try:
                return _asked(name, max(min(left, until_told), _SHORTEST))
            except (rpc.UnknownWorkerError, rpc.WorkerLostError, rpc.RpcTimeoutError) as error:
                if isinstance(error, rpc.UnknownWorkerError) and error.is_final:
                    raise
                if left < 0:
                    raise TimeoutError(repr(name)) from error
            if log.is_due(now := time.monotonic()):
                _logger.warning(
                    "%s has waited %.0f s for server %r to come into the group, and gives up in "
                    "%.0f s", where, now - log.began, name, max(deadline - now, 0.0),
                )  # fmt: skip
            changed.wait(min(max(left, 0), _LONGEST_PAUSE))
    finally:
        forget()


def _asked(name: str, timeout: float) -> Server:
    return Server(name, rpc.rpc_sync(name, own_incarnation, timeout=timeout))
