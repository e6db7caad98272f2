"""One worker of a group, as packages above ``rpc`` see it; ``rpc.extend`` shows it to them.

Owns nothing: each method leads to the part of the worker that does the work.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from rpc.calls.call_parts import CallParts
from rpc.calls.caller import Caller
from rpc.calls.channels import Channels, Handler
from rpc.calls.extension_messages import ExtensionMessages
from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.errors import AgentClosedError, WorkerLostError
from rpc.group.directory import Destination, Directory
from rpc.group.events import MembershipEvent, MembershipEvents
from rpc.group.key_values import KeyValueStore
from rpc.group.signed_store import SignedStore
from rpc.ids import Life
from rpc.observe.progress import Progress
from rpc.observe.watching import progress_of
from rpc.outcomes.futures import Future, wait_in_usual_modes
from rpc.outcomes.sinks import AnswerSink, AwaitedAnswerSink
from rpc.runtime.clock import Clock
from rpc.runtime.current_thread import current
from rpc.runtime.executor import blocking
from rpc.runtime.states import States
from rpc.runtime.torch_modes import function_modes, is_inference
from rpc.transports.base import FrameKind, LendsMemory, MapsDevices
from rpc.worker_info import WorkerInfo

T = TypeVar("T")

_QUANTIZED: Final = frozenset(
    {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)
"""Types whose values mean nothing without a scale."""


class Worker:
    """One worker of a group, as packages above ``rpc`` see it.

    Not to be made: :func:`rpc.extend.worker` returns the current one, and a
    :class:`CallExtension` is given its own.
    """

    __slots__ = (
        "_caller",
        "_channels",
        "_directory",
        "_events",
        "_life",
        "_messages",
        "_shared",
        "_states",
        "_store",
        "living_life",
    )

    living_life: Callable[[int], Life | None]
    """The life of the worker with an id; None if it is no member now."""

    def __init__(
        self,
        life: Life,
        shared: CallParts,
        caller: Caller,
        messages: ExtensionMessages,
        channels: Channels,
        events: MembershipEvents,
        states: States,
        store: Callable[[], SignedStore | None],
        directory: Directory,
    ) -> None:
        self._life = life
        self._shared = shared
        self._caller = caller
        self._messages = messages
        self._channels = channels
        self._events = events
        self._states = states
        self._store = store
        self._directory = directory
        self.living_life = shared.group.living_now.get

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""
        return self._shared.me

    @property
    def life(self) -> Life:
        """Its id and incarnation."""
        return self._life

    @property
    def clock(self) -> Clock:
        """Its time: the machine's, or a test's virtual one."""
        return self._shared.clock

    @property
    def progress(self) -> Progress:
        """Its steps, slow phases and sources of facts, as whoever watches the job sees them."""
        return progress_of(self._states, self.clock)

    def state(
        self,
        key: Hashable,
        factory: Callable[[], T],
        close: Callable[[T], object] | None = None,
        leave: Callable[[T], object] | None = None,
    ) -> T:
        """The object that this worker keeps under ``key``; see :func:`rpc.extend.worker_state`."""
        return self._states.get(key, factory, close, leave)

    def subscribe(self, channel: str, handler: Handler) -> Callable[[], None]:
        """Takes the messages of a channel from now on; see :func:`rpc.extend.subscribe`."""
        return self._channels.subscribe(channel, handler)

    def post(
        self,
        to: Destination | Life,
        channel: str,
        body: bytes = b"",
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Sends a one-way message; see :func:`rpc.extend.post`."""
        life = to if isinstance(to, Life) else self.life_of(to)
        self._channels.post(life, channel, body, tensors)

    def send_buffer(
        self, to: Destination, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """An uninitialized tensor to send to ``to``; see :func:`rpc.extend.send_buffer`."""
        return self._buffer(to, shape, dtype, FrameKind.REQUEST)

    def reply_buffer(
        self, to: Destination, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The same for what a handler returns to ``to``; see :func:`rpc.extend.reply_buffer`."""
        return self._buffer(to, shape, dtype, FrameKind.REPLY)

    def _buffer(
        self, to: Destination, shape: Sequence[int], dtype: torch.dtype, kind: FrameKind
    ) -> torch.Tensor:
        sizes = _sizes(shape)
        _require_plain(dtype)
        transport, count = self._shared.transport, math.prod(sizes)
        peer, memory = self._shared.group.find(to), None
        if isinstance(transport, LendsMemory):
            memory = transport.lend_memory(peer.id, kind, count * dtype.itemsize)
        if memory is None:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(*sizes)

    def store(self, namespace: str) -> KeyValueStore:
        """The group's key-value store; see :func:`rpc.extend.store`."""
        store = self._store()
        if store is None:
            raise AgentClosedError(f"worker {self.info.name!r} has no store, or left its group")
        return KeyValueStore(store, namespace)

    def life_of(self, who: Destination) -> Life:
        """The id and incarnation of a living worker; see :func:`rpc.extend.life_of`."""
        group = self._shared.group
        self._directory.refuse_departed(who)
        return group.life(group.find(who).id)

    def members(self) -> list[WorkerInfo]:
        """The workers that are in the group now; see :func:`rpc.workers`."""
        return self._shared.group.living()

    def is_living(self, life: Life) -> bool:
        """Tells whether that life is a member's now; see :func:`rpc.extend.is_living`."""
        return self._shared.group.has(life)

    def latest_life(self, worker_id: int) -> Life | None:
        """The latest life of a worker, living or lost; None if there never was one."""
        peer = self._shared.group.latest(worker_id)
        return None if peer is None else peer.life

    def why_lost(self, worker_id: int) -> WorkerLostError | None:
        """Says why a worker is lost, as an error to raise; None if it is not."""
        return self._shared.group.lost_error(worker_id)

    def on_membership(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Tells ``callback`` of every change from now on; see :func:`rpc.on_membership`."""
        return self._events.subscribe(callback)

    # --- For call extensions

    def message(
        self, to: int, extension: str, body: bytes, timeout: float = UNSET_RPC_TIMEOUT
    ) -> Future[bytes]:
        """Sends a message to the extension's counterpart on another worker.

        Args:
            to: the worker's id.
            extension: the extension's name.
            body: what the extension makes of it.
            timeout: seconds until the future fails, -1 for the default, 0 for no limit.

        Returns:
            A future of what the counterpart's ``on_message`` returned.
        """
        return self._messages.send(to, extension, body, timeout)

    def ask(
        self,
        to: int,
        extension: str,
        body: bytes,
        tensors: Sequence[torch.Tensor],
        answered: Callable[[Any, Exception | None], None],
        *,
        awaited: bool = False,
    ) -> None:
        """Sends a message like :meth:`message`, with tensors, no limit of time and no future.

        Args:
            to: the worker's id.
            extension: the extension's name.
            body: what the extension makes of it.
            tensors: sent along.
            answered: takes what the counterpart's ``on_message`` returned, or the error;
                called where the reply is delivered, and must not block there.
            awaited: the calling thread will soon :meth:`wait`, and the answer has time until
                then. That spares waking a thread to read it.
        """
        shared = self._shared
        info = shared.group.reachable.get(to) or shared.group.peer(to).info
        kind = AwaitedAnswerSink if awaited else AnswerSink
        sink = kind(answered, shared.completions)
        self._messages.ask(info, extension, body, tensors, 0.0, sink)

    def future(self, description: str) -> Future[Any]:
        """A future to be completed by its maker, which waits as futures of calls do."""
        return self._caller.future(description)

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Waits until ``done()``, taking in what arrives meanwhile where that is faster.

        Args:
            done: asked again and again.
            block: sleeps until ``done()``; used where this thread has nothing to take in.
        """
        if current.place is None and not (is_inference() or function_modes()):
            self._shared.transport.wait(done, block)  # what follows comes to the same
            return
        with blocking():
            wait_in_usual_modes(self._shared.transport.wait, done, block)

    def wake(self) -> None:
        """Has a thread in :meth:`wait` look at its ``done`` again."""
        self._shared.transport.wake()

    def let_others_read(self) -> None:
        """Has another thread read what arrives, while the handler that calls this goes on.

        A transport may run a handler on the thread that reads, and notices only after some
        milliseconds that it takes long. To be called where that is known beforehand.
        """
        self._shared.transport.wait(_always, _do_nothing)

    def run_soon(self, task: Callable[[], None]) -> None:
        """Runs ``task`` on a thread that it may block, maybe here and at once."""
        self._shared.completions.run_on_delivery(task)

    def time_left(self, timeout: float = 0.0) -> float:
        """Seconds left to an operation that was given ``timeout``; 0 for no limit.

        In a handler, the deadline of the call that it serves bounds it.

        Raises:
            RpcTimeoutError: nothing is left.
        """
        return self._shared.timeouts.of(timeout)

    def device_map(self, to: Destination) -> Mapping[torch.device, torch.device]:
        """Maps this worker's devices to another's on which tensors arrive; maybe empty."""
        transport = self._shared.transport
        if not isinstance(transport, MapsDevices):
            return {}
        return transport.device_map(self._caller.find(to).id)


def _always() -> bool:
    return True


def _do_nothing() -> None:
    pass


def _sizes(shape: Sequence[int]) -> list[int]:
    """The shape of a buffer as ints, of which a user's whole numbers may be no instances."""
    try:
        sizes = [operator.index(size) for size in shape]
    except TypeError:
        raise TypeError(f"shape={shape!r} is not a list or tuple of whole numbers") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape={shape!r} has a size below 0")
    return sizes


def _require_plain(dtype: object) -> None:
    """Refuses a type that a buffer cannot have: torch ends the process over some of them."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is a {type(dtype).__name__}, not a torch.dtype")
    if dtype in _QUANTIZED:
        raise ValueError(f"dtype={dtype} is quantized; fill a buffer of a plain type")
