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

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import Store

from rpc.calls.channels import Handler
from rpc.current import Process, current_agent, find_agent, of_context
from rpc.extensions import Answer, CallExtension, CallObserver, ObservedCall, ObservedHandler
from rpc.group.directory import Destination
from rpc.group.etcd_store import LEASE_SECONDS, EtcdPlace, EtcdStoreClient, members_of
from rpc.group.events import MembershipChange, MembershipEvent
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
from rpc.outcomes.slot import Slot
from rpc.rrefs.rref import call_method
from rpc.runtime.deadlines import is_cancelled, when_cancelled
from rpc.runtime.executor import blocking
from rpc.runtime.exit import ENDING_FILE
from rpc.runtime.prompt_signals import prompt_signals
from rpc.runtime.reaper import Reaper
from rpc.runtime.streams import leave_tensors, take_tensors
from rpc.runtime.text import text_of
from rpc.runtime.wait_log import WaitLog
from rpc.transports.host.helpers import Helpers
from rpc.transports.tensorpipe.torch_names import restore_torch_names
from rpc.transports.tensorwire.tls import Certificates
from rpc.transports.tensorwire.unauthenticated import UnauthenticatedConnections
from rpc.wire.callables import require_arguments
from rpc.wire.remote_errors import retell
from rpc.wire.torch_objects import import_remedy
from rpc.worker import Worker

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


def find_worker() -> Worker | None:
    """Returns the current worker as :func:`worker` does, or None where there is none."""
    agent = find_agent()
    mine: Worker | None = None if agent is None else agent.worker
    return mine


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
    mine: Worker = current_agent().worker
    return mine


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
            do and may block; the tensors are its own. Errors that it raises are logged here.

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
        TypeError: the shape is no list of whole numbers, or the dtype is none of torch's.
        ValueError: a size is below 0, or the dtype is quantized.
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
    """The group's store for a process that is no worker, such as a launcher; see :func:`store`.

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
