"""Machines for tests: network namespaces of this kernel, each on a cable to one switch.

A process that enters a machine has its network and its host name, and reads its ``/etc/hosts``.
It shares files, and the numbers of processes, with the test. A machine is held by a process that
does nothing else; when that ends the kernel takes the namespace away, and cables with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import until

_NEW_NET, _NEW_MOUNTS, _NEW_NAME = 0x40000000, 0x00020000, 0x04000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_NETWORK = "10.231.78"
_NOBODYS = "02:00:00:00:00:00"
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Machine:
    """One machine.

    Args:
        name: its host name, and what others call it.
        number: its place among the machines.
        holder: the process that holds its network.
        switch: the process that holds the switch's.
        hosts: its ``/etc/hosts``.
    """

    name: str
    number: int
    holder: int
    switch: int
    hosts: str

    @property
    def address(self) -> str:
        """On the network that it shares with the others."""
        return f"{_NETWORK}.{self.number + 1}"

    def enter(self) -> None:
        """Moves this process, which has one thread, onto the machine."""
        with open(f"/proc/{self.holder}/ns/net") as network:
            _check(_libc.setns(network.fileno(), _NEW_NET))
        _check(_libc.unshare(_NEW_MOUNTS | _NEW_NAME))
        name = self.name.encode()
        _check(_libc.sethostname(name, len(name)))
        _check(_libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None))
        _check(_libc.mount(self.hosts.encode(), b"/etc/hosts", None, _BIND, None))

    def ip(self, *words: str) -> None:
        """Runs ``ip`` on the machine."""
        _ip(self.holder, *words)

    # --- Cables

    def cut(self) -> None:
        """Cuts the cable: nothing passes, and nobody is told but the two ends' carrier lights."""
        _ip(self.switch, "link", "set", f"port{self.number}", "down")

    def mend(self) -> None:
        """Joins the cable again."""
        _ip(self.switch, "link", "set", f"port{self.number}", "up")

    def loses(self, other: Machine) -> None:
        """Cuts one direction: what this machine sends to the other is lost without a sign."""
        self.ip("neigh", "replace", other.address, "lladdr", _NOBODYS, "dev", "eth0", "nud",
                "permanent")  # fmt: skip

    def reaches(self, other: Machine) -> None:
        """Mends that direction."""
        self.ip("neigh", "del", other.address, "dev", "eth0")

    # --- Power

    def processes(self) -> list[int]:
        """The processes that are on the machine, but for its holder."""
        here = os.stat(f"/proc/{self.holder}/ns/net").st_ino
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdecimal() and os.stat(f"/proc/{entry}/ns/net").st_ino == here:
                    found.append(int(entry))
        return [each for each in found if each != self.holder]

    def power_off(self) -> None:
        """Ends all that runs on it at once, so that the network hears nothing of that."""
        self.cut()
        until(self._ends_all, 20.0)

    def _ends_all(self) -> bool:
        left = self.processes()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return not left


@contextlib.contextmanager
def machines(*names: str) -> Iterator[Sequence[Machine]]:
    """Some machines, each of which knows the others' names."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        switch = stack.enter_context(_network())
        _ip(switch, "link", "add", "switch", "up", "type", "bridge")
        made = []
        for number, name in enumerate(names):
            holder = stack.enter_context(_network())
            made.append(Machine(name, number, holder, switch, str(folder / name)))
            _connect(made[-1])
        for each in made:
            each_other = [f"{other.address} {other.name}" for other in made]
            Path(each.hosts).write_text("\n".join(["127.0.0.1 localhost", *each_other, ""]))
        try:
            yield made
        finally:
            for each in made:
                each.power_off()


def _connect(machine: Machine) -> None:
    port = f"port{machine.number}"
    here, there = (port, "up", "master", "switch"), ("eth0", "netns", str(machine.holder))
    _ip(machine.switch, "link", "add", *here, "type", "veth", "peer", "name", *there)
    machine.ip("link", "set", "lo", "up")
    machine.ip("address", "add", f"{machine.address}/24", "dev", "eth0")
    machine.ip("link", "set", "eth0", "up")


@contextlib.contextmanager
def _network() -> Iterator[int]:
    """A process that holds a network of its own."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], start_new_session=True)
    try:
        ours = os.stat("/proc/self/ns/net").st_ino
        until(lambda: os.stat(f"/proc/{holder.pid}/ns/net").st_ino != ours)
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def _ip(holder: int, *words: str) -> None:
    command = ["nsenter", f"--net=/proc/{holder}/ns/net", "ip", *words]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _check(result: int) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@functools.cache
def _why_not() -> str:
    """The reason why there can be no machines here; empty if there can be."""
    command = (
        "unshare --mount --uts --net sh -c 'ip link add switch type bridge && ip link add port0 "
        "master switch type veth peer name eth0 && mount --make-rprivate / && "
        "mount --bind /etc/hosts /etc/hosts'"
    )
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


def require_machines() -> None:
    """Skips the test where there can be none."""
    if _why_not():
        pytest.skip(_why_not())
