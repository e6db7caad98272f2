"""A transport over another one, in which messages of chosen types fail or come late.

A message that is sent again when sending fails comes late, out of order and,
if it is a notice, twice, as if the confirmation of a sending had been lost. A
call is not sent again: its caller gets an error in place of the reply.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import ClassVar

import torch

from rpc._testing.kinds import KINDS, REPEATED, Callables
from rpc.errors import RpcError
from rpc.ids import Life
from rpc.runtime.executor import SECONDS_TO_END
from rpc.runtime.threads import Thread
from rpc.transports.base import Frame, FrameKind, MapsDevices, Peer, Receiver, Transport
from rpc.wire.messages import Reply, Status
from rpc.wire.remote_errors import encode_error
from rpc.worker_info import WorkerInfo

_SECONDS_BETWEEN_SENDINGS = 0.05


@dataclass(frozen=True, slots=True)
class Faults:
    """The messages that fail and those that are late.

    Args:
        fail: types of messages whose sending fails.
        delay: seconds by which a type is late.
        failures: how often each sending fails.
    """

    fail: frozenset[str]
    delay: Mapping[str, float]
    failures: int

    @classmethod
    def of(cls, fail: Sequence[str], delay: Mapping[str, float], failures: int) -> Faults:
        """Checks the values.

        Raises:
            ValueError: there is no message of such a type, or a number is negative.
        """
        unknown = {*fail, *delay} - KINDS
        if unknown:
            raise ValueError(f"no such messages: {sorted(unknown)}; there are: {sorted(KINDS)}")
        if failures < 0 or any(seconds < 0 for seconds in delay.values()):
            raise ValueError("numbers of failures and seconds of delay must not be negative")
        return cls(frozenset(fail), dict(delay), failures)

    def fails(self, kinds: set[str]) -> bool:
        """True if sending such a frame fails."""
        return self.failures > 0 and not self.fail.isdisjoint(kinds)

    def seconds(self, kinds: set[str]) -> float:
        """The seconds by which such a frame is late."""
        return max((self.delay.get(kind, 0.0) for kind in kinds), default=0.0)


class FaultyTransport:
    """See the module, and ``base.Transport``.

    Args:
        inner: carries what does get sent.
        faults: what does not, and what is late.
        callables: tells the types of frames.
    """

    inline_handlers: ClassVar[int] = 0
    inline_completions: ClassVar[int] = 0
    delivers_while_waiting: ClassVar[bool] = True

    def __init__(self, inner: Transport, faults: Faults, callables: Callables) -> None:
        self.callables = callables
        self._inner = inner
        self._faults = faults
        self._late = _Late()
        self._info: WorkerInfo
        self._receiver: Receiver
        self._lives: dict[int, Life] = {}

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """Starts what it is made of."""
        self._info, self._receiver = info, receiver
        self._late.start(f"faulty-{info.name}")
        return self._inner.start(info, incarnation, receiver)

    def add_peer(self, peer: Peer) -> None:
        """Makes ``peer`` known."""
        self._lives[peer.info.id] = peer.life
        self._inner.add_peer(peer)

    def remove_peer(self, worker_id: int) -> None:
        """Forgets a peer."""
        self._inner.remove_peer(worker_id)

    @property
    def host_moves(self) -> Set[tuple[int, bool]]:
        """The workers at which tensors in host memory do not stay there."""
        inner = self._inner
        return inner.host_moves if isinstance(inner, MapsDevices) else frozenset()

    def device_map(self, worker_id: int) -> Mapping[torch.device, torch.device]:
        """The devices for tensors to a peer."""
        inner = self._inner
        return inner.device_map(worker_id) if isinstance(inner, MapsDevices) else {}

    def send(self, to: int, frame: Frame) -> None:
        """Sends, or does not; see the module."""
        kinds = self.callables.kinds(frame)
        seconds = self._faults.seconds(kinds)
        if not self._faults.fails(kinds):
            self._send_after(seconds, to, frame)
        elif frame.kind is FrameKind.REQUEST and kinds.isdisjoint(REPEATED):
            self._late.put(0.0, lambda: self._fail(to, frame, kinds))
        else:
            seconds += self._faults.failures * _SECONDS_BETWEEN_SENDINGS
            self._send_after(seconds, to, frame)
            if frame.kind is FrameKind.NOTICE:
                self._send_after(seconds + _SECONDS_BETWEEN_SENDINGS, to, frame)

    def look_again(self, to: int) -> None:
        """See ``base.Transport.look_again``."""
        self._inner.look_again(to)

    def attend(self) -> None:
        """See ``base.Transport.attend``."""
        self._inner.attend()

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Waits as the inner transport does."""
        self._inner.wait(done, block)

    def wake(self) -> None:
        """See ``base.Transport.wake``."""
        self._inner.wake()

    def close(self, flush_seconds: float, handler_seconds: float = SECONDS_TO_END) -> None:
        """Stops; what is late is not sent any more."""
        self._late.stop()
        self._inner.close(flush_seconds, handler_seconds)

    def _send_after(self, seconds: float, to: int, frame: Frame) -> None:
        if not seconds:
            self._inner.send(to, frame)
        else:
            self._late.put(seconds, lambda: self._send_late(to, frame))

    def _send_late(self, to: int, frame: Frame) -> None:
        try:
            self._inner.send(to, frame)
        except RpcError as error:
            if frame.kind is FrameKind.REQUEST:
                self._answer_with(error, to, frame)

    def _fail(self, to: int, frame: Frame, kinds: set[str]) -> None:
        names = ", ".join(sorted(kinds))
        self._answer_with(RpcError(f"Send attempt failed intentionally for {names}"), to, frame)

    def _answer_with(self, error: RpcError, to: int, frame: Frame) -> None:
        header = Reply(Status.ERROR, plain=False).encode()
        payload = encode_error(error, self._info)
        reply = Frame(FrameKind.REPLY, frame.correlation, header, payload)
        self._receiver.deliver(self._lives[to], reply)
        self._inner.wake()


class _Late:
    """A thread that runs tasks at their time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, seconds: float, act: Callable[[], None]) -> None:
        due = time.monotonic() + seconds
        with self._changed:
            heapq.heappush(self._due, (due, next(self._numbers), act))
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (act := self._next()) is not None:
            act()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._stopping:
                left = self._due[0][0] - time.monotonic() if self._due else None
                if left is not None and left <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(left)
        return None
