"""Two hosts on one machine: network namespaces, joined by a cable that can be cut."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import rpc
from rpc import WorkerLostError
from rpc.transports.host.identity import host_identity
from tests.rpc.worker_processes import WorkerProcess, call, join, leave
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.timeout(400),
    pytest.mark.xdist_group("two-hosts"),
]

ADDRESSES = ("10.231.77.1", "10.231.77.2")
CABLE = "twcable"
_NEW_NETWORK = 0x40000000


def ip(*arguments: str) -> str:
    done = subprocess.run(
        ["ip", *arguments], check=True, capture_output=True, timeout=20, text=True
    )
    return done.stdout


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one end of the cable."""

    name: str
    address: str

    def plug_in(self) -> None:
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", CABLE)
        ip("-n", self.name, "link", "set", CABLE, "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def is_connected(self) -> bool:
        """True if the cable carries: from then on programs are told its address."""
        return " state UP " in ip("-n", self.name, "link", "show", CABLE)

    def unplug(self) -> None:
        ip("-n", self.name, "link", "set", CABLE, "down")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    made = [Host(f"twhost{os.getpid()}-{i}", address) for i, address in enumerate(ADDRESSES)]
    left, right = made
    existing: list[Host] = []
    try:
        try:
            for host in made:
                ip("netns", "add", host.name)
                existing.append(host)
            cable = ("link", "add", CABLE, "netns", left.name, "type", "veth")
            ip(*cable, "peer", "name", CABLE, "netns", right.name)
            for host in made:
                host.plug_in()
            until(lambda: all(host.is_connected() for host in made))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield left, right
    finally:
        for host in existing:
            ip("netns", "delete", host.name)


def move_to(namespace: str) -> None:
    """Moves the running thread, and what it starts from now on, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(descriptor, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)
    os.environ["TP_SOCKET_IFNAME"] = CABLE


@pytest.fixture(params=["TENSORWIRE", "TENSORPIPE"])
def workers(
    request: pytest.FixtureRequest, hosts: tuple[Host, Host]
) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """One on each host, in one group."""
    made = (WorkerProcess(), WorkerProcess())
    url = f"tcp://{ADDRESSES[0]}:29577"
    try:
        for worker, host in zip(made, hosts, strict=True):
            worker.do(move_to, host.name)
        for rank, worker in enumerate(made):
            name, limits = f"worker{rank}", {"liveness_timeout": 2.0, "rpc_timeout": 60.0}
            worker.begin(join, request.param, url, name, rank, 2, **limits)
        for worker in made:
            worker.result()
        yield made
    finally:
        for worker in made:
            worker.end()


def echo(value: torch.Tensor) -> torch.Tensor:
    return value


def exchange(to: str) -> bool:
    """True if calls, large tensors and references come through."""
    large = torch.arange(3 << 20, dtype=torch.int32)
    echoed = rpc.rpc_async(to, echo, (large,))
    total = rpc.rpc_sync(to, torch.add, (torch.ones(2), 1))
    held = rpc.remote(to, torch.full, ((2, 2), 7.0))
    product = held.rpc_sync().matmul(torch.eye(2))
    return bool(
        torch.equal(echoed.wait(), large)
        and torch.equal(total, torch.full((2,), 2.0))
        and torch.equal(product, held.to_here())
    )


def test_calls_tensors_and_references_cross_the_network_both_ways(
    workers: tuple[WorkerProcess, WorkerProcess],
) -> None:
    left, right = workers
    assert left.do(partial(host_identity, "net")) != right.do(partial(host_identity, "net"))
    assert left.do(exchange, "worker1")
    assert right.do(exchange, "worker0")
    for worker in workers:
        worker.begin(leave)
    for worker in workers:
        worker.result()


def test_a_cut_cable_fails_pending_and_later_calls(
    workers: tuple[WorkerProcess, WorkerProcess], hosts: tuple[Host, Host]
) -> None:
    left, _ = workers
    assert left.do(exchange, "worker1")
    left.begin(call, "worker1", time.sleep, 3600, timeout=0)
    hosts[0].unplug()
    with pytest.raises(WorkerLostError, match="worker1"):
        left.result()
    with pytest.raises(WorkerLostError):
        left.do(call, "worker1", os.getpid)
    left.do(leave, graceful=True)
