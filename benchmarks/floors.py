"""The speed of the machine itself: the limits that the rows are to be judged by.

The other end of a ping-pong is a process of its own (``python -m benchmarks.floors
unix|tcp``) that prints its address and answers until its standard input closes.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable

_MESSAGE_BYTES = 64  # about an empty call's
_COPY_BYTES = 64 * 1024 * 1024


def unix_ping_pong() -> Callable[[], object]:
    """Return a round trip over a blocking Unix socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(_start_echo("unix"))
    return _round_trip(connection)


def tcp_ping_pong() -> Callable[[], object]:
    """Return a round trip over a blocking TCP connection on the loopback interface."""
    connection = socket.create_connection(("127.0.0.1", int(_start_echo("tcp"))))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _round_trip(connection)


def warm_copy() -> Callable[[], object]:
    """Return a copy between two buffers whose pages are already there."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    return lambda: target.copy_(source)


def counting() -> Callable[[], object]:
    """Return what ``rpc.metrics()`` adds to one call: finding its counters and updating them,
    once where it is made and once where it is served.
    """
    from rpc.observe.metrics import Book

    made, served = Book(), Book()

    def operation() -> None:
        made[b"benchmarks\0do_nothing", 1].ended(1e-4, 60, 20)
        served[b"benchmarks\0do_nothing", 0].ended(5e-5, 20, 60)

    return operation


def _start_echo(family: str) -> str:
    command = [sys.executable, "-m", "benchmarks.floors", family]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


def _round_trip(connection: socket.socket) -> Callable[[], object]:
    message = bytes(_MESSAGE_BYTES)

    def operation() -> None:
        connection.send(message)
        connection.recv(_MESSAGE_BYTES)

    return operation


def _answer(family: str) -> None:
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        if family == "unix":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"{folder}/socket")
        else:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))
        listener.listen()
        print(listener.getsockname() if family == "unix" else listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    if family == "tcp":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while message := connection.recv(_MESSAGE_BYTES):
        connection.send(message)


def _exit_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    _answer(sys.argv[1])
