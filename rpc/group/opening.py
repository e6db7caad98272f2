"""Opens the store at which a group meets, as a URL or the environment names it.

Decides which process hosts the store, who is which rank, and what is missing. Where the
store speaks the protocol of torch's ``TCPStore``, every worker is a client of it over one
connection; the one with rank 0 also hosts it, unless a launcher does.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from rpc.constants import MAX_RANK
from rpc.errors import BringUpError
from rpc.group import etcd_store
from rpc.group.host_addresses import address_on_the_way_to, describe_addresses, host_addresses
from rpc.group.own_store import OwnStore
from rpc.group.records import PREFIX
from rpc.group.signed_store import SignedStore
from rpc.group.store_host import StoreServer, open_server, warn_of_slow_resolver
from rpc.group.tcp_store import (
    SECONDS_OF_SILENCE,
    AnotherKeyError,
    NoClosedPartError,
    StoreLostError,
    TcpStoreClient,
    is_address,
    plain_host,
)

_logger = logging.getLogger("rpc")

_NOT_GIVEN: Final = "-1"
_NUMBERS: Final = {
    "rank": "this worker's rank, from 0",
    "world_size": "the number of workers, or leave it out for a dynamic group",
    "master_port": "the TCP port of the group's store",
}
_BESIDE: Final = "store"
"""The key, in torch's store, that says where the group's own is."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
_LONGEST_ATTEMPT: Final = 5.0  # seconds; to an address that swallows what it is sent
_SECONDS_TO_CONCLUDE: Final = 0.7
"""Seconds after the deadline in which a store may answer what is asked about who is missing."""


class Meeting(NamedTuple):
    """The place where a group meets, and the worker as which this process does.

    Args:
        store: the group's.
        rank: this worker's.
        world_size: how many workers there are; None in a dynamic group.
    """

    store: Store
    rank: int
    world_size: int | None


def open_store(
    init_method: str,
    rank: int,
    world_size: int | None,
    timeout: float,
    bind_address: str | None = None,
    group_key: bytes = b"",
) -> Meeting:
    """Connects to the store that ``init_method`` names; hosts it, if this is the place.

    The same URL may serve ``init_process_group`` in the same process. With a group key the
    group meets in the closed part of the store there (:mod:`rpc.group.store_gate`). Where that is
    torch's, which has none, the worker with rank 0 hosts one beside it, and says in torch's store
    where, signed; nothing else of the group lies there.

    Args:
        init_method: ``env://``, ``tcp://host:port``, ``etcd://host:port,host:port`` or
            ``file:///path``; ``?job=ID`` behind ``tcp://`` and ``etcd://`` keeps apart who meets
            there for one job.
        rank: this worker's, or -1 to take it from the URL or, with ``env://``, from ``RANK``.
        world_size: likewise; None to take it from the URL or ``WORLD_SIZE``.
        timeout: seconds for bring-up as a whole: for the store's host to come, and for all
            that is asked of a ``TCPStore`` until :func:`opened_for_good`.
        bind_address: where to host the store if the URL leaves that open.
        group_key: what members prove to the store, where it is a ``TCPStore``'s address; empty
            if the group has none.

    Raises:
        ValueError: something that is needed is given nowhere.
        BringUpError: the store's host does not answer, or cannot be it; or there is a group key,
            and others can write the file.
    """
    until = time.monotonic() + timeout
    parts = urlsplit(init_method)
    query = dict(parse_qsl(parts.query))
    _check_url(init_method, parts, query)
    if rank >= 0:
        query["rank"] = str(rank)
    if world_size is not None and world_size > 0:
        query["world_size"] = str(world_size)
    elif parts.scheme == "env" and os.environ.get("WORLD_SIZE"):
        query.setdefault("world_size", os.environ["WORLD_SIZE"])
    if parts.scheme == "env":
        _check_environment(query)
    size = int(query.get("world_size", _NOT_GIVEN))
    if parts.scheme in ("env", "tcp"):
        place = _place(init_method, parts, query)
        _check_rank(place.rank, size)
        limits = _Limits(until, timeout)
        met = _meet_over_tcp(init_method, place, limits, bind_address, group_key), place.rank
    elif parts.scheme == etcd_store.SCHEME:
        met = _meet_in_etcd(init_method, query, until, timeout)
    else:
        if query.get("rank"):
            _check_rank(int(query["rank"]), size)
        met = _meet_as_torch_does(init_method, parts, query, timeout)
        if parts.scheme == "file" and group_key:
            _check_file(init_method, parts.path)
    _check_rank(met[1], size)
    return Meeting(*met, size if size > 0 else None)


def opened_for_good(store: Store) -> None:
    """Ends the limit of time that :func:`open_store` set to what is asked of a store."""
    if isinstance(store, OwnStore):
        store.until = float("inf")


def client_of(store: Store, timeout: float) -> Store:
    """A client of ours for a ``TCPStore`` that the program opened; other stores as they are."""
    if not isinstance(store, TCPStore):
        return store
    client = TcpStoreClient(store.host, store.port, timeout)
    client.server = store
    return client


def trust_members(store: Store, group_key: bytes) -> None:
    """Has a store that is hosted here keep what members of the group write, whoever fills it."""
    if isinstance(store, TcpStoreClient) and isinstance(store.server, StoreServer):
        store.server.trust(group_key)


def _meet_in_etcd(
    init_method: str, query: Mapping[str, str], until: float, timeout: float
) -> tuple[Store, int]:
    if "rank" not in query:
        raise ValueError(f"init_method={init_method!r} is incomplete: rank parameter missing")
    store = etcd_store.EtcdStoreClient(etcd_store.EtcdPlace.parse(init_method), timeout)
    store.until = until
    try:
        store.connect()
    except OSError as error:
        raise BringUpError(
            f"the group cannot meet at init_method={init_method!r}: {error}"
        ) from error
    return store, int(query["rank"])


# --- What is given


@dataclass(frozen=True, slots=True)
class _Place:
    """The address of a ``TCPStore``, and the worker as which this process meets there."""

    host: str
    port: int
    rank: int
    hosts: bool
    job: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def _place(init_method: str, parts: SplitResult, query: Mapping[str, str]) -> _Place:
    try:
        if parts.scheme == "env":
            rank = int(query["rank"] if "rank" in query else _variable("RANK"))
            host, port = _variable("MASTER_ADDR"), int(_variable("MASTER_PORT"))
        else:
            if parts.port is None or not parts.hostname:
                raise ValueError("tcp:// needs a host and a port, as in tcp://host:29500")
            if "rank" not in query:
                raise ValueError("rank parameter missing")
            rank, host, port = int(query["rank"]), parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"init_method={init_method!r} is incomplete: {error}") from None
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _Place(host, port, rank, rank == 0 and not launched, query.get("job", ""))


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ValueError(f"environment variable {name} expected, but not set")
    return value


def _check_url(init_method: str, parts: SplitResult, query: Mapping[str, str]) -> None:
    try:
        _ = parts.port if parts.scheme != etcd_store.SCHEME else None
    except ValueError as error:
        raise ValueError(f"init_method={init_method!r} names no port: {error}") from None
    for name in query.keys() & _NUMBERS.keys():
        _check_number(f"init_method={init_method!r}: {name}", query[name], _NUMBERS[name])


def _check_environment(query: Mapping[str, str]) -> None:
    """Looks at the variables that count, as the URL does not say the same."""
    for name, wanted in _NUMBERS.items():
        value = os.environ.get(name.upper())
        # An empty WORLD_SIZE says, as none does, that the group is dynamic.
        if value is None or (not value and name == "world_size"):
            continue
        if name not in query or query[name] == value:
            _check_number(f"environment variable {name.upper()}", value, wanted)
            if name == "master_port" and not 0 <= int(value) < 2**16:
                raise ValueError(
                    f"environment variable MASTER_PORT={value!r} must be from 0 to 65535"
                )


def _check_number(what: str, value: str, wanted: str) -> None:
    try:
        int(value)
    except ValueError:
        raise ValueError(f"{what}={value!r} is no whole number; give {wanted}") from None


def _check_rank(rank: int, size: int) -> None:
    if size > 0 and not 0 <= rank < size:
        raise ValueError(f"rank={rank} must be from 0 to world_size - 1, which is {size - 1}")
    if not 0 <= rank <= MAX_RANK:
        raise ValueError(f"rank={rank} must be from 0 to {MAX_RANK}, the highest there can be")


# --- A TCPStore


class _Limits(NamedTuple):
    """The monotonic time until which a worker tries to meet, and the seconds it was given."""

    until: float
    timeout: float


def _meet_over_tcp(
    init_method: str, place: _Place, limits: _Limits, bind_address: str | None, group_key: bytes
) -> Store:
    server = open_server(place.host, place.port, bind_address, group_key) if place.hosts else None
    host, port = (server.address, server.port) if server else (place.host, place.port)
    key = b"" if server and not server.has_closed_part else group_key
    client = TcpStoreClient(host, port, limits.timeout, key, place.job)
    client.server = server
    try:
        try:
            _connect(client, place, limits)
        except NoClosedPartError:
            return _meet_beside(init_method, place, limits, bind_address, group_key)
        if group_key and not key:
            return _meet_beside(init_method, place, limits, bind_address, group_key, server)
        client.until = limits.until + min(_SECONDS_TO_CONCLUDE, limits.timeout)
        if not group_key and client.has_closed_part():
            raise BringUpError(
                f"the workers disagree about group_key: the store at {place} was given one, and "
                "this process none; give every worker of the group the same"
            )
    except AnotherKeyError as error:
        raise BringUpError(str(error)) from error
    except OSError as error:
        raise _cannot_open(init_method, place, limits, error) from error
    return client


def _cannot_open(init_method: str, place: _Place, limits: _Limits, error: object) -> BringUpError:
    return BringUpError(
        f"the store at {place}, which init_method={init_method!r} names, could not be opened "
        f"within {limits.timeout:g} s; a worker with rank 0, or the launcher, must be running and "
        f"answering at that address: {error}; {_where_we_are()}"
    )


def _connect(client: TcpStoreClient, place: _Place, limits: _Limits) -> None:
    """Returns when the store's host has accepted a connection.

    Raises:
        NoClosedPartError: the client has a key, and the store there no closed part.
        AnotherKeyError: it has another key.
        OSError: it did not in time; says why the last attempt failed.
    """
    began, pause, silence = time.monotonic(), _FIRST_PAUSE, SECONDS_OF_SILENCE
    while True:
        now = time.monotonic()
        client.until = min(limits.until, now + _LONGEST_ATTEMPT)
        try:
            client.connect()
            if not is_address(place.host):
                warn_of_slow_resolver(f"{place.host!r} and connecting", time.monotonic() - now)
            return
        except (AnotherKeyError, NoClosedPartError):
            raise
        except UnicodeError as error:
            raise OSError(f"{place.host!r} is no name of a host: {error}") from error
        except OSError as error:
            left = limits.until - time.monotonic()
            if left <= 0:
                raise
            if time.monotonic() - began >= silence:
                _logger.warning(
                    "init_rpc has waited %g s for the group's store at %s (%s), and gives up after "
                    "%g s; %s",
                    silence,
                    place,
                    str(error),  # the error itself would keep its frames alive
                    limits.timeout,
                    _where_we_are(),
                )
                silence *= 2
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _where_we_are() -> str:
    return f"this host's addresses are {describe_addresses(host_addresses())}"


# --- A store beside torch's, which asks nobody for a key


def _meet_beside(
    init_method: str,
    place: _Place,
    limits: _Limits,
    bind_address: str | None,
    group_key: bytes,
    shared: StoreServer | None = None,
) -> Store:
    """Meets in a store of ours that the worker with rank 0 hosts, and names in torch's.

    Args:
        init_method: names torch's.
        place: the same.
        limits: of time.
        bind_address: where to host ours.
        group_key: of the group.
        shared: torch's, if this process hosts it.
    """
    host, port = (shared.address, shared.port) if shared else (place.host, place.port)
    torchs = TcpStoreClient(host, port, limits.timeout, job=place.job)
    torchs.until = limits.until
    notice = SignedStore(torchs, group_key, PREFIX)
    if place.rank == 0:
        return _host_beside(place, limits, bind_address, group_key, notice, shared)
    silence = time.monotonic() + SECONDS_OF_SILENCE
    problem = "nobody said there, with this group_key, where the group's own store is"
    while time.monotonic() < limits.until:
        address = notice.get(_BESIDE)
        if address is not None:
            try:
                return _follow(address.decode(), place, limits, group_key)
            except OSError as error:  # of a former life, or put back
                problem = f"the group's own store, named there, does not answer: {error}"
        if time.monotonic() > silence:
            _logger.warning("init_rpc waits for the worker with rank 0 at %s: %s", place, problem)
            silence = time.monotonic() + SECONDS_OF_SILENCE
        time.sleep(_LONGEST_PAUSE / 5)
    raise _cannot_open(init_method, place, limits, problem)


def _host_beside(
    place: _Place,
    limits: _Limits,
    bind_address: str | None,
    group_key: bytes,
    notice: SignedStore,
    shared: StoreServer | None,
) -> Store:
    mine = "" if shared else address_on_the_way_to(plain_host(place.host), 9) or ""
    server = open_server(place.host if shared else mine, 0, bind_address or mine, group_key)
    client = server.client(limits.timeout, place.job)
    client.server = (server, shared)
    client.connect()
    notice.set(_BESIDE, f"{client.run.decode()} {server.port} {mine}".encode())
    return client


def _follow(notice: str, place: _Place, limits: _Limits, group_key: bytes) -> Store:
    """Connects to where a notice says.

    Raises:
        OSError: another store listens there, or none.
    """
    run, port, host = notice.split(" ")
    client = TcpStoreClient(host or place.host, int(port), limits.timeout, group_key, place.job)
    client.until = min(limits.until, time.monotonic() + _LONGEST_ATTEMPT)
    client.connect()
    if client.run.decode() != run:
        raise StoreLostError("it is not the one that was named")
    client.until = limits.until
    return client


# --- Other stores


def _meet_as_torch_does(
    init_method: str, parts: SplitResult, query: dict[str, str], timeout: float
) -> tuple[Store, int]:
    """Opens a file, or whatever a scheme means for which the program registered a handler."""
    query.setdefault("world_size", _NOT_GIVEN)
    folder = os.path.dirname(parts.path)
    if parts.scheme == "file" and not os.path.isdir(folder):
        raise BringUpError(
            f"init_method={init_method!r} names a file in a folder that does not exist: {folder!r}"
        )
    url = urlunsplit(parts._replace(query=urlencode(query)))
    try:
        store, rank, _ = next(rendezvous(url, timeout=timedelta(seconds=timeout)))
    except (RuntimeError, OSError) as error:
        if "No rendezvous handler" in str(error):
            raise ValueError(
                f"init_method={init_method!r} has a scheme that is not known; "
                "use env://, tcp://host:port or file:///path"
            ) from error
        raise BringUpError(
            f"the store at init_method={init_method!r} could not be opened within {timeout:g} s; "
            f"it must be writable: {error}"
        ) from error
    except AssertionError as error:
        raise ValueError(f"init_method={init_method!r} is incomplete: {error}") from error
    store.set_timeout(timedelta(seconds=timeout))
    return store, rank


def _check_file(init_method: str, path: str) -> None:
    """Refuses a file that others can write: a group with a key keeps what decides there."""
    status = os.stat(path)
    owners = {0, os.geteuid()}
    if status.st_uid in owners and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    raise BringUpError(
        f"init_method={init_method!r} names a file that others can write (mode "
        f"{stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}), and the group has a key; "
        "name one that does not exist yet, in a folder of your own"
    )
