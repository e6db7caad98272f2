"""The addresses of this host's network interfaces, and the one to tell other hosts.

The kernel is asked over netlink, as ``ip address`` does: unlike a look-up of the host's own
name it knows every interface, and asks no resolver.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from rpc.group.exposure import is_loopback

_HEADER: Final = struct.Struct("=IHHII")
_LINK: Final = struct.Struct("=BxHiII")
_ADDRESS: Final = struct.Struct("=BBBBI")
_ATTRIBUTE: Final = struct.Struct("=HH")

_GET_LINK, _GET_ADDRESS, _DONE, _ERROR = 18, 22, 3, 2
_DUMP_REQUEST: Final = 0x301
_IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 10, 18, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RECEIVED: Final = 1 << 16

_PORTS_OF_GUESTS: Final = ("veth", "tun", "macvtap", "ipvtap")
"""The kinds of interfaces by which containers and virtual machines hang on a bridge."""
_SOMEWHERE_ELSE: Final = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""Addresses for documentation, which no host has: the way to them is the default route."""


@dataclass(frozen=True, slots=True)
class HostAddress:
    """An address of an interface of this host.

    Args:
        address: IPv4 or IPv6, as text, without a zone.
        interface: the interface's name.
        is_local: it means nothing to other hosts, which may have the same: it is on the
            loopback interface, or on a bridge that joins only containers and virtual machines
            of this host, as ``172.17.0.1`` of Docker.
    """

    address: str
    interface: str = ""
    is_local: bool = False


@dataclass(frozen=True, slots=True)
class _Interface:
    name: str
    kind: str
    master: int


def host_addresses() -> tuple[HostAddress, ...]:
    """All addresses of this host's interfaces; those that other hosts may reach come first.

    Where the kernel does not tell, those that the host's name stands for.
    """
    try:
        interfaces = dict(_interfaces())
        addresses = list(_addresses(interfaces))
    except OSError:
        addresses = [
            HostAddress(each, "", is_loopback(each)) for each in resolve_host(socket.gethostname())
        ]
    return tuple(sorted(addresses, key=lambda each: (each.is_local, ":" in each.address)))


def resolve_host(host: str) -> list[str]:
    """The addresses that a name stands for on this host, sorted; of an address, itself.

    Raises:
        OSError: the name is not known.
    """
    try:
        resolved = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} is no name of a host: {error}") from error
    return sorted({str(each[4][0]).partition("%")[0] for each in resolved})


def outward_address(addresses: Sequence[HostAddress]) -> str | None:
    """This host's address to tell other hosts when nobody says which network they share.

    Args:
        addresses: this host's.

    Returns:
        The one on the default route, else the first that is not local; None if there is none.
    """
    told = [each.address for each in addresses if not each.is_local]
    for place in _SOMEWHERE_ELSE:
        mine = address_on_the_way_to(*place)
        if mine in told:
            return mine
    return next((each for each in told if not ip_address(each).is_link_local), None)


def address_on_the_way_to(host: str | bytes, port: int) -> str | None:
    """This host's address on the way to another; None if there is no way.

    Args:
        host: its name or address.
        port: any; nothing is sent.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing; makes the kernel choose our address
            mine: str = probe.getsockname()[0]
    except OSError:
        return None
    return mine


def describe_addresses(addresses: Sequence[HostAddress]) -> str:
    """The addresses for a message: those that other hosts may reach, or that there are none."""
    told = [
        f"{each.address} ({each.interface})" if each.interface else each.address
        for each in addresses
        if not each.is_local and not ip_address(each.address).is_link_local
    ]
    return ", ".join(told) or "on its loopback interface only"


# --- Netlink


def _addresses(interfaces: dict[int, _Interface]) -> Iterator[HostAddress]:
    local = _guest_bridges(interfaces)
    for body in _dump(_GET_ADDRESS, _ADDRESS.pack(0, 0, 0, 0, 0)):
        family, _, _, _, index = _ADDRESS.unpack_from(body)
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        attributes = dict(_attributes(body[_ADDRESS.size :]))
        packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
        if packed is not None:
            address = socket.inet_ntop(family, packed)
            name = interfaces[index].name if index in interfaces else ""
            yield HostAddress(address, name, index in local or is_loopback(address))


def _interfaces() -> Iterator[tuple[int, _Interface]]:
    for body in _dump(_GET_LINK, _LINK.pack(0, 0, 0, 0, 0)):
        index = _LINK.unpack_from(body)[2]
        attributes = dict(_attributes(body[_LINK.size :]))
        about = dict(_attributes(attributes.get(_IFLA_LINKINFO, b"")))
        name, kind = (
            each.rstrip(b"\0").decode(errors="replace")
            for each in (attributes.get(_IFLA_IFNAME, b""), about.get(_IFLA_INFO_KIND, b""))
        )
        master = int.from_bytes(attributes.get(_IFLA_MASTER, b""), "little")
        yield index, _Interface(name, kind, master)


def _guest_bridges(interfaces: dict[int, _Interface]) -> set[int]:
    """The bridges that lead to nothing but guests of this host."""
    outward = {each.master for each in interfaces.values() if each.kind not in _PORTS_OF_GUESTS}
    return {
        index
        for index, each in interfaces.items()
        if each.kind == "bridge" and index not in outward
    }


def _dump(kind: int, question: bytes) -> Iterator[bytes]:
    """The bodies of the kernel's answers.

    Raises:
        OSError: it does not answer such questions here.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as line:
        line.bind((0, 0))
        size = _HEADER.size + len(question)
        line.send(_HEADER.pack(size, kind, _DUMP_REQUEST, 1, 0) + question)
        while True:
            data = line.recv(_RECEIVED)
            while data:
                length, answer, _, _, _ = _HEADER.unpack_from(data)
                if answer == _DONE:
                    return
                if answer == _ERROR or length < _HEADER.size:
                    raise OSError(errno.EPROTO, "the kernel lists no addresses")
                yield data[_HEADER.size : length]
                data = data[_aligned(length) :]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            return
        yield kind & 0x3FFF, data[_ATTRIBUTE.size : length]
        data = data[_aligned(length) :]


def _aligned(length: int) -> int:
    return (length + 3) & ~3
