"""Breaks the connections of this process while everything lives on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator


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
def cutting(cutter: Cutter, pause: float) -> Iterator[list[int]]:
    """Cuts everything again and again while the block runs; tells how many it were."""
    counts: list[int] = []
    end = threading.Event()

    def cut() -> None:
        while not end.wait(pause):
            counts.append(cutter.cut())

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield counts
    finally:
        end.set()
        thread.join()
