"""Two networks of this kernel, joined by a relay that delays what passes and bounds its rate.

Each network has one interface, a tunnel whose other end the relay holds: it reads packets of one
and writes them to the other when they are due. It needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.member import die_with_parent

NETWORK_DEVICE: Final = "tun0"
"""The name of each network's interface."""
ADDRESSES: Final = ("10.231.90.1", "10.231.90.2")
_NEW_NET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_TUN, _NO_HEADER = 0x0001, 0x1000
_LARGEST: Final = 65_000
"""Bytes of a packet at most: as few packets as can be, as Python passes them on."""


@dataclass(frozen=True, slots=True)
class Relay:
    """A relay that runs.

    Args:
        process: its number.
        networks: its descriptors of the two networks.
        passed: bytes that have passed from each network to the other.
    """

    process: int
    networks: tuple[int, int]
    passed: Any

    def enter(self, place: int) -> str:
        """Moves this thread, and those that it starts, into a network; returns its address."""
        with open(f"/proc/{self.process}/fd/{self.networks[place]}") as network:
            _check(_libc().setns(network.fileno(), _NEW_NET))
        return ADDRESSES[place]


@contextmanager
def relayed(seconds: float, megabits: float) -> Iterator[Relay]:
    """Two networks for as long as the block runs.

    Args:
        seconds: by which each packet is delayed, one way.
        megabits: a second in each direction; 0 for no bound.
    """
    fork = multiprocessing.get_context("fork")
    near, far = fork.Pipe()
    passed = np.frombuffer(mmap.mmap(-1, 16), np.int64)  # which the process shares
    process = fork.Process(target=_run, args=(seconds, megabits, passed, far), daemon=True)
    process.start()
    far.close()
    try:
        networks = near.recv()
        assert process.pid is not None
        yield Relay(process.pid, networks, passed)
    finally:
        process.kill()
        process.join()
        near.close()


def _run(seconds: float, megabits: float, passed: Any, ready: Any) -> None:
    die_with_parent()
    made = [_network(address) for address in ADDRESSES]
    ready.send(tuple(network for network, _ in made))
    _pass_on([tunnel for _, tunnel in made], seconds, megabits, passed)


def _network(address: str) -> tuple[int, int]:
    """Makes a network, which this process is in afterwards.

    Returns:
        Its descriptor, and the end of its tunnel.
    """
    _check(_libc().unshare(_NEW_NET))
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH", NETWORK_DEVICE.encode(), _TUN | _NO_HEADER))
    for words in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"{address}/24", "dev", NETWORK_DEVICE],
        ["link", "set", NETWORK_DEVICE, "mtu", str(_LARGEST), "txqueuelen", "5000", "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    return os.open("/proc/self/ns/net", os.O_RDONLY), tunnel


def _pass_on(tunnels: list[int], seconds: float, megabits: float, passed: Any) -> None:
    """Passes packets on, each direction by itself, for ever."""
    waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    free = [0.0, 0.0]  # when each direction has sent what came before
    while True:
        now = time.monotonic()
        for place, queue in enumerate(waiting):
            while queue and queue[0][0] <= now:
                os.write(tunnels[1 - place], queue.popleft()[1])
        due = min((queue[0][0] for queue in waiting if queue), default=now + 1.0)
        for tunnel in select.select(tunnels, [], [], max(0.0, due - now))[0]:
            place = tunnels.index(tunnel)
            packet = os.read(tunnel, _LARGEST + 100)
            begin = max(time.monotonic(), free[place])
            free[place] = begin + (len(packet) / megabits / 125e3 if megabits else 0.0)
            waiting[place].append((free[place] + seconds, packet))
            passed[place] += len(packet)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
