"""UDP sockets that strangers cannot fill: the kernel drops what does not begin with a cookie."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from typing import Final


class _Program(ctypes.Structure):
    """``struct sock_fprog`` of Linux."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_SO_ATTACH_FILTER: Final = 26
_LOAD_WORD, _RETURN, _JUMP_IF_EQUAL = 0x20, 0x06, 0x15
_UDP_HEADER_BYTES = 8
_INSTRUCTION = struct.Struct("=HBBI")


def family_of(host: str) -> socket.AddressFamily:
    """The family of an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def datagram_socket(
    host: str, cookie: bytes, family: socket.AddressFamily | None = None
) -> socket.socket:
    """Makes a non-blocking socket, bound to a free port.

    Args:
        host: address to bind to; empty for all of this host.
        cookie: what datagrams must begin with; a multiple of 4 bytes.
        family: of the addresses; default that of ``host``.

    Raises:
        OSError: there is no such address here, or no room for a socket.
    """
    made = socket.socket(family_of(host) if family is None else family, socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        with contextlib.suppress(OSError):  # without it, the others take room until they are read
            _drop_without_cookie(made, cookie)
        made.bind((host, 0))
    except BaseException:
        made.close()
        raise
    return made


def connected_line(host: str, port: int) -> socket.socket:
    """A non-blocking UDP socket connected to a port; see :func:`is_open`."""
    made = socket.socket(family_of(host), socket.SOCK_DGRAM)
    try:
        made.setblocking(False)
        made.connect((host, port))
    except BaseException:
        made.close()
        raise
    return made


def is_open(line: socket.socket) -> bool:
    """False if nobody has the port any more to which a socket of this host is connected.

    The kernel says so at once. What is sent has no cookie, so nobody is woken by it.
    """
    try:
        line.send(b"?")
        line.recv(1)
    except ConnectionRefusedError:
        return False
    except OSError:  # nothing is said of the port: an answer is never there
        return True
    return True


def _drop_without_cookie(made: socket.socket, cookie: bytes) -> None:
    """Has the kernel drop datagrams that begin otherwise.

    Raises:
        OSError: it cannot.
    """
    words = struct.unpack(f">{len(cookie) // 4}I", cookie)
    code: list[bytes] = []
    for number, word in enumerate(words):
        to_the_end = 2 * (len(words) - 1 - number) + 1
        code.append(_INSTRUCTION.pack(_LOAD_WORD, 0, 0, _UDP_HEADER_BYTES + 4 * number))
        code.append(_INSTRUCTION.pack(_JUMP_IF_EQUAL, 0, to_the_end, word))
    code.append(_INSTRUCTION.pack(_RETURN, 0, 0, 0xFFFF))
    code.append(_INSTRUCTION.pack(_RETURN, 0, 0, 0))
    program = _Program(len(code), b"".join(code))
    made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
