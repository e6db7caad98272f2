"""Breaks the connections of this process while everything lives on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

_MOST_IN_VAIN = 3


def connections() -> Iterator[socket.socket]:
    """The sockets of this process that are connected, each as a duplicate of its own.

    Others may be opened and closed meanwhile.
    """
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with _duplicate(int(number)) as sock:
                    sock.getpeername()
                    yield sock


def _duplicate(number: int) -> socket.socket:
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # the number stands for something else by now
        os.close(copy)
        raise


class Cutter:
    """Breaks the connections that were made since it was, among them none of pytest's."""

    def __init__(self) -> None:
        self._others = {_inode(sock) for sock in connections()}

    def cut(self) -> int:
        """Breaks them, and none that is made meanwhile; returns how many it were."""
        count = 0
        found = [sock.dup() for sock in connections() if _inode(sock) not in self._others]
        for sock in found:
            with sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
        return count


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino


@contextlib.contextmanager
def cutting(cutter: Cutter, pause: float, arrived: Callable[[], int]) -> Iterator[list[int]]:
    """Cuts everything again and again while the block runs; tells how many it were.

    A few cuts follow each other however little time that leaves; the next one waits until something
    has arrived. Or else no connection would ever be whole on a machine too busy for a handshake
    between two cuts.

    Args:
        cutter: breaks what was made since it was.
        pause: seconds between two cuts, at least.
        arrived: another number as soon as more has arrived.
    """
    counts: list[int] = []
    end = threading.Event()

    def cut() -> None:
        last, in_vain = arrived(), 0
        while not end.wait(pause):
            now = arrived()
            in_vain = 0 if now != last else in_vain + 1
            last = now
            if in_vain <= _MOST_IN_VAIN:
                counts.append(cutter.cut())

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield counts
    finally:
        end.set()
        thread.join()
