"""For packages that build on ``rpc``: everything they may use beyond ``rpc.__all__``.

Owns nothing; each name here leads to the part of the current worker that does
the work. There are six things:

- *State*: :func:`worker_state` keeps one object for each worker. Many workers live in
  one process in tests, so a module variable is the wrong place.
- *Channels*: :func:`subscribe` and :func:`post` exchange one-way messages.
- *Send buffers*: :func:`send_buffer` and :func:`reply_buffer` give tensors in shared
  memory, which are sent without being copied.
- *Store*: :func:`store` is the group's key-value store, with compare-and-set.
- *Lives*: :func:`life_of`, :func:`is_living` and :func:`on_membership` say who is there.
- *Call extensions*: a :class:`CallExtension` attaches data to calls; one that is a
  :class:`CallObserver` also sees their names, their lengths and how they end.

And four for a process that is no worker, such as a launcher: :class:`MemberList` says who is
in a dynamic group and strikes off who died, :func:`read_group_key` and
:func:`share_group_key` hand the group's key on, and :func:`host_store` hosts a store in a
process that strangers cannot fill, of which :class:`StoreClient` is a client and
:func:`key_values` the signed values, and :func:`host_addresses` says at which addresses others
reach this host. :func:`restore_torch_names` is for one in which ``torch.distributed.rpc`` stands
for another module. :class:`WaitLog` has a wait say what it waits for. :class:`Certificates` and
:class:`UnauthenticatedConnections` are for a port that has a protocol of its own.

Each function works on the current worker: the one whose handler or callback runs, or
else the process's. A thread that belongs to no worker takes a :class:`Worker` with it,
which :func:`worker` returns, and whose methods are the same functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Store

from rpc.calls.call_parts import CallParts
from rpc.calls.caller import Caller
from rpc.calls.channels import Channels, Handler
from rpc.calls.extension_messages import ExtensionMessages
from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.current import Process, current_agent, find_agent, of_context
from rpc.errors import AgentClosedError, WorkerLostError
from rpc.extensions import Answer, CallExtension, CallObserver, ObservedCall, ObservedHandler
from rpc.group.directory import Destination
from rpc.group.etcd_store import LEASE_SECONDS, EtcdPlace, EtcdStoreClient, members_of
from rpc.group.events import MembershipChange, MembershipEvent, MembershipEvents
from rpc.group.host_addresses import (
    HostAddress,
    address_on_the_way_to,
    describe_addresses,
    host_addresses,
    outward_address,
    resolve_host,
)
from rpc.group.job_roles import JobRole, JobRoles
from rpc.group.key_values import KeyValueStore
from rpc.group.keys import KEY_FILE, read_group_key, share_group_key
from rpc.group.member_list import Member, MemberList
from rpc.group.records import PREFIX
from rpc.group.signed_store import SignedStore
from rpc.group.store_host import StoreServer, host_store
from rpc.group.tcp_store import TcpStoreClient as StoreClient
from rpc.ids import Life, new_tuple
from rpc.observe.progress import Facts, Progress
from rpc.observe.reporter import WATCH, quantile
from rpc.observe.watching import progress_of
from rpc.outcomes.futures import Future, wait_in_usual_modes
from rpc.outcomes.sinks import AnswerSink, AwaitedAnswerSink
from rpc.outcomes.slot import Slot
from rpc.rrefs.rref import call_method
from rpc.runtime.clock import Clock
from rpc.runtime.deadlines import is_cancelled, when_cancelled
from rpc.runtime.executor import blocking, current
from rpc.runtime.exit import ENDING_FILE
from rpc.runtime.prompt_signals import prompt_signals
from rpc.runtime.reaper import Reaper
from rpc.runtime.states import States
from rpc.runtime.streams import leave_tensors, take_tensors
from rpc.runtime.text import text_of
from rpc.runtime.torch_modes import function_modes, is_inference
from rpc.runtime.wait_log import WaitLog
from rpc.transports.base import FrameKind, LendsMemory, MapsDevices
from rpc.transports.host.helpers import Helpers
from rpc.transports.tensorpipe.torch_names import restore_torch_names
from rpc.transports.tensorwire.tls import Certificates
from rpc.transports.tensorwire.unauthenticated import UnauthenticatedConnections
from rpc.wire.callables import require_arguments
from rpc.wire.remote_errors import retell
from rpc.wire.torch_objects import import_remedy
from rpc.worker_info import WorkerInfo

__all__ = [
    "ENDING_FILE",
    "KEY_FILE",
    "LEASE_SECONDS",
    "WATCH",
    "Answer",
    "CallExtension",
    "CallObserver",
    "Certificates",
    "Destination",
    "EtcdPlace",
    "EtcdStoreClient",
    "Facts",
    "Handler",
    "Helpers",
    "HostAddress",
    "JobRole",
    "JobRoles",
    "KeyValueStore",
    "Life",
    "Member",
    "MemberList",
    "MembershipChange",
    "MembershipEvent",
    "ObservedCall",
    "ObservedHandler",
    "Progress",
    "Reaper",
    "Slot",
    "StoreClient",
    "StoreServer",
    "UnauthenticatedConnections",
    "WaitLog",
    "Worker",
    "address_on_the_way_to",
    "blocking",
    "call_extension",
    "call_method",
    "describe_addresses",
    "find_worker",
    "host_addresses",
    "host_store",
    "import_remedy",
    "is_cancelled",
    "is_living",
    "key_values",
    "leave_tensors",
    "life_of",
    "members_of",
    "new_tuple",
    "on_membership",
    "outward_address",
    "post",
    "prompt_signals",
    "quantile",
    "read_group_key",
    "reply_buffer",
    "require_arguments",
    "resolve_host",
    "restore_torch_names",
    "retell",
    "send_buffer",
    "share_group_key",
    "store",
    "subscribe",
    "take_tensors",
    "text_of",
    "when_cancelled",
    "worker",
    "worker_state",
]

T = TypeVar("T")


class Worker:
    """One worker of a group, as packages above ``rpc`` see it.

    Not to be made: :func:`worker` returns the current one, and a
    :class:`CallExtension` is given its own.
    """

    __slots__ = (
        "_caller",
        "_channels",
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
    ) -> None:
        self._life = life
        self._shared = shared
        self._caller = caller
        self._messages = messages
        self._channels = channels
        self._events = events
        self._states = states
        self._store = store
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
        """The object that this worker keeps under ``key``; see :func:`worker_state`."""
        return self._states.get(key, factory, close, leave)

    def subscribe(self, channel: str, handler: Handler) -> Callable[[], None]:
        """Takes the messages of a channel from now on; see :func:`subscribe`."""
        return self._channels.subscribe(channel, handler)

    def post(
        self,
        to: Destination | Life,
        channel: str,
        body: bytes = b"",
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """Sends a one-way message; see :func:`post`."""
        life = to if isinstance(to, Life) else self.life_of(to)
        self._channels.post(life, channel, body, tensors)

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
        transport, count = self._shared.transport, math.prod(shape)
        peer, memory = self._shared.group.find(to), None
        if isinstance(transport, LendsMemory):
            memory = transport.lend_memory(peer.id, kind, count * dtype.itemsize)
        if memory is None:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)

    def store(self, namespace: str) -> KeyValueStore:
        """The group's key-value store; see :func:`store`."""
        found = self._store()
        if found is None:
            raise AgentClosedError(f"worker {self.info.name!r} has no store, or left its group")
        return KeyValueStore(found, namespace)

    def life_of(self, who: Destination) -> Life:
        """The id and incarnation of a living worker; see :func:`life_of`."""
        group = self._shared.group
        return group.life(group.find(who).id)

    def members(self) -> list[WorkerInfo]:
        """The workers that are in the group now; see :func:`rpc.workers`."""
        return self._shared.group.living()

    def is_living(self, life: Life) -> bool:
        """Tells whether that life is a member's now; see :func:`is_living`."""
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
        """As :meth:`message`, with tensors, no limit of time and no future.

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

    def wait(self, done: Callable[[], bool], block: Callable[[], None]) -> None:
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


def find_worker() -> Worker | None:
    """As :func:`worker`, but None where there is no current worker."""
    agent = find_agent()
    found: Worker | None = None if agent is None else agent.worker
    return found


def call_extension(name: str) -> Any:
    """The current worker's :class:`CallExtension`, loaded if need be.

    Args:
        name: the module that defines it as ``RPC_EXTENSION``.
    """
    agent = of_context() or Process.agent or current_agent()
    return agent.extensions.loaded.get(name) or agent.extensions.load(name)


def worker() -> Worker:
    """The current worker: the one whose handler or callback runs, or else the process's.

    Raises:
        NotInitializedError: there is none.
    """
    found: Worker = current_agent().worker
    return found


def worker_state(
    key: Hashable,
    factory: Callable[[], T],
    close: Callable[[T], object] | None = None,
    leave: Callable[[T], object] | None = None,
) -> T:
    """The object that the current worker keeps under ``key``, made when first asked for.

    This is how a handler finds what belongs to its own worker. The object lives until the
    worker shuts down, and a later life of the worker starts without it.

    Args:
        key: names the object on this worker; the class of the object is a good key.
        factory: makes it, once; whoever asks meanwhile waits.
        close: called with the object when the worker shuts down, before its connections
            are closed. Default nothing.
        leave: called with the object when the worker begins to leave a dynamic group in peace,
            before it waits until none of its calls is under way: answers the calls that are
            kept for later, and gives up those that others may keep. Default nothing.

    Raises:
        AgentClosedError: the worker shut down.
        NotInitializedError: there is no current worker.

    Example::

        def handle_push(name, gradient):      # runs on the server
            tables = extend.worker_state(Tables, Tables)
            tables[name].apply(gradient)
    """
    return worker().state(key, factory, close, leave)


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


def key_values(group_store: Store, group_key: bytes, namespace: str) -> KeyValueStore:
    """The same for a process that is no worker, such as a launcher.

    Args:
        group_store: where the group meets: any store of torch's, or a :class:`StoreClient`.
        group_key: the group's key; empty if it has none.
        namespace: see :func:`store`.
    """
    return KeyValueStore(SignedStore(group_store, group_key, PREFIX), namespace)


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
