"""Finds a job's processes by a mark in their environment: their memory, and where they listen."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "TENSORWIRE_ATTACKED"
"""The variable that marks all processes of a job."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_KINDS = {
    b"store_process.py": "store",
    b"liveness_process.py": "signs of life",
    b"tensorwire.launch": "agent",
}
_LISTENS, _ACCEPTS = "0A", "00010000"


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it is now.

    Args:
        pid: its number.
        kind: the role that it plays, in words.
        memory: bytes.
        descriptors: how many.
    """

    pid: int
    kind: str
    memory: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Doors:
    """The places where somebody can reach a job.

    Args:
        tcp: ports.
        udp: ports.
        unix: names of abstract sockets, in hexadecimal.
    """

    tcp: tuple[int, ...] = ()
    udp: tuple[int, ...] = ()
    unix: tuple[str, ...] = ()


def processes(mark: str) -> list[Process]:
    """All processes of the job that has this mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                pages = int((folder / "statm").read_text().split()[1])
                descriptors = len(os.listdir(folder / "fd"))
                found.append(Process(int(folder.name), _kind(folder), pages * _PAGE, descriptors))
    return found


def _kind(folder: Path) -> str:
    words = (folder / "cmdline").read_bytes().split(b"\0")
    names = {word.rpartition(b"/")[2] for word in words}
    return next((kind for name, kind in _KINDS.items() if name in names), "other")


def doors(found: Sequence[Process]) -> Doors:
    """The ports and names at which these processes listen."""
    inodes = {inode for each in found for inode in _sockets(each.pid)}
    tcp = {port for state, port, inode in _rows("tcp") if state == _LISTENS and inode in inodes}
    udp = {port for _, port, inode in _rows("udp") if inode in inodes}
    return Doors(tuple(sorted(tcp)), tuple(sorted(udp)), tuple(sorted(_abstract(inodes))))


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _rows(protocol: str) -> Iterator[tuple[str, int, str]]:
    """State, local port and inode of each socket of the network."""
    for name in (protocol, f"{protocol}6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                row = line.split()
                yield row[3], int(row[1].rpartition(":")[2], 16), row[9]


def _abstract(inodes: set[str]) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]:
            row = line.split(maxsplit=7)
            listens = len(row) == 8 and row[3].decode() == _ACCEPTS and row[7].startswith(b"@")
            if listens and row[6].decode() in inodes:
                yield row[7][1:].hex()
