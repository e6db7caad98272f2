"""For packages that build on ``rpc``: everything they may use beyond ``rpc.__all__``.

Owns no machinery; each name here leads to the part of the current worker that does
the work. There are six things:

- *State*: :func:`worker_state` keeps one object for each worker. Many workers live in
  one process in tests, so a module variable is the wrong place.
- *Channels*: :func:`subscribe` and :func:`post` exchange one-way messages.
- *Send buffers*: :func:`send_buffer` and :func:`reply_buffer` give tensors in shared
  memory, which are sent without being copied.
- *Store*: :func:`store` is the group's key-value store, with compare-and-set.
- *Lives*: :func:`life_of`, :func:`is_living` and :func:`on_membership` say who is there.
- *Call extensions*: a :class:`CallExtension` attaches data to calls.

And two for a process that is no worker, such as a launcher: :class:`MemberList` says who is
in a dynamic group and strikes off who died, :func:`read_group_key` and
:func:`share_group_key` hand the group's key on. :func:`restore_torch_names` is for one in
which ``torch.distributed.rpc`` stands for another module.

Each function works on the current worker: the one whose handler or callback runs, or
else the process's. A thread that belongs to no worker takes a :class:`Worker` with it,
which :func:`worker` returns, and whose methods are the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from rpc.calls.channels import Handler
from rpc.current import current_agent
from rpc.errors import AgentClosedError
from rpc.extensions import Answer, CallExtension
from rpc.group.events import MembershipChange, MembershipEvent
from rpc.group.key_values import KeyValueStore
from rpc.group.keys import KEY_DESCRIPTOR, KEY_FILE, read_group_key, share_group_key
from rpc.group.member_list import Member, MemberList
from rpc.ids import Life
from rpc.transports.base import FrameKind, LendsMemory
from rpc.transports.tensorpipe.torch_names import restore_torch_names
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.agent import Agent

__all__ = [
    "KEY_DESCRIPTOR",
    "KEY_FILE",
    "Answer",
    "CallExtension",
    "Destination",
    "Handler",
    "KeyValueStore",
    "Life",
    "Member",
    "MemberList",
    "MembershipChange",
    "MembershipEvent",
    "Worker",
    "is_living",
    "life_of",
    "on_membership",
    "post",
    "read_group_key",
    "reply_buffer",
    "restore_torch_names",
    "send_buffer",
    "share_group_key",
    "store",
    "subscribe",
    "worker",
    "worker_state",
]

T = TypeVar("T")

Destination = WorkerInfo | str | int
"""A worker: its ``WorkerInfo``, its name or its id."""


class Worker:
    """One worker of a group, as packages above ``rpc`` see it.

    Not to be made: :func:`worker` returns the current one, and a
    :class:`CallExtension` is given its own.
    """

    __slots__ = ("_agent",)

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def info(self) -> WorkerInfo:
        """Its name and id."""
        return self._agent.info

    @property
    def life(self) -> Life:
        """Its id and incarnation."""
        return self._agent.life

    def state(
        self,
        key: Hashable,
        factory: Callable[[], T],
        close: Callable[[T], object] | None = None,
    ) -> T:
        """The object that this worker keeps under ``key``; see :func:`worker_state`."""
        return self._agent.states.get(key, factory, close)

    def subscribe(self, channel: str, handler: Handler) -> Callable[[], None]:
        """Takes the messages of a channel from now on; see :func:`subscribe`."""
        return self._agent.channels.subscribe(channel, handler)

    def post(
        self,
        to: Destination | Life,
        channel: str,
        body: bytes = b"",
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Sends a one-way message; see :func:`post`."""
        life = to if isinstance(to, Life) else self.life_of(to)
        self._agent.channels.post(life, channel, body, tensors)

    def send_buffer(
        self, to: Destination, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """An uninitialized tensor from which to send to ``to``; see :func:`send_buffer`."""
        return self._buffer(to, shape, dtype, FrameKind.REQUEST)

    def reply_buffer(
        self, to: Destination, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """The same for what a handler returns to ``to``; see :func:`reply_buffer`."""
        return self._buffer(to, shape, dtype, FrameKind.REPLY)

    def _buffer(
        self, to: Destination, shape: Sequence[int], dtype: torch.dtype, kind: FrameKind
    ) -> torch.Tensor:
        agent, count = self._agent, math.prod(shape)
        peer = agent.find_now(to)
        memory = None
        if isinstance(agent.transport, LendsMemory):
            memory = agent.transport.lend_memory(peer.id, kind, count * dtype.itemsize)
        if memory is None:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)

    def store(self, namespace: str) -> KeyValueStore:
        """The group's key-value store; see :func:`store`."""
        if self._agent.store is None:
            raise AgentClosedError(f"worker {self.info.name!r} has no store, or left its group")
        return KeyValueStore(self._agent.store, namespace)

    def life_of(self, who: Destination) -> Life:
        """The id and incarnation of a living worker; see :func:`life_of`."""
        return self._agent.group.life(self._agent.find_now(who).id)

    def is_living(self, life: Life) -> bool:
        """Tells whether that life is a member's now; see :func:`is_living`."""
        return self._agent.group.has(life)

    def on_membership(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Tells ``callback`` of every change from now on; see :func:`rpc.on_membership`."""
        return self._agent.events.subscribe(callback)


def worker() -> Worker:
    """The current worker: the one whose handler or callback runs, or else the process's.

    Raises:
        NotInitializedError: there is none.
    """
    return current_agent().worker


def worker_state(
    key: Hashable, factory: Callable[[], T], close: Callable[[T], object] | None = None
) -> T:
    """The object that the current worker keeps under ``key``, made when first asked for.

    This is how a handler finds what belongs to its own worker. The object lives until the
    worker shuts down, and a later life of the worker starts without it.

    Args:
        key: names the object on this worker; the class of the object is a good key.
        factory: makes it, once; whoever asks meanwhile waits.
        close: called with the object when the worker shuts down, before its connections
            are closed. Default nothing.

    Raises:
        AgentClosedError: the worker shut down.
        NotInitializedError: there is no current worker.

    Example::

        def handle_push(name, gradient):      # runs on the server
            tables = extend.worker_state(Tables, Tables)
            tables[name].apply(gradient)
    """
    return worker().state(key, factory, close)


def subscribe(channel: str, handler: Handler) -> Callable[[], None]:
    """Takes the messages that others :func:`post` to this worker on a channel.

    Args:
        channel: its name, at most 255 bytes; begin it with the name of your package.
        handler: called with the sender's :class:`Life`, the body and a list of the
            tensors, for each message and several at a time. It runs as handlers of calls
            do and may block; the tensors are its own. What it raises is logged here.

    Returns:
        A function that ends this. Messages on a channel that nobody takes are dropped, and
        the log says so once.

    Raises:
        ValueError: somebody takes the messages of this channel already.

    Example::

        extend.subscribe("myring/pass", lambda sender, body, tensors: take(tensors[0]))
    """
    return worker().subscribe(channel, handler)


def post(
    to: Destination | Life,
    channel: str,
    body: bytes = b"",
    tensors: Sequence[torch.Tensor] = (),
) -> None:
    """Sends a one-way message: no reply, no future, about half the cost of a call.

    It is delivered once, or not at all if a worker is lost. There is no order among
    messages: those that need one carry a number. A graceful shutdown waits until each was
    handled. Nothing tells the sender when it was; where a receiver may fall behind, ask it
    for a reply now and then.

    Args:
        to: a worker; with a :class:`Life`, that life of it and no later one.
        channel: its name.
        body: bytes, as you packed them.
        tensors: sent along; dtype, shape and strides arrive as they are.

    Raises:
        WorkerLostError: the worker, or that life of it, is gone.
        UnknownWorkerError: there is no such worker.
        EncodeError: a tensor cannot be sent.
    """
    worker().post(to, channel, body, tensors)


def send_buffer(
    to: Destination, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """An uninitialized tensor that can be sent to ``to`` without being copied again.

    Fill it and pass it, or a view that starts where it starts, to a call or :func:`post` to
    that worker. It then lies in memory that both share. **It is sent once and is the
    receiver's from then on**: do not touch it any more, and ask for another, which costs a
    few microseconds.

    Where there is no such memory (small tensors, other hosts, in-process transports, the
    first messages to a worker) this is an ordinary tensor: programs need no second way.

    Args:
        to: the receiver. Sent to anybody else, the tensor is copied like any other.
        shape: of the tensor.
        dtype: of its elements, default ``torch.float32``.

    Raises:
        UnknownWorkerError: there is no such worker.
        WorkerLostError: it is gone.

    Sending it a second time raises ``EncodeError``; so calls with ``retry=`` need an
    ordinary tensor.
    """
    return worker().send_buffer(to, shape, dtype)


def reply_buffer(
    to: Destination, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns a tensor that a handler can return to its caller without copying it again.

    For the arguments, and what may be done with the tensor, see :func:`send_buffer`.
    """
    return worker().reply_buffer(to, shape, dtype)


def store(namespace: str) -> KeyValueStore:
    """The group's key-value store: small values that all workers see, with compare-and-set.

    It lives where the group met (usually with rank 0) and outlives single workers. Each
    operation is a request to that process, of about 0.1 ms; it is no place for data.

    Args:
        namespace: letters, digits, ``.``, ``-`` and ``_``; the name of your package. Keys of
            different namespaces never meet, nor do those of TensorWire itself.

    Raises:
        AgentClosedError: this worker left its group.

    Example::

        leaders = extend.store("mypackage")
        if leaders.compare_and_set("leader", None, b"alice") == b"alice":
            lead()
    """
    return worker().store(namespace)


def life_of(who: Destination) -> Life:
    """The life of a worker: its id and its incarnation, which grows each time it comes back.

    Args:
        who: the worker.

    Raises:
        UnknownWorkerError: there is no such worker.
        WorkerLostError: it is gone.
    """
    return worker().life_of(who)


def is_living(life: Life) -> bool:
    """True if that life of a worker is a member of the group now."""
    return worker().is_living(life)


def on_membership(callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
    """Tells of workers that join, leave, are lost or return; see :func:`rpc.on_membership`."""
    return worker().on_membership(callback)
