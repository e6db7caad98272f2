"""The settings of the transport. Values only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rpc.constants import (
    DEFAULT_BUSY_POLL_SEC,
    DEFAULT_MAX_BYTES_IN_FLIGHT,
    DEFAULT_SHARED_MEMORY_BYTES,
)
from rpc.devices import DeviceMap
from rpc.options import WhenFull
from rpc.transports.tensorwire.tls import TlsOptions

_LONGEST_BUSY_POLL = 0.01
"""Sleeping costs a hundredth of that."""
_SHORTEST_BOUND = 4096
"""Bytes that a message may have at least: those by which workers leave have some hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one worker's transport.

    Args:
        bind_address: where to listen for TCP, an IPv4 or IPv6 address or a host
            name; None listens on the loopback interface only. Peers are told
            this address, or, for a wildcard, the addresses others can reach.
        group_key: secret shared by the group, out of band. Without it, who can
            read the group's store can connect.
        local_paths: use Unix sockets and shared memory between workers of one host.
        shared_memory_bytes: bound on the shared memory this worker holds for
            tensors it sends; what does not fit goes through sockets. 0 for none.
        max_bytes_in_flight: bound on unanswered requests, and on unsent replies
            and notices, per peer; each message counts for at least 4096 bytes.
            Requests below and above 64 KiB are counted apart.
        when_full: see :class:`WhenFull`.
        bulk_connections: TCP connections per peer and direction for large tensors.
        connect_seconds: bound on connecting to a peer, handshake included.
        resume_seconds: how long a connection that broke while both ends live may take to
            be replaced; after that the peer is lost. 0: at once.
        stuck_seconds: a reply to a worker that has taken nothing for so long holds up its
            thread no more.
        max_message_bytes: longer messages are refused by sender and receiver; at least 4096.
        busy_poll_seconds: how long, on average, a thread that waits for messages polls
            for them before it sleeps; 0 to sleep at once.
        device_maps: by name of the destination worker, its device for each of
            this worker's devices.
        devices: the CUDA devices that may be used; empty for those that the maps name.
        tls: certificates for TCP connections; None for connections without TLS.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a number is out of range.
    """

    bind_address: str | None = None
    group_key: bytes = field(default=b"", repr=False)
    local_paths: bool = True
    shared_memory_bytes: int = DEFAULT_SHARED_MEMORY_BYTES
    max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT
    when_full: WhenFull = WhenFull.BLOCK
    bulk_connections: int = 2
    connect_seconds: float = 20.0
    resume_seconds: float = 5.0
    stuck_seconds: float = 1.0
    max_message_bytes: int = 1 << 36
    busy_poll_seconds: float = DEFAULT_BUSY_POLL_SEC
    device_maps: Mapping[str, DeviceMap] = field(default_factory=dict)
    devices: tuple[torch.device, ...] = ()
    tls: TlsOptions | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.group_key, bytes):
            raise TypeError(f"group_key must be bytes, not {type(self.group_key).__name__}")
        if self.bind_address is not None and not isinstance(self.bind_address, str):
            raise TypeError(f"bind_address={self.bind_address!r} is not a string")
        if not isinstance(self.local_paths, bool):
            raise TypeError(f"local_paths={self.local_paths!r} is neither True nor False")
        if not isinstance(self.when_full, WhenFull):
            raise TypeError(f"when_full={self.when_full!r} is not a WhenFull")
        if not isinstance(self.tls, TlsOptions | None):
            raise TypeError(f"tls={self.tls!r} is a {type(self.tls).__name__}, not TlsOptions")
        _check_whole("shared_memory", self.shared_memory_bytes, 0)
        _check_whole("max_bytes_in_flight", self.max_bytes_in_flight, 1)
        _check_whole("tcp_connections", self.bulk_connections, 1)
        _check_whole("max_message_bytes", self.max_message_bytes, _SHORTEST_BOUND)
        if not self.connect_seconds > 0:
            raise ValueError(f"connect_seconds={self.connect_seconds} must be above 0")
        _check_seconds("link_resume_timeout", self.resume_seconds)
        _check_seconds("busy_poll", self.busy_poll_seconds, _LONGEST_BUSY_POLL)


def _check_seconds(name: str, value: object, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is not a number of seconds")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be at least 0, and finite")
    if value > most:
        raise ValueError(f"{name}={value} must be at most {most} seconds")


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not a whole number")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
