"""A worker in a process of its own that answers every request with what it carries."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from rpc.ids import Life
from rpc.transports.base import Peer
from rpc.transports.tensorwire import Settings, TensorWireTransport
from rpc.worker_info import WorkerInfo
from tests.processes import ready_made
from tests.rpc.transports.conformance import Worker, echo


class _Echo(Worker):
    """Keeps no record of what it received."""

    def deliver(self, sender: Life, frame: object, in_batch: bool = False) -> None:
        echo(self, sender.worker, frame)  # type: ignore[arg-type]


def _serve(orders: Connection, settings: Settings) -> None:
    worker = _Echo(TensorWireTransport(settings), WorkerInfo("echo", 1))
    worker.start()
    orders.send(worker.peer())
    while (order := orders.recv()) is not None:
        worker.transport.add_peer(order)
        orders.send("added")
    worker.close()


@dataclass(frozen=True, slots=True)
class EchoProcess:
    """The process, seen from here.

    Args:
        process: running.
        orders: to it.
        peer: it, as a peer.
    """

    process: BaseProcess
    orders: Connection
    peer: Peer

    def add(self, worker: Worker) -> None:
        """Makes the process and a worker here know each other."""
        worker.transport.add_peer(self.peer)
        self.orders.send(worker.peer())
        self.orders.recv()

    def cpu_seconds(self) -> float:
        """Processor time of all its threads, to the nanosecond."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def resident_bytes(self) -> int:
        """Memory it has resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def end(self) -> None:
        """Lets it close its transport and exit, if it still runs."""
        if self.process.is_alive():
            self.orders.send(None)
        self.process.join(20)
        self.orders.close()
        self.process.close()


def start_echo_process(settings: Settings) -> EchoProcess:
    """Starts an echo process with the given settings."""
    context = ready_made()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, settings), daemon=True)
    process.start()
    there.close()
    return EchoProcess(process, here, here.recv())
