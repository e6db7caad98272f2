"""The interface of transports, which hand frames to other workers of the group.

A transport moves frames and reports peers that are gone. It does not know what
a frame means, match replies to callers, run handlers or keep time for calls:
all of that is the agent's.

What every implementation promises (``tests/rpc/transports/conformance.py``):

- A frame that ``send`` accepted is delivered exactly once, or ``peer_lost`` is
  reported for its destination. No order is promised between frames.
- ``send`` raises before anything leaves when the frame cannot be sent: the
  peer is unknown or lost, or a tensor's device has no place at the other end.
- ``deliver``, ``take_request``, ``take_reply`` and ``peer_lost`` are called on the
  transport's threads, several at a time, never while a lock of the transport is held. They return
  quickly, except a request where ``inline_handlers`` says that it may block.
- After ``close`` returned, none of them is called again, and every thread,
  descriptor and segment of the transport is gone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from rpc.errors import FrameError
from rpc.ids import Life
from rpc.worker_info import WorkerInfo


class FrameKind(enum.IntEnum):
    """Kinds of frames, by what the sender expects to happen."""

    REQUEST = 1
    """Exactly one REPLY frame with the same correlation comes back."""
    REPLY = 2
    """Answers a request; sent to the worker the request came from."""
    NOTICE = 3
    """Nothing comes back; correlation is 0."""


class Unreceived(bytes):
    """The payload of a frame whose payload and tensors came, but could not be taken in: why."""


class Frame(NamedTuple):
    """The unit a transport carries.

    Args:
        kind: see :class:`FrameKind`.
        correlation: 64-bit id, unique per sender among its outstanding requests.
        header: the message header, a few dozen bytes.
        payload: pickled user value, from nothing to gigabytes. One that arrives may be
            :class:`Unreceived`; then there are no tensors either, and the header may have
            lost its end, where small tensors are.
        tensors: strided, non-overlapping and dense, detached; dtype, shape and
            strides arrive as they are. Small tensors never come here: the codec
            puts them into the header.
    """

    kind: FrameKind
    correlation: int
    header: bytes
    payload: bytes | bytearray | memoryview = b""
    tensors: tuple[torch.Tensor, ...] = ()


def unreceived(frame: Frame, size: int, sender: str, problem: str) -> Frame:
    """Returns what is delivered instead of a message that cannot be taken in: its call alone fails.

    Args:
        frame: the message's kind, correlation and header.
        size: of its payload and tensors, in bytes; 0 if that is not known.
        sender: who sent it.
        problem: why not.

    Raises:
        FrameError: there is no call.
    """
    what = f"a message{f' of {size} bytes' if size else ''} from worker {sender!r}"
    why = f"{what} could not be taken in: {problem}"
    if frame.kind is FrameKind.NOTICE:
        raise FrameError(why)
    return Frame(frame.kind, frame.correlation, frame.header, Unreceived(why.encode()))


class Patience(enum.Enum):
    """Answers to whether a request may wait until there is room for it on the way."""

    WAITS = "waits"
    """The request may wait, as long as its call lasts."""
    HURRIES = "hurries"
    """The request must not wait, nor is it refused: what would make room may wait for it."""
    OVER = "over"
    """The call has ended: the request is not to be sent any more."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker as transports see it.

    Args:
        info: name and id.
        incarnation: which life of that name; a worker that returns has a higher one.
        address: what the peer's transport returned from ``start``.
        liveness: how to ask it for signs of life (``rpc.group.probes``), which transports do not;
            empty if it gives none.
    """

    info: WorkerInfo
    incarnation: int
    address: bytes
    liveness: str = ""

    @property
    def life(self) -> Life:
        """The worker's id, and which life of it."""
        return Life(self.info.id, self.incarnation)


class Receiver(Protocol):
    """The agent, as a transport sees it."""

    def deliver(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        """Takes one frame from a peer. That life may be over by then, and a later one known.

        Args:
            sender: who sent it.
            frame: what came.
            in_batch: others, that came with it or come after, wait until this returns, so
                that nothing which could block may run here.
        """

    def take_request(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        """Takes a request, as :meth:`deliver` does, for transports that look at the kind."""

    def take_reply(self, sender: Life, frame: Frame, in_batch: bool = False) -> None:
        """Takes a reply, as :meth:`deliver` does, for transports that look at the kind."""

    def peer_lost(self, life: Life, reason: str) -> None:
        """Learns that a peer cannot be reached any more; called once for each.

        A later life of the worker may be known by then.
        """

    def patience(self, correlation: int) -> Patience:
        """Says whether a request of its own may wait; asked only if one would have to.

        When the answer changes, :meth:`Transport.look_again` follows.
        """


class Transport(Protocol):
    """One worker's end of a way to move frames. See the module's promises."""

    inline_handlers: ClassVar[int]
    """The number of requests' handlers that may run, and block, on delivering threads at once.

    Above 0 only if the transport goes on delivering while that many are blocked.
    """

    inline_completions: ClassVar[int]
    """The number of replies whose callbacks may run, and block, on delivering threads."""

    delivers_while_waiting: ClassVar[bool]
    """True if delivery goes on while a delivering thread waits for a reply itself."""

    def start(self, info: WorkerInfo, incarnation: int, receiver: Receiver) -> bytes:
        """Begins to listen; returns the address to publish to the other workers."""

    def add_peer(self, peer: Peer) -> None:
        """Makes ``peer`` known, so that frames can be sent to and accepted from it.

        Called for this worker itself too: frames to oneself take the same path.
        A peer may be added again under a higher incarnation after it was lost.
        """

    def remove_peer(self, worker_id: int) -> None:
        """Forgets a peer that left or was declared lost; drops its connections.

        Frames from it are refused from then on; ``peer_lost`` is not reported."""

    def send(self, to: int, frame: Frame) -> None:
        """Queues or sends ``frame``; does not wait for its delivery.

        Raises:
            WorkerLostError: the peer was lost.
            UnknownWorkerError: the peer was never added.
            DeviceMapError: a tensor's device is not mapped for this peer.
            QueueFullError: the bound on bytes in flight was reached and the
                transport was told not to block.
            CallCancelledError: the call ended while the request waited for room.
        """

    def look_again(self, to: int) -> None:
        """Drops requests to a peer that wait to be sent although their calls have ended."""

    def attend(self) -> None:
        """Has the reply to the request just sent read, as no thread is about to :meth:`wait`.

        Called after :meth:`send`. A transport whose waiting threads read may have to wake one
        that reads for the others.
        """

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Waits until ``done()``, on behalf of a caller that needs a reply.

        ``block`` sleeps until ``done()`` holds. A transport without threads to
        spare reads here instead; the others simply call ``block``.
        """

    def wake(self) -> None:
        """Makes a thread in :meth:`wait` look at its ``done`` again.

        To be called when something other than ``deliver`` or ``peer_lost`` may
        have made one true: a deadline, a callback on another thread. Cheap when
        nobody waits; must not be called with a lock held that a ``done`` takes.
        """

    def close(self, flush_seconds: float, handler_seconds: float = ...) -> None:
        """Stops.

        Args:
            flush_seconds: what frames already accepted get to leave in.
            handler_seconds: what handlers that run on threads of this get to end in;
                those that run on are named in the log and abandoned.
        """


@runtime_checkable
class KnowsOutstanding(Receiver, Protocol):
    """A receiver that can say how many replies are to come, and calls ``Transport.attend``."""

    @property
    def outstanding(self) -> Callable[[], int]:
        """Counts its requests that have no reply yet."""


@runtime_checkable
class LendsMemory(Protocol):
    """A transport that reaches peers through shared memory, and lets its users write there."""

    def lend_memory(self, to: int, kind: FrameKind, nbytes: int) -> object | None:
        """A writable buffer; a tensor in it goes to the peer without being copied, once.

        Args:
            to: the peer.
            kind: of the frames that may carry the tensor.
            nbytes: what is needed.

        Returns:
            None where there is no such memory, now or for good.
        """


@runtime_checkable
class MapsDevices(Protocol):
    """A transport that can take tensors from devices other than the CPU to the peer's."""

    @property
    def host_moves(self) -> Set[tuple[int, bool]]:
        """The peers to whose devices tensors in host memory go, in requests (True) or replies.

        Such a tensor must be given to the transport, however small.
        """

    def device_map(self, worker_id: int) -> Mapping[torch.device, torch.device]:
        """The peer's device for each of this worker's that requests may use; maybe none."""
