"""What can be chosen about the transport. Values only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


class WhenFull(enum.Enum):
    """What ``send`` does when ``max_bytes_in_flight`` to a peer is reached."""

    BLOCK = "block"
    """Wait until replies have come back."""
    RAISE = "raise"
    """Raise :class:`rpc.errors.QueueFullError`."""


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
        when_full: see :class:`WhenFull`.
        bulk_connections: TCP connections per peer and direction for large tensors.
        connect_seconds: bound on connecting to a peer, handshake included.
        max_message_bytes: longer messages are refused by sender and receiver.
        device_maps: by name of the destination worker, its device for each of
            this worker's devices.
    """

    bind_address: str | None = None
    group_key: bytes = b""
    local_paths: bool = True
    shared_memory_bytes: int = 1 << 30
    max_bytes_in_flight: int = 64 << 20
    when_full: WhenFull = WhenFull.BLOCK
    bulk_connections: int = 2
    connect_seconds: float = 20.0
    max_message_bytes: int = 1 << 36
    device_maps: Mapping[str, Mapping[torch.device, torch.device]] = field(default_factory=dict)
