"""Records what members of a job send each other on this machine's loopback interface.

Only root may do so. It stands for whoever can listen on a network.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import defaultdict
from dataclasses import dataclass, field

_ALL = 0x0003
_OUTGOING = 4
_IPV4, _IPV6, _TCP, _UDP = 0x0800, 0x86DD, 6, 17
_MOST_BYTES, _MOST_CONVERSATIONS, _MOST_DATAGRAMS = 1 << 16, 20_000, 500


@dataclass(slots=True)
class _Heard:
    """One direction of a connection."""

    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    expected: int | None = None


class Recorder:
    """Listens until it is closed. Without the right to do so it hears nothing.

    Attributes:
        may: it has the right.
    """

    def __init__(self) -> None:
        self._heard: dict[tuple[int, int], _Heard] = {}
        self._datagrams: dict[int, list[bytes]] = defaultdict(list)
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
            self._socket.bind(("lo", 0))
        except OSError:
            self.may = False
            return
        self.may = True
        self._socket.settimeout(0.2)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
            self._socket.close()
            self._thread = None

    def conversations(self, port: int) -> list[list[bytes]]:
        """The bytes that each client has sent to a port, piece by piece."""
        return [each.pieces for (_, to), each in self._heard.items() if to == port and each.pieces]

    def datagrams(self, port: int) -> list[bytes]:
        """The datagrams that came at a port."""
        return self._datagrams.get(port, [])

    def _listen(self) -> None:
        while not self._ends.is_set():
            try:
                packet, address = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                continue
            if address[2] != _OUTGOING:  # each passes twice
                self._take(packet)

    def _take(self, packet: bytes) -> None:
        (kind,) = struct.unpack_from("!H", packet, 12)
        body = packet[14:]
        if kind == _IPV4 and len(body) >= 20:
            protocol, begin = body[9], (body[0] & 15) * 4
            end = struct.unpack_from("!H", body, 2)[0]
        elif kind == _IPV6 and len(body) >= 40:
            protocol, begin, end = body[6], 40, 40 + struct.unpack_from("!H", body, 4)[0]
        else:
            return
        segment = body[begin:end]
        if protocol == _TCP and len(segment) >= 20:
            self._take_segment(segment)
        elif protocol == _UDP and len(segment) > 8:
            port = struct.unpack_from("!H", segment, 2)[0]
            self._datagrams[port] = [*self._datagrams[port][-_MOST_DATAGRAMS:], segment[8:]]

    def _take_segment(self, segment: bytes) -> None:
        source, port, number = struct.unpack_from("!HHI", segment)
        data = segment[(segment[12] >> 4) * 4 :]
        if (source, port) not in self._heard and len(self._heard) >= _MOST_CONVERSATIONS:
            return
        heard = self._heard.setdefault((source, port), _Heard())
        if not data or heard.size >= _MOST_BYTES or heard.expected not in (None, number):
            return
        heard.expected = (number + len(data)) & 0xFFFFFFFF
        heard.size += len(data)
        heard.pieces.append(data)
