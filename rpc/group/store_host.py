"""Hosts the group's store: listens for it, and starts the process that serves it.

The store runs in a process of its own (``store_process``), so that strangers who fill it take
nothing from the worker, and a call that holds the interpreter lock keeps nobody waiting. It
listens on one address where that is known to be enough.

The process lives as long as a ``TCPStore`` of torch's in this process that nobody can reach.
torch starts such a server for ``init_process_group(rank=0)``, unless it knows of one in this
process at that port; so a process group may meet at the same URL, and the store ends when
neither uses it any more. Making it takes torch a look-up of a host's name, which a slow
resolver drags out for seconds; so that happens on a thread of its own, and nobody waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistNetworkError

from rpc.errors import BringUpError
from rpc.group import store_process
from rpc.group.signed_store import signing_key
from rpc.group.tcp_store import TcpStoreClient, connection_key, is_address
from rpc.runtime.store_visits import stays_behind
from rpc.runtime.threads import Thread

_logger = logging.getLogger("rpc")

_BACKLOG: Final = 1024
SLOW_SECONDS: Final = 2.0
_SECONDS_TO_BEGIN: Final = 0.2
_SECONDS_TO_SHARE: Final = 30.0
_ANY: Final = ("::", "0.0.0.0")
_SO_ATTACH_FILTER: Final = 26
_MOST_TRIES: Final = 20
_NO_KEY: Final = b"-"
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Has glibc give back at once what was large, so that no holes stay between what clients sent."""


def open_server(
    host: str, port: int, bind_address: str | None, group_key: bytes = b""
) -> StoreServer:
    """Hosts the group's store, or shares the one that this process hosts there.

    Args:
        host: what the group's URL calls this host.
        port: to listen on; 0 for one that the kernel chooses.
        bind_address: listen there if the URL does not say which address of this host is
            meant; None for all addresses then.
        group_key: what members prove; empty if there is none.

    Raises:
        BringUpError: another process listens there, or nobody can.
    """
    return StoreServer(host, port, _listen(host, port, bind_address), group_key)


def host_store(host: str, port: int, group_key: bytes = b"") -> StoreServer:
    """Hosts a store that speaks torch's protocol, in a process of its own.

    Strangers who reach it cannot have it take more than some 200 MB of memory, and none of
    this process's. It ends when this process does, or when nothing here uses it any more.

    Args:
        host: an address of this machine, or its name. On the loopback interface only processes
            of this machine reach it; if it is a name, it listens at all addresses.
        port: to listen on; 0 for one that is free.
        group_key: who has it may use the closed part, which nobody else can; see
            ``rpc.group.store_gate``. Default none: there is only the part that is open to all.

    Returns:
        The store: ``port`` says where it listens, ``tcp_store()`` is torch's client of the open
        part, ``client(timeout)`` ours of the closed one, ``trust(group_key)`` has the open part
        keep what members of that group write, whoever fills it.

    Raises:
        OSError: the port is taken.
        BringUpError: there is no address to listen on.
    """
    listener = _listen(host, port, None)
    if listener is None:
        raise OSError(errno.EADDRINUSE, f"{host}:{port} is taken")
    return _LoneServer(host, port, listener, group_key)


class StoreServer:
    """The group's store, hosted by this process for as long as this object is kept.

    Args:
        host: what the group's URL calls this host.
        port: of the store.
        listener: a socket that listens there; None to share what this process has there.
        group_key: what opens its closed part; empty if it has none.

    Attributes:
        address: where this process reaches it.
        port: where it listens.
        has_closed_part: false, too, if what is shared is torch's.

    Raises:
        BringUpError: there is nothing to be shared.
    """

    def __init__(
        self, host: str, port: int, listener: socket.socket | None, group_key: bytes = b""
    ) -> None:
        self.address, self.port = host, port
        self._group_key = group_key
        self.has_closed_part = bool(group_key) and listener is not None
        self._store: TCPStore | None = None
        self._error: BaseException | None = None
        self._keys: socket.socket | None = None
        known = None
        if listener is not None:
            self.address, self.port = _loopback_of(listener), listener.getsockname()[1]
            known = self._start(listener)
        self._have_it_known(host, port, known)

    def _have_it_known(self, host: str, port: int, known: int | None) -> None:
        thread = Thread(target=self._make_known, args=(known,), name="rpc-store-host", daemon=True)
        self._thread = thread
        thread.start()
        thread.join(_SECONDS_TO_SHARE if known is None else _SECONDS_TO_BEGIN)
        if thread.is_alive():
            stays_behind(thread)
        if self._error is not None:
            raise _cannot_host(f"{host}:{port}", self._error)

    def trust(self, group_key: bytes) -> None:
        """Has the store keep what members of a group write, whoever fills it.

        Args:
            group_key: the group's; with an empty one nobody can tell what they wrote.
        """
        if self._keys is not None and group_key:
            with contextlib.suppress(OSError):
                self._keys.send(signing_key(group_key))

    def client(self, timeout: float, job: str = "") -> TcpStoreClient:
        """A client of ours of its closed part, if it has one; keeps the store alive, too.

        Args:
            timeout: seconds that one request may take.
            job: sees only what was written for that job.
        """
        key = self._group_key if self.has_closed_part else b""
        client = TcpStoreClient(self.address, self.port, timeout, key, job)
        client.server = self
        return client

    def tcp_store(self) -> TCPStore:
        """A client of torch's of it, which keeps the store alive, too.

        Raises:
            BringUpError: it cannot connect.
        """
        self._thread.join(_SECONDS_TO_SHARE)
        if self._store is None:
            raise _cannot_host(f"{self.address}:{self.port}", self._error or "no answer")
        return self._store

    def __del__(self) -> None:
        keys = getattr(self, "_keys", None)
        if keys is not None:
            keys.close()

    def _start(self, listener: socket.socket) -> int | None:
        """Starts the process.

        Returns:
            The descriptor at which torch is to listen in this process: where nobody can reach
            it, or, if there can be no other process, where the group meets.
        """
        with listener:
            try:
                unreachable = _socket_beside(listener)
                with unreachable:
                    line = socket.create_connection(unreachable.getsockname())
                    _refuse_everybody(unreachable)
                    with line:
                        self._keys = _start_process(listener, line, self._group_key)
                    return unreachable.detach()
            except (OSError, subprocess.SubprocessError) as error:
                if self._group_key:
                    raise BringUpError(
                        "no process can be started that keeps the group's store, and torch's, "
                        f"which could stand for it, asks nobody for the group_key: {error}"
                    ) from error
                _logger.warning(
                    "no process can be started that keeps the group's store, so this worker keeps "
                    "it: whoever reaches it can fill this worker's memory (%s)",
                    error,
                )
                return listener.detach()

    def _make_known(self, descriptor: int | None) -> None:
        """Starts torch's server; without a descriptor, one that this process has is shared."""
        given = {} if descriptor is None else {"master_listen_fd": descriptor}
        began = time.monotonic()
        try:
            self._store = TCPStore(
                self.address,
                self.port,
                None,
                True,
                timedelta(seconds=_SECONDS_TO_SHARE),
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=False,  # before torch 2.8 that one takes no descriptor
                **given,
            )
        except BaseException as error:
            self._error = error
            return
        warn_of_slow_resolver(self.address, time.monotonic() - began)


class _LoneServer(StoreServer):
    """A store that no process group of this process shares, so that torch need not know of it."""

    def _have_it_known(self, host: str, port: int, known: int | None) -> None:
        """Does nothing: nobody need know of it."""

    def _start(self, listener: socket.socket) -> int | None:
        self._line, theirs = socket.socketpair()
        with listener, theirs:
            try:
                self._keys = _start_process(listener, theirs, self._group_key)
            except (OSError, subprocess.SubprocessError) as error:
                self._line.close()
                raise BringUpError(
                    f"no process can be started that keeps a store: {error}"
                ) from error
        return None

    def tcp_store(self) -> TCPStore:
        """A client of torch's of it; connects with the first call."""
        if self._store is None:
            limit = timedelta(seconds=_SECONDS_TO_SHARE)
            try:
                self._store = TCPStore(self.address, self.port, None, False, limit)
            except (DistNetworkError, RuntimeError) as error:
                raise _cannot_host(f"{self.address}:{self.port}", error) from error
        return self._store

    def __del__(self) -> None:
        super().__del__()
        line = getattr(self, "_line", None)
        if line is not None:
            line.close()


def _socket_beside(listener: socket.socket) -> socket.socket:
    """A socket that listens at the same port as another, at an address that nobody uses.

    Raises:
        OSError: there is none.
    """
    port = listener.getsockname()[1]
    for left in reversed(range(_MOST_TRIES)):
        made = socket.socket()
        # For this moment only: later, no other process may listen beside the store.
        sharing = (made, listener)
        try:
            for each in sharing:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            made.bind((f"127.{random.randint(64, 254)}.{random.randint(0, 255)}.1", port))
            made.listen(1)
        except OSError:
            made.close()
            if not left:
                raise
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
            return made
        finally:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
    raise AssertionError("the last try raises")


def _refuse_everybody(listener: socket.socket) -> None:
    """Has the kernel drop whatever comes to a listening socket."""
    drop_all = struct.pack("HBBI", 6, 0, 0, 0)
    program = ctypes.create_string_buffer(drop_all, len(drop_all))
    filters = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)


def _start_process(listener: socket.socket, line: socket.socket, group_key: bytes) -> socket.socket:
    """Starts ``store_process``, and returns when it runs.

    It is no child of this process, and in a session of its own: signals to this one's group
    are not for it.

    Returns:
        Where to send it the keys that it is to trust.

    Raises:
        OSError: there is no interpreter to run it, or no room for it.
        SubprocessError: it fails.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise OSError("this program does not know where its Python interpreter is")
    life = os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        ours.send(connection_key(group_key) if group_key else _NO_KEY)
        descriptors = (listener.fileno(), theirs.fileno(), life, line.fileno())
        where = "{}:{}".format(*listener.getsockname()[:2])
        subprocess.run(
            [
                *(sys.executable, "-I", "-S", store_process.__file__, where),
                *(str(number) for number in descriptors),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **_MALLOC},
            pass_fds=descriptors,
            start_new_session=True,
            check=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(life)
    return ours


def warn_of_slow_resolver(host: str, seconds: float) -> None:
    """Says in the log that looking up a host took long, if it did."""
    if seconds > SLOW_SECONDS:
        _logger.warning(
            "looking up %s took %.1f s: this host's resolver is slow, or does not answer. See "
            "/etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1'. torch's store asks the "
            "resolver for the name of each worker that connects from another host",
            host,
            seconds,
        )


def _cannot_host(where: str, error: object) -> BringUpError:
    return BringUpError(
        f"the store at {where} cannot be hosted here, as the worker with rank 0 does: its port is "
        "taken by another process, perhaps another worker with rank 0. Give each worker its own "
        f"rank, or the group another port ({error})"
    )


def _listen(host: str, port: int, bind_address: str | None) -> socket.socket | None:
    """A listening socket at the narrowest address that will do; None if the port is taken.

    Raises:
        BringUpError: there is no address to listen on.
    """
    problem = ""
    for address in _addresses(host, bind_address):
        try:
            return _listen_on(address, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            problem = problem or str(error)
    raise BringUpError(f"the store at {host}:{port} cannot be hosted here: {problem}")


def _addresses(host: str, bind_address: str | None) -> Iterator[str]:
    """The addresses to listen at, best first.

    An address in the URL is where the others will connect to, if it is one of this host's.
    A name may mean another address to them than to this host.
    """
    if host == "localhost":
        yield from ("127.0.0.1", "::1")
    elif is_address(host):
        yield host
    yield from (bind_address,) if bind_address else _ANY


def _listen_on(address: str, port: int) -> socket.socket:
    family, _, _, _, place = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _loopback_of(listener: socket.socket) -> str:
    """The address at which this process reaches a socket that listens here."""
    address: str = listener.getsockname()[0]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
