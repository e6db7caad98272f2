"""Hosts the group's store in this process: torch's ``TCPStore`` server.

It listens on one address where that is known to be enough; torch alone would listen on all.
The server is torch's, so that ``init_process_group`` may meet at the same URL. Making it
takes torch a look-up of a host's name, which a slow resolver drags out for seconds; so that
happens on a thread of its own, and nobody waits for it: the server answers before that.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_address
from typing import Final

import torch
from torch._C._distributed_c10d import TCPStore

from rpc.errors import BringUpError
from rpc.runtime.store_visits import stays_behind
from rpc.runtime.threads import Thread

_logger = logging.getLogger("rpc")

_BACKLOG: Final = 1024
_DESCRIPTORS: Final = 1 << 16
"""More than one other host can open connections to one port."""
SLOW_SECONDS: Final = 2.0
_SECONDS_TO_BEGIN: Final = 0.2
_SECONDS_TO_SHARE: Final = 30.0
_ANY: Final = ("::", "0.0.0.0")
_FIRST_LIBUV_WITH_DESCRIPTOR: Final = (2, 8)


class StoreServer:
    """torch's server in this process, for as long as this object is kept.

    Args:
        host: what the group's URL calls this host.
        port: to listen on; 0 for one that the kernel chooses.
        bind_address: listen there if the URL does not say which address of this host is
            meant; None for all addresses then.
        use_libuv: which of torch's two servers.

    Attributes:
        address: where this process reaches it.
        port: where it listens.

    Raises:
        BringUpError: another process listens there, or nobody can.
    """

    def __init__(self, host: str, port: int, bind_address: str | None, use_libuv: bool) -> None:
        self.address, self.port = host, port
        self._store: TCPStore | None = None
        self._error: BaseException | None = None
        allow_descriptors(_DESCRIPTORS)
        listener = _listen(host, port, bind_address)
        descriptor = None
        if listener is not None:
            self.address, self.port = _loopback_of(listener), listener.getsockname()[1]
            descriptor = listener.detach()
            use_libuv = use_libuv and _torch_version() >= _FIRST_LIBUV_WITH_DESCRIPTOR
        arguments = (descriptor, use_libuv)
        thread = Thread(target=self._serve, args=arguments, name="rpc-store-host", daemon=True)
        thread.start()
        thread.join(_SECONDS_TO_BEGIN if listener is not None else _SECONDS_TO_SHARE)
        if thread.is_alive():
            stays_behind(thread)
        if self._error is not None:
            raise _cannot_host(f"{host}:{port}", self._error)

    def _serve(self, descriptor: int | None, use_libuv: bool) -> None:
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
                use_libuv=use_libuv,
                **given,
            )
        except BaseException as error:
            self._error = error
            return
        warn_of_slow_resolver(self.address, time.monotonic() - began)


def allow_descriptors(most: int) -> None:
    """Raises this process's limit on descriptors, within what the system allows it.

    torch's server takes every connection. With the usual limit of 1024, a stranger who opens
    as many would leave none for the worker that hosts it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


def uses_libuv(choice: str | None) -> bool:
    """Which of torch's servers to use: as the URL says, or else the environment."""
    return (choice or os.environ.get("USE_LIBUV", "1")) == "1"


def _cannot_host(where: str, error: object) -> BringUpError:
    return BringUpError(
        f"the store at {where} cannot be hosted here, as the worker with rank 0 does: its port is "
        "taken by another process, perhaps another worker with rank 0. Give each worker its own "
        f"rank, or the group another port ({error})"
    )


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


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
    """Where to listen, best first.

    An address in the URL is where the others will connect to, if it is one of this host's.
    A name may mean another address to them than to this host.
    """
    if host == "localhost":
        yield from ("127.0.0.1", "::1")
    elif is_address(host):
        yield host
    yield from (bind_address,) if bind_address else _ANY


def is_address(host: str) -> bool:
    """True of an IP address, False of a name."""
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


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
