"""The address that a worker publishes for the others, and its listening sockets.

Workers share a host, for our purposes, if they see the same abstract Unix
sockets; the handshake proves who answers.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from dataclasses import dataclass, field

from rpc.devices import DeviceInfo
from rpc.errors import BringUpError, FrameError

_VERSION = 2
_BACKLOG = 256


@dataclass(frozen=True, slots=True)
class TensorWireAddress:
    """The address of one worker.

    Args:
        host: from :func:`rpc.transports.host.identity.host_identity`; empty if unknown.
        unix_name: of its abstract Unix socket, without the leading NUL; may be empty.
        tcp: ``(address, port)`` pairs, to be tried in order.
        secret: random; part of the key of its handshakes.
        devices: the worker's, and its device maps.
        tls: its TCP connections speak TLS.
    """

    host: str
    unix_name: str
    tcp: tuple[tuple[str, int], ...]
    secret: bytes
    devices: DeviceInfo = field(default_factory=DeviceInfo)
    tls: bool = False

    def encode(self) -> bytes:
        """The address as bytes for the rendezvous."""
        fields = {
            "version": _VERSION,
            "host": self.host,
            "unix": self.unix_name,
            "tcp": self.tcp,
            "secret": self.secret.hex(),
            "devices": self.devices.to_json(),
            "tls": self.tls,
        }
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> TensorWireAddress:
        """Reads what :meth:`encode` wrote.

        Raises:
            FrameError: the bytes are not an address of this version.
        """
        try:
            fields = json.loads(data)
            if fields["version"] != _VERSION:
                raise FrameError(f"address of version {fields['version']!r}")
            tcp = tuple((str(host), int(port)) for host, port in fields["tcp"])
            return cls(
                str(fields["host"]),
                str(fields["unix"]),
                tcp,
                bytes.fromhex(fields["secret"]),
                DeviceInfo.from_json(fields["devices"]),
                bool(fields.get("tls", False)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise FrameError(f"a peer's address cannot be read: {error!r}") from None


def listen_unix() -> socket.socket:
    """A listening Unix socket with an abstract name that the kernel chose."""
    return _listen_on(socket.AF_UNIX, "")


def listen_tcp(bind_address: str | None) -> list[socket.socket]:
    """Listening sockets on one port of ``bind_address``; on the loopback interface if None.

    Raises:
        BringUpError: the address is none of this machine, or link-local.
    """
    if bind_address is None:
        try:
            return [_listen_on(socket.AF_INET, ("127.0.0.1", 0))]
        except OSError:
            return [_listen_on(socket.AF_INET6, ("::1", 0))]
    stream, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        resolved = socket.getaddrinfo(bind_address, 0, type=stream, flags=passive)
        family, _, _, _, sockaddr = resolved[0]
        if _is_link_local(str(sockaddr[0])):
            raise BringUpError(
                f"bind_address={bind_address!r} is a link-local address: with which interface "
                "it goes, each host says in its own way, so that peers could not connect to it; "
                "give another address of this machine, or :: for all of them"
            )
        return [_listen_on(family, sockaddr)]
    except (OSError, UnicodeError) as error:
        raise BringUpError(
            f"bind_address={bind_address!r} cannot be listened on ({error}); give an address or "
            "a host name of this machine, 0.0.0.0 for all of its addresses, or leave it out"
        ) from error


def _is_link_local(host: str) -> bool:
    """Returns whether an IPv6 address means something only together with an interface."""
    return ":" in host and ipaddress.IPv6Address(host.partition("%")[0]).is_link_local


def _listen_on(
    family: int, sockaddr: str | tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind(sockaddr)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def reachable_at(listener: socket.socket) -> tuple[tuple[str, int], ...]:
    """Returns the addresses of a TCP listener; for a wildcard, this machine's own."""
    host, port = listener.getsockname()[:2]
    if host not in ("0.0.0.0", "::"):
        return ((host, port),)
    families = (socket.AF_INET,) if host == "0.0.0.0" else (socket.AF_INET6, socket.AF_INET)
    facing = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}
    outward = [facing["::"], facing["0.0.0.0"]] if host == "::" else [facing["0.0.0.0"]]
    hosts = [address for far in outward if (address := address_facing(far))]
    with contextlib.suppress(OSError):
        for family in families:
            hosts += [
                str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, family)
            ]
    hosts.append("127.0.0.1" if host == "0.0.0.0" else "::1")
    return tuple((each, port) for each in dict.fromkeys(hosts) if not _is_link_local(each))


def address_facing(host: str) -> str | None:
    """The local address that traffic to ``host`` leaves from; None if there is no route.

    Nothing is sent. A program that knows where its group meets can bind to this.
    """
    try:
        resolved = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, sockaddr = resolved[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(sockaddr)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def unix_path(name: str) -> str:
    """Returns the path to connect to for an abstract name."""
    return "\0" + name
