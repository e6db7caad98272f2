"""The store at which a group meets, and what static and dynamic groups both keep there.

Owns the form of a worker's record, which is JSON and never pickled; opening the
store; and waiting for one that may never answer. How a static group meets is
``rendezvous``'s business, who comes and goes in a dynamic one ``member_list``'s.

Keys, under ``tensorwire/``: ``mode``, what kind of group meets there;
``incarnation/NAME`` and ``incarnation-of-rank/RANK`` count lives.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from rpc.constants import MAX_RANK
from rpc.errors import BringUpError, RpcError
from rpc.runtime.store_visits import stays_behind
from rpc.runtime.threads import Thread
from rpc.wire.messages import PROTOCOL_VERSION

T = TypeVar("T")

_logger = logging.getLogger("rpc")

STATIC, DYNAMIC = "static", "dynamic"
_PREFIX = "tensorwire"
_NOT_GIVEN = "-1"
_MUST_AGREE = ("world_size", "backend", "protocol")
_NUMBERS = {
    "rank": "this worker's rank, from 0",
    "world_size": "the number of workers, or leave it out for a dynamic group",
    "master_port": "the TCP port of the group's store",
}
_TYPES = {"name": str, "rank": int, "incarnation": int, "extras": dict, "host": str, "pid": int}
_KEY_MARK_DIGITS = 4

_LONGEST_ATTEMPT = 5.0  # seconds; to an address that swallows what it is sent
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_SECONDS_TO_SAY_WHY = 0.1
_SECONDS_OF_SILENCE = 10.0

_PORT_IS_TAKEN = "EADDRINUSE"
"""What torch, whose error has no number, says of a port at which another process listens."""

STORE = "an answer of the group's store"
"""What the log says that ``init_rpc`` waits for where it is nobody else."""
KEY_MARK = "key_mark"
"""What a record's extras call the mark of the key that its worker was given."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a worker tells the others when it joins.

    Args:
        name: the worker's.
        rank: its id.
        world_size: how many workers it expects; None in a dynamic group.
        incarnation: which life of that name this is; see ``next_incarnation``.
        backend: the backend it uses.
        address: where its transport can be reached; the transport's own format.
        protocol: the version of the messages it speaks.
        host: the name of the host that it runs on, for people.
        pid: its process id there.
        extras: anything else that JSON can hold.
    """

    name: str
    rank: int
    world_size: int | None
    incarnation: int
    backend: str
    address: bytes
    protocol: int = PROTOCOL_VERSION
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes for the store."""
        fields = asdict(self)
        fields["address"] = base64.b64encode(self.address).decode()
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The inverse of :meth:`encode`.

        Raises:
            BringUpError: something else wrote to the store under our keys.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["address"] = base64.b64decode(fields["address"])
            record = cls(**fields)
            record._check_types()
            return record
        except (ValueError, TypeError, KeyError) as error:
            raise BringUpError(
                f"the store holds something else than a record of this version: {error}"
            ) from error

    def _check_types(self) -> None:
        for what, kind in _TYPES.items():
            value = getattr(self, what)
            if not isinstance(value, kind):
                raise TypeError(f"{what}={value!r} is a {type(value).__name__}")

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.rank}, process {self.pid} on {self.host})"


def disagreements(me: Record, first: Record) -> list[str]:
    """What ``me`` says otherwise than the group's first member, in words."""
    found = [
        f"the workers disagree about {what}: "
        f"{first.name} says {getattr(first, what)}, {me.name} says {getattr(me, what)}"
        for what in _MUST_AGREE
        if getattr(me, what) != getattr(first, what)
    ]
    if me.extras.get(KEY_MARK) != first.extras.get(KEY_MARK):
        found.append(
            f"the workers disagree about group_key: {first.name} and {me.name} were given "
            "different ones; give every worker of the group the same bytes"
        )
    return found


def key_mark(group_key: bytes) -> str:
    """By which workers notice that they were given different keys.

    It has 16 bits: enough for that, too few to confirm a guess, as many keys share a mark.
    Who may connect is decided by the handshake, never by this.
    """
    digest = hmac.new(group_key, b"tensorwire key mark", hashlib.sha256)
    return digest.hexdigest()[:_KEY_MARK_DIGITS]


def open_store(
    init_method: str, rank: int, world_size: int | None, timeout: float
) -> tuple[Store, int, int | None]:
    """Connects to the store that ``init_method`` names; hosts it, if this is the place.

    The same URL may serve ``init_process_group`` in the same process.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        rank: this worker's, or -1 to take it from the URL or, with ``env://``, from ``RANK``.
        world_size: likewise; None to take it from the URL or ``WORLD_SIZE``.
        timeout: seconds to wait for the store's host.

    Returns:
        The store, the rank and the world size, which is None for a dynamic group.

    Raises:
        ValueError: something that is needed is given nowhere.
        BringUpError: the store's host does not answer, or cannot be it.
    """
    parts = urlsplit(init_method)
    query = dict(parse_qsl(parts.query))
    _check_url(init_method, parts, query)
    if rank >= 0:
        query["rank"] = str(rank)
    if world_size is not None and world_size > 0:
        query["world_size"] = str(world_size)
    elif parts.scheme == "env" and os.environ.get("WORLD_SIZE"):
        query.setdefault("world_size", os.environ["WORLD_SIZE"])
    known_rank = query.get("rank")
    if parts.scheme == "env":
        _check_environment(query)
        known_rank = known_rank or os.environ.get("RANK")
    size = int(query.get("world_size", _NOT_GIVEN))
    # A TCP store told how many to expect would wait for them itself, and not say who is missing.
    query["world_size"] = str(size) if parts.scheme == "file" else _NOT_GIVEN
    url = urlunsplit(parts._replace(query=urlencode(query)))
    if known_rank:
        _check_rank(int(known_rank), size)
    folder = os.path.dirname(parts.path)
    if parts.scheme == "file" and not os.path.isdir(folder):
        raise BringUpError(
            f"init_method={init_method!r} names a file in a folder that does not exist: {folder!r}"
        )
    store, rank, _ = _connect(url, init_method, timeout, _other_host(parts, known_rank))
    _check_rank(rank, size)
    return store, rank, size if size > 0 else None


def _check_url(init_method: str, parts: SplitResult, query: Mapping[str, str]) -> None:
    try:
        _ = parts.port
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


def _other_host(parts: SplitResult, rank: str | None) -> tuple[str, int] | None:
    """Where another process hosts the store; None if this one does, or torch shall say."""
    launched = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank is None or (int(rank) == 0 and not launched):
        return None
    host, port = parts.hostname, parts.port
    if parts.scheme == "env":
        host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT") or 0)
    return (host, port) if host and port and 0 < port < 2**16 else None


def _connect(
    url: str, init_method: str, timeout: float, host: tuple[str, int] | None
) -> tuple[Store, int, int]:
    until, given_up = time.monotonic() + timeout, threading.Event()
    where = init_method if host is None else f"{host[0]}:{host[1]}"
    latest = deque(["no answer"], maxlen=1)

    def waits_for() -> str:
        return f"the group's store at {where} ({latest[0]}), and gives up after {timeout:g} s"

    def connect() -> tuple[Store, int, int]:
        seconds = timeout
        if host is not None:
            told_until = until - min(_SECONDS_TO_SAY_WHY, timeout / 2)
            _await_host(host, told_until, given_up, latest.append)
            latest.append("somebody listens there, but does not answer")
            # torch's attempts end late; such a host has no reason to need more than one.
            seconds = max(until - time.monotonic(), _FIRST_PAUSE) / 2
        found: tuple[Store, int, int] = next(rendezvous(url, timeout=timedelta(seconds=seconds)))
        return found

    try:
        found = within(timeout, connect, given_up, waits_for=waits_for)
    except (RuntimeError, OSError) as error:
        if "No rendezvous handler" in str(error):
            raise ValueError(
                f"init_method={init_method!r} has a scheme that is not known; "
                "use env://, tcp://host:port or file:///path"
            ) from error
        if _PORT_IS_TAKEN in str(error):
            raise BringUpError(
                f"the store at init_method={init_method!r} cannot be hosted here, as the worker "
                "with rank 0 does: its port is taken by another process, perhaps another worker "
                "with rank 0. Give each worker its own rank, or the group another port"
            ) from error
        raise BringUpError(
            f"the store at init_method={init_method!r} could not be opened within {timeout:g} s; "
            "a worker with rank 0 must be running at that address, or the file be writable: "
            f"{error}"
        ) from error
    except AssertionError as error:
        raise ValueError(f"init_method={init_method!r} is incomplete: {error}") from error
    found[0].set_timeout(timedelta(seconds=timeout))
    return found


def _await_host(
    host: tuple[str, int],
    until: float,
    given_up: threading.Event,
    note: Callable[[str], object],
) -> None:
    """Returns when somebody listens there; notes why nobody does yet.

    torch would wait, too, but for up to twice its time, as its pauses grow with it, in C++ that
    nothing interrupts, and a process that ends meanwhile is aborted; and it would notice late.

    Raises:
        OSError: nobody did in time, or nobody waits for it any more.
    """
    pause = _FIRST_PAUSE
    while True:
        left = max(until - time.monotonic(), _FIRST_PAUSE)
        try:
            socket.create_connection(host, min(left, _LONGEST_ATTEMPT)).close()
            return
        except UnicodeError as error:
            raise OSError(f"{host[0]!r} is no name of a host: {error}") from error
        except OSError as error:
            note(str(error))
            left = until - time.monotonic()
            if left <= 0 or given_up.wait(min(pause, left)):
                raise
        pause = min(2 * pause, _LONGEST_PAUSE)


def within(
    timeout: float,
    ask: Callable[[], T],
    given_up: threading.Event | None = None,
    undo: Callable[[], object] | None = None,
    waits_for: Callable[[], str] | None = None,
) -> T:
    """Returns ``ask()``, which makes requests to the store, or gives up waiting for it.

    A store whose host is frozen never answers; the thread that waits for it is left behind.

    Args:
        timeout: seconds.
        ask: what to do.
        given_up: set when nobody waits for ``ask`` any more, which may look at it.
        undo: called if ``ask`` returns, but its caller does not hear of it.
        waits_for: what to say in the log that ``init_rpc`` waits for, if it takes long; the store
            unless given.

    Raises:
        BringUpError: the time is over.
    """
    outcome: Future[T] = Future()
    asking = Thread(target=_settle, args=(outcome, ask, undo), name="rpc-rendezvous", daemon=True)
    asking.start()
    try:
        _await(outcome, timeout, waits_for)
    except BaseException:  # such as Ctrl-C
        if outcome.cancel():
            _give_up(asking, given_up)
        elif undo is not None and outcome.exception() is None:
            undo()
        raise
    if outcome.cancel():
        _give_up(asking, given_up)
        raise BringUpError(
            f"the store did not answer within {timeout:g} s; is the worker that hosts it, "
            "usually rank 0, frozen or cut off?"
        )
    return outcome.result()


def _await(outcome: Future[T], timeout: float, waits_for: Callable[[], str] | None) -> None:
    """Returns when it is there or the time is over; says what it waits for at times.

    After ten seconds, that is, and then whenever it has waited twice as long.
    """
    began, silence = time.monotonic(), _SECONDS_OF_SILENCE
    while silence < timeout:
        if wait([outcome], began + silence - time.monotonic()).done:
            return
        what = f"{STORE}, and gives up after {timeout:g} s" if waits_for is None else waits_for()
        if not outcome.done():
            _logger.warning("init_rpc has waited %g s for %s", silence, what)
        silence *= 2
    wait([outcome], max(0.0, began + timeout - time.monotonic()))


def _settle(outcome: Future[T], ask: Callable[[], T], undo: Callable[[], object] | None) -> None:
    try:
        result = ask()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):
            outcome.set_exception(error)
        return
    try:
        outcome.set_result(result)
    except InvalidStateError:
        if undo is not None:
            undo()


def _give_up(asking: threading.Thread, given_up: threading.Event | None) -> None:
    stays_behind(asking)
    if given_up is not None:
        given_up.set()


def next_incarnation(store: Store, name: str, rank: int) -> int:
    """The number of the life that ``name`` begins now: higher than any of this name or rank.

    Raises:
        BringUpError: the store was lost.
    """
    with names_store_loss():
        ours = our_part(store)
        of_name, of_rank = f"incarnation/{name}", f"incarnation-of-rank/{rank}"
        life: int = ours.add(of_name, 1)
        count: int = ours.add(of_rank, 1)
        while life < count:  # to a number that no other life of the name was given
            life = ours.add(of_name, count - life)
        if count < life:
            ours.add(of_rank, life - count)
        return life


# --- What is kept in it


def our_part(store: Store) -> Store:
    """The part of a store that is for groups, beside which others may use it."""
    return PrefixStore(_PREFIX, store)


def set_mode(store: Store, mode: str) -> None:
    """Says what kind of group meets here.

    Raises:
        BringUpError: the other kind does.
    """
    if text(store.compare_set("mode", "", mode)) != mode:
        raise BringUpError(
            "RPC group mixes statically and dynamically initialized members which is not "
            "supported. Give every worker a world_size, or none."
        )


def read(store: Store, prefix: str, keys: Iterable[object]) -> list[bytes]:
    """Reads what there is of several keys, in one request if all are there."""
    wanted = [f"{prefix}{key}" for key in keys]
    if not wanted:
        return []
    if not store.check(wanted):
        wanted = [key for key in wanted if store.check([key])]
    return store.multi_get(wanted) if wanted else []


def text(value: bytes) -> str:
    """What a key holds, as text."""
    return value.decode()


@contextlib.contextmanager
def names_store_loss() -> Iterator[None]:
    """Turns what torch raises when the store is gone into an error that says so.

    Raises:
        BringUpError: the store was lost.
    """
    try:
        yield
    except RpcError:
        raise
    except RuntimeError as error:
        raise BringUpError(
            "the store was lost while workers were meeting; is the worker that hosts it, "
            f"usually rank 0, still running? ({error})"
        ) from error
