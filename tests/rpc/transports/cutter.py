"""Breaks the connections of this process while everything lives on."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator


def connections() -> list[int]:
    """The descriptors of this process that are connections, and no listeners."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as sock:
                    sock.getpeername()
                    found.append(int(number))
    return found


class Cutter:
    """Breaks the connections that were made since it was, among them none of pytest's."""

    def __init__(self) -> None:
        self._others = {_inode(number) for number in connections()}

    def cut(self, only: Callable[[int], bool] = lambda _: True) -> int:
        """Breaks them; returns how many it were."""
        count = 0
        for number in connections():
            with contextlib.suppress(OSError):
                if only(number) and _inode(number) not in self._others:
                    with socket.socket(fileno=os.dup(number)) as sock:
                        sock.shutdown(socket.SHUT_RDWR)
                        count += 1
        return count


def _inode(number: int) -> int:
    return os.fstat(number).st_ino


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
