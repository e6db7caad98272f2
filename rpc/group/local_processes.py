"""Tells a process of this host that runs from one that is stopped or has ended.

Two workers that see each other's processes need no datagrams to give signs of life: the
kernel says of each process in which state it is, however long it holds the interpreter lock.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from rpc.transports.host.identity import host_identity

_STATE_AT, _STARTED_AT = 0, 19
"""Positions in ``/proc/PID/stat``, after the process's name."""
_STILL: Final = frozenset("TtZX")
_MOST_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Names one process, also when its number is another's later.

    Args:
        place: the host and the namespaces in which it runs; empty if they are unknown.
        number: its process id there.
        started: when it started, as the kernel counts.
    """

    place: str
    number: int
    started: str

    @classmethod
    def of(cls, number: int) -> ProcessId:
        """A process that runs in the same namespaces as this one, as far as it can be seen."""
        place = f"{host_identity('net')} {host_identity('pid')}"
        try:
            with open(f"/proc/{number}/stat", "rb") as file:
                return cls(place, number, _fields(file.read())[_STARTED_AT])
        except (OSError, IndexError):
            return cls("", number, "")


class LocalProcess:
    """Another process of this host, for as long as this object is open.

    Args:
        process: which.

    Raises:
        OSError: it cannot be seen from here: it runs elsewhere, or has ended.
    """

    def __init__(self, process: ProcessId) -> None:
        self._stat = os.open(f"/proc/{process.number}/stat", os.O_RDONLY | os.O_CLOEXEC)
        fields = self._look()
        if len(fields) <= _STARTED_AT or fields[_STARTED_AT] != process.started:
            self.close()
            raise ProcessLookupError(f"process {process.number} is another one")

    def runs(self) -> bool:
        """False while it is stopped, and when it has ended."""
        fields = self._look()
        return bool(fields) and fields[_STATE_AT] not in _STILL

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._stat)

    def _look(self) -> list[str]:
        try:
            return _fields(os.pread(self._stat, _MOST_BYTES, 0))
        except OSError:
            return []


def _fields(stat: bytes) -> list[str]:
    """The kernel's fields of a process, from its state on; the name before may hold anything."""
    return stat.rpartition(b") ")[2].decode().split()
