"""Workers in processes of their own, which do what a test tells them, and can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import rpc
from tests.free_ports import free_port
from tests.processes import ready_made

T = TypeVar("T")

SECONDS_TO_ANSWER = 100.0
_SECONDS_TO_END = 20.0


class WorkerProcess:
    """One process. :meth:`do` runs a function in its main thread, :meth:`begin` does not wait."""

    def __init__(self) -> None:
        context = ready_made()
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self._ours.send((function, args, kwargs))

    def result(self) -> Any:
        assert self._ours.poll(SECONDS_TO_ANSWER), "the worker does not answer"
        value, error = self._ours.recv()
        if error is not None:
            raise error
        return value

    def do(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        self.begin(function, *args, **kwargs)
        result: T = self.result()
        return result

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Ends the process, however it fares."""
        with contextlib.suppress(ProcessLookupError, OSError):
            self.send_signal(signal.SIGCONT)
            self._ours.send(None)
        self.process.join(_SECONDS_TO_END)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._ours.close()
        self.process.close()


class ProcessGroup:
    """Workers of one dynamic group, each a process, that are killed and started again by name.

    Args:
        folder: where they meet.
        backend: of the group.
        join: called in each with the backend, the URL, its name and its rank.
    """

    def __init__(self, folder: Path, backend: str, join: Callable[..., object]) -> None:
        self._join, self._backend, self._url = join, backend, f"file://{folder}/meeting"
        self.workers: dict[str, WorkerProcess] = {}
        self.ranks: dict[str, int] = {}

    def start(self, *names: str) -> None:
        for name in names:
            rank = self.ranks.setdefault(name, len(self.ranks))
            self.workers[name] = WorkerProcess()
            self.workers[name].begin(self._join, self._backend, self._url, name, rank)
        for name in names:
            self.workers[name].result()

    def kill(self, name: str) -> None:
        worker = self.workers.pop(name)
        worker.send_signal(signal.SIGKILL)
        worker.process.join()
        worker.end()

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()


def _serve(orders: Connection) -> None:
    while (order := orders.recv()) is not None:
        function, args, kwargs = order
        try:
            outcome = function(*args, **kwargs), None
        except Exception as error:
            outcome = None, error
        orders.send(outcome)
    os._exit(0)


# --- What tests tell them to do


def options(backend: str, url: str, **settings: Any) -> rpc.RpcBackendOptions:
    kind = {
        "TENSORPIPE": rpc.TensorPipeRpcBackendOptions,
        "TENSORWIRE": rpc.TensorWireRpcBackendOptions,
    }[backend]
    return kind(init_method=url, **settings)


def join(
    backend: str, url: str, name: str, rank: int, world_size: int | None = None, **settings: Any
) -> None:
    """``init_rpc``; without ``world_size``, into a dynamic group."""
    made = options(backend, url, **settings)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=made)


def call(to: str, function: Callable[..., T], *args: Any, timeout: float = -1) -> T:
    return rpc.rpc_sync(to, function, args, timeout=timeout)


def names() -> list[str]:
    return [worker.name for worker in rpc.workers()]


def served() -> int:
    """Counts the calls that run here now."""
    return len(rpc.debug_info()["serving"])


def leave(graceful: bool = True, timeout: float = 30) -> None:
    rpc.shutdown(graceful, timeout)


@contextlib.contextmanager
def joined_pair(backend: str, **settings: object) -> Iterator[list[WorkerProcess]]:
    """Two workers in one group, each a process."""
    url = f"tcp://127.0.0.1:{free_port()}"
    workers = [WorkerProcess(), WorkerProcess()]
    try:
        for rank, worker in enumerate(workers):
            worker.begin(join, backend, url, f"worker{rank}", rank, 2, **settings)
        for worker in workers:
            worker.result()
        yield workers
    finally:
        for worker in workers:
            worker.end()
