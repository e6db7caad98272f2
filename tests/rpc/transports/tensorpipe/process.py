"""Lets a test in one process use TensorPipe transports in others, as if they were its own.

torch allows one TensorPipe agent per process, so each :class:`Workplace` is a
process that runs one transport after the other; :class:`RemoteTransport` is a
transport whose every method runs there, and which tells its receiver here what
the real one is told there.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from rpc.errors import RpcError
from rpc.ids import Life
from rpc.options import TensorPipeRpcBackendOptions
from rpc.transports.base import Frame, FrameKind, Patience, Peer, Receiver
from rpc.transports.tensorpipe import scheduling
from rpc.transports.tensorpipe import sending as tensorpipe_sending
from rpc.transports.tensorpipe import transport as tensorpipe
from rpc.transports.tensorpipe import wire as tensorpipe_wire
from rpc.transports.tensorpipe.device_readiness import make_ready
from rpc.transports.tensorpipe.transport import TensorPipeTransport
from rpc.worker_info import WorkerInfo
from tests.processes import ready_made
from tests.rpc.transports.conformance import Worker
from tests.rpc.transports.cutter import Cutter

SECONDS = 60.0


class Workplace:
    """A process that runs TensorPipe transports, one at a time.

    Args:
        errors: the file that its stderr goes to.
    """

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        context = ready_made()
        self._here, there = context.Pipe()
        self._process = context.Process(target=_work, args=(there, str(errors)), daemon=True)
        self._process.start()
        there.close()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.receiver: Receiver | None = None
        self.busy = False
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._tell)]
        for thread in self._threads:
            thread.start()

    def call(self, method: str, *arguments: Any) -> Any:
        """Runs a method of the process's transport (or of ``_Bench``), and waits for it."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = future
            self._here.send_bytes(_pack((number, method, arguments)))
        return future.result(SECONDS)

    def drain(self) -> None:
        """Returns when the receiver was told everything so far."""
        if threading.current_thread() is not self._threads[1]:
            told = threading.Event()
            self._events.put(told.set)
            assert told.wait(SECONDS)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends the process as a crash would."""
        self._process.kill()

    def end(self) -> None:
        """Lets the process end, and waits for it."""
        with contextlib.suppress(OSError):
            self._here.send_bytes(_pack((0, "exit", ())))
        self._process.join()
        self._process.close()
        for thread in self._threads:
            thread.join()
        self._here.close()

    def _read(self) -> None:
        while True:
            try:
                kind, *what = pickle.loads(self._here.recv_bytes())
            except (EOFError, OSError):
                break
            if kind == "result":
                number, value, error = what
                future = self._pending.pop(number)
                future.set_exception(error) if error else future.set_result(value)
            elif self.receiver is not None:
                method = getattr(self.receiver, kind)
                self._events.put(lambda method=method, what=what: method(*what))
        for future in self._pending.values():
            future.set_exception(ConnectionError("the process ended"))
        self._events.put(None)

    def _tell(self) -> None:
        while (event := self._events.get()) is not None:
            with contextlib.suppress(ConnectionError):  # it answered, and the process was killed
                event()


@contextlib.contextmanager
def workplaces(errors: Path, count: int) -> Iterator[list[Workplace]]:
    """Some processes, each with a file in the folder ``errors``; ended after the block."""
    made = [Workplace(errors / str(number)) for number in range(count)]
    yield made
    for place in made:
        place.end()


class RemoteTransport:
    """A TensorPipe transport in a :class:`Workplace`."""

    inline_handlers: ClassVar[int] = 0

    def __init__(self, place: Workplace, **options: Any) -> None:
        self.place = place
        place.busy = True
        place.call("make", options)

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        self.place.receiver = receiver
        address: bytes = self.place.call("start", info, incarnation)
        return address

    def add_peer(self, peer: Peer) -> None:
        self.place.call("add_peer", peer)

    def remove_peer(self, worker_id: int) -> None:
        self.place.call("remove_peer", worker_id)

    def watch(self, worker_id: int) -> None:
        self.place.call("watch", worker_id)

    def send(self, to: int, frame: Frame) -> None:
        self.place.call("send", to, _plain(frame))

    def look_again(self, to: int) -> None:
        self.place.call("look_again", to)

    def attend(self) -> None:
        """Its process reads in any case."""

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        if not done():
            block()

    def wake(self) -> None:
        pass

    def close(self, flush_seconds: float, handler_seconds: float = 0.0) -> None:
        if self.place.busy:
            self.place.call("close", flush_seconds)
            self.place.drain()
            self.place.busy = False


def _plain(frame: Frame) -> Frame:
    return frame._replace(payload=bytes(frame.payload))


class _Pickler(pickle.Pickler):
    """Takes tensors of every dtype and device, which torch's own pickling does not."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.is_meta:
            return _unpickle, (b"", value.dtype, value.shape, value.stride(), "meta")
        flat = (
            value.cpu()
            .clone(memory_format=torch.preserve_format)
            .as_strided((value.numel(),), (1,))
        )
        data = flat.contiguous().view(torch.uint8).numpy().tobytes()
        return _unpickle, (data, value.dtype, value.shape, value.stride(), str(value.device))


def _unpickle(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], device: str
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if data:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        tensor.copy_(flat.as_strided(shape, stride))
    return tensor


def _pack(message: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(message)
    return buffer.getvalue()


class _Bench:
    """The work of a workplace's process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        self.transport: TensorPipeTransport | None = None
        self.cutter: Cutter | None = None
        self.patches = pytest.MonkeyPatch()

    def make(self, options: dict[str, Any]) -> None:
        self.patches.undo()
        self.cutter = Cutter()
        self.transport = TensorPipeTransport(TensorPipeRpcBackendOptions(**options))

    def start(self, info: WorkerInfo, incarnation: int) -> bytes:
        assert self.transport is not None
        return self.transport.start(info, incarnation, self)

    def deliver(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        self.tell("deliver", sender, _plain(frame), in_batch)

    take_request = take_reply = deliver

    def patience(self, correlation: int) -> Patience:
        return Patience.WAITS

    def peer_lost(self, life: Life, reason: str) -> None:
        self.tell("peer_lost", life, reason)

    def native_threads(self) -> list[str]:
        tasks = Path("/proc/self/task").iterdir()
        return sorted((task / "comm").read_text().strip() for task in tasks)

    def time_slices_of_reactors(self) -> list[float]:
        return [scheduling.slice_seconds(thread) for thread in scheduling.reactors()]

    def start_another(self) -> None:
        another = TensorPipeTransport(TensorPipeRpcBackendOptions())
        another.start(WorkerInfo("another", 9), 1, self)

    def cut(self) -> int:
        """Breaks every connection of the transport; returns how many it were."""
        assert self.cutter is not None
        return self.cutter.cut()

    def forget_shared_memory(self) -> None:
        """Lets go of what peers handed over."""
        assert self.transport is not None
        for link in self.transport.peers.links.values():
            link.shared.close()

    def take_host_memory_for_devices(self) -> None:
        """A device is made ready before tensors arrive on it."""
        self.patches.setattr(tensorpipe_sending, "lands_on_device", lambda *_: True)

    def have_no_devices(self, questions: int) -> None:
        """None that peers ask for is there so many times; then they are."""
        left = iter(range(questions))
        self.patches.setattr(
            tensorpipe,
            "make_ready",
            lambda *what: make_ready(*what) if next(left, None) is None else "it has none",
        )

    def choke_on(self, words: bytes) -> None:
        """Calls that say this cannot be read, and answers that do cannot be written."""

        def unpack(data: bytes, tensors: list[torch.Tensor]) -> Any:
            if words in data:
                raise ValueError("this cannot be read")
            return read(data, tensors)

        def reduce(answer: Any) -> Any:
            if words in answer.data:
                raise ValueError("this cannot be written")
            return write(answer)

        read, write = tensorpipe_wire.unpack, tensorpipe_wire.TorchAnswer.__reduce__
        self.patches.setattr(tensorpipe_wire, "unpack", unpack)
        self.patches.setattr(tensorpipe_wire.TorchAnswer, "__reduce__", reduce)

    def early_calls(self) -> int:
        assert self.transport is not None
        return len(self.transport.peers.early)

    def ask_until_it_fails(self, to: int) -> tuple[int, str]:
        """Sends requests until one cannot be sent; returns how many could, and what was wrong."""
        assert self.transport is not None
        for number in itertools.count(1 << 40):
            try:
                self.transport.send(to, Frame(FrameKind.REQUEST, number, b"h"))
            except RpcError as error:
                return number - (1 << 40), f"{type(error).__name__}: {error}"
        raise AssertionError

    def in_flight(self, worker_id: int) -> int:
        """Bytes of requests to a peer that were not replied to."""
        assert self.transport is not None
        return self.transport.peers.links[worker_id].window.held

    def replies_in_flight(self, worker_id: int) -> int:
        """Bytes of replies to a peer that it has not said it has."""
        assert self.transport is not None
        return self.transport.peers.links[worker_id].reply_window.held

    def reply(self, to: int, correlation: int, nbytes: int) -> None:
        """Answers a request."""
        assert self.transport is not None
        self.transport.send(to, Frame(FrameKind.REPLY, correlation, b"", bytes(nbytes)))

    def tell(self, *message: Any) -> None:
        data = _pack(message)
        with self.lock:
            self.connection.send_bytes(data)

    def run(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        owner = self if hasattr(_Bench, method) else self.transport
        try:
            value, error = getattr(owner, method)(*arguments), None
        except Exception as raised:
            value, error = None, raised
        self.tell("result", number, value, error)


_MAY_TAKE_LONG = frozenset({"close", "ask_until_it_fails", "reply"})


def _work(connection: Connection, errors: str) -> None:
    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    bench = _Bench(connection)
    while True:
        try:
            number, method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if method == "exit":
            return
        if method in _MAY_TAKE_LONG:
            threading.Thread(target=bench.run, args=(number, method, arguments)).start()
        else:
            bench.run(number, method, arguments)


def place_of(worker: Worker) -> Workplace:
    assert isinstance(worker.transport, RemoteTransport)
    return worker.transport.place


def shares(worker: Worker) -> int:
    """Counts the shared segments that the process of a worker has mapped."""
    assert isinstance(worker.transport, RemoteTransport)
    maps = Path(f"/proc/{worker.transport.place.pid}/maps").read_text()
    return sum("memfd:tensorwire" in line for line in maps.splitlines())
