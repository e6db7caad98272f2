"""A running group with a key, and somebody without it who tries to break the group."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from rpc.group.member_list import MemberTable
from rpc.group.signed_store import SignedStore
from tests import waiting
from tests.free_ports import free_port
from tests.rpc.stores import record
from tests.rpc.worker_processes import WorkerProcess, call, join, leave, names

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_server"), pytest.mark.timeout(300)]

until = partial(waiting.until, seconds=60, pause=0.05)

_KEY = b"the key of the group that is attacked"
_IDLE_CONNECTIONS = 700
_MOST_DESCRIPTORS = 512
_FLOOD_BYTES = 256 << 20


def allow_descriptors(most: int) -> None:
    """Lets this process have as many descriptors at the same time."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def holdings() -> tuple[int, int]:
    """The number of descriptors, and the MiB of memory, that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize() >> 20


def listening_ports() -> set[int]:
    """The TCP ports at which this process listens."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{number}"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in own
    }


def store_memory(port: int) -> int:
    """The MiB of memory that the process has which keeps the store at a port."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes().split(b"\0")
            if b"127.0.0.1:%d" % port in command:
                pages = int((folder / "statm").read_text().split()[1])
                return pages * resource.getpagesize() >> 20
    raise AssertionError("there is no such process")


class Attacked:
    """Alice, who hosts the store, and bob."""

    def __init__(self) -> None:
        self.port = free_port()
        self.alice, self.bob = self.workers = [WorkerProcess() for _ in range(2)]

    def begin(self) -> None:
        self.bob.do(allow_descriptors, _MOST_DESCRIPTORS)
        url, settings = f"tcp://127.0.0.1:{self.port}", {"group_key": _KEY, "liveness_timeout": 2.0}
        for rank, worker in enumerate(self.workers):
            worker.do(join, "TENSORWIRE", url, ("alice", "bob")[rank], rank, **settings)
        until(self.is_whole)

    def is_whole(self) -> bool:
        return all(worker.do(names) == ["alice", "bob"] for worker in self.workers)


@pytest.fixture(scope="module")
def group() -> Iterator[Attacked]:
    made = Attacked()
    try:
        made.begin()
        yield made
        made.bob.do(leave)
        made.alice.do(leave)
    finally:
        for worker in made.workers:
            worker.end()


def test_idle_connections_and_floods_neither_fill_a_worker_nor_have_it_expelled(
    group: Attacked,
) -> None:
    descriptors, memory = group.bob.do(holdings)
    junk = os.urandom(1 << 16)
    with ExitStack() as held:
        for port in group.bob.do(listening_ports):
            for number in range(_IDLE_CONNECTIONS):
                stranger = held.enter_context(socket.socket())
                stranger.settimeout(1.0)
                with contextlib.suppress(OSError):
                    stranger.connect(("127.0.0.1", port))
                    stranger.setblocking(False)
                    for _ in range(_FLOOD_BYTES // len(junk) if number == 0 else 0):
                        stranger.send(junk)
        assert group.alice.do(call, "bob", os.getpid) == group.bob.process.pid
        now_descriptors, now_memory = group.bob.do(holdings)
        assert now_descriptors < descriptors + 200
        assert now_memory < memory + 64
        assert group.is_whole()


def test_who_fills_the_store_takes_nothing_from_its_host_and_others_still_join(
    group: Attacked,
) -> None:
    _, memory = group.alice.do(holdings)
    store = TCPStore("127.0.0.1", group.port, wait_for_workers=False)
    for number in range(_FLOOD_BYTES >> 20):
        store.set(f"flood/{number}", "x" * (1 << 20))
    assert store.num_keys() < _FLOOD_BYTES >> 20
    _, now_memory = group.alice.do(holdings)
    assert now_memory < memory + 64
    assert store_memory(group.port) < 200
    carol = WorkerProcess()
    try:
        url = f"tcp://127.0.0.1:{group.port}"
        carol.do(join, "TENSORWIRE", url, "carol", 2, group_key=_KEY, liveness_timeout=2.0)
        assert carol.do(call, "bob", os.getpid) == group.bob.process.pid
        carol.do(leave)
    finally:
        carol.end()
    until(group.is_whole)


def test_who_writes_to_the_store_without_the_key_is_not_heard(group: Attacked) -> None:
    """With torch's client, which has none: it sees nothing of the group's, and changes nothing."""
    store = TCPStore("127.0.0.1", group.port, wait_for_workers=False)
    forged = MemberTable(SignedStore(store, b"another key, which is a guess", "tensorwire"))
    assert MemberTable(SignedStore(store, _KEY, "tensorwire")).members() == []
    forged.join(record(1, None, name="bob", incarnation=9))
    for key in ("changes", "mode", "first", "names/1", "member/bob", "id/1"):
        store.delete_key(f"tensorwire/{key}")
        store.set(f"tensorwire/{key}", "now")
    pid = group.bob.process.pid
    assert all(group.alice.do(call, "bob", os.getpid) == pid for _ in range(20))
    assert group.is_whole()
