"""The handle on a value that lives on one worker and can be named on all.

What keeps a value alive, and what becomes of a handle whose owner is gone, is
decided in ``references`` and carried out by ``keeper``; a handle only
asks. Calls through a handle (``rref.rpc_sync().method()``) are in ``rref_proxy``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

import torch

from rpc.constants import UNSET_RPC_TIMEOUT
from rpc.current import find_agent
from rpc.errors import DecodeError, EncodeError, RpcError, RRefError, StaleRRefError
from rpc.extensions import run_distributed_backward
from rpc.outcomes.futures import Future
from rpc.rrefs import rref_proxy
from rpc.runtime import finalizers
from rpc.wire.handles import OutOfBandHandle
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.rrefs.keeper import ReferenceKeeper
    from rpc.rrefs.rref_proxy import RRefProxy
    from rpc.rrefs.transfer import Holding

T = TypeVar("T")


class RRef(OutOfBandHandle, Generic[T]):
    """A reference to a value of type ``T`` on its *owner*, shared by any number of *users*.

    ``rpc.remote`` returns one for a value that another worker makes; ``RRef(value)``
    makes one for a value of this worker. Handles travel in arguments and results
    of calls. The owner drops the value when no handle is left anywhere.

    Args:
        value: the value to share; it stays on this worker.
        type_hint: the TorchScript interface of ``value``, required for, and only
            allowed with, a ``torch.jit.ScriptModule``.

    Raises:
        RuntimeError: there is no agent, or the type hint does not fit the value.

    Example::

        counter = rpc.remote("server", Counter)
        counter.rpc_sync().increment(3)
        print(counter.to_here().count)
    """

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = find_agent()
        if agent is None:
            raise RpcError(
                "Current RPC agent is not set! Did you initialize the RPC framework "
                "(e.g. by calling `rpc.init_rpc`)?"
            )
        scripted = isinstance(value, torch.jit.ScriptModule)
        if scripted and type_hint is None:
            raise RpcError(
                "The RRef being created contains a ScriptModule, must provide its ModuleInterface "
                "type hint. Pass the interface it is used through as type_hint"
            )
        if type_hint is not None and not scripted:
            raise RpcError(f"type_hint goes with a ScriptModule, not with {type(value).__name__}")
        self._bind(agent.references, agent.references.own(value))

    @classmethod
    def _of(cls, keeper: ReferenceKeeper, holding: Holding) -> RRef[Any]:
        handle: RRef[Any] = cls.__new__(cls)
        handle._bind(keeper, holding)
        return handle

    def _bind(self, keeper: ReferenceKeeper, holding: Holding) -> None:
        self._keeper = keeper
        self._holding = holding
        self._type: Future[type] | None = None

    def is_owner(self) -> bool:
        """True if the value lives on this worker."""
        return self._holding.value is not None

    def owner(self) -> WorkerInfo:
        """The worker the value lives on."""
        return self._keeper.owner_of(self._holding)

    def owner_name(self) -> str:
        """The name of the worker the value lives on."""
        return self.owner().name

    def confirmed_by_owner(self) -> bool:
        """True once the owner is known to keep the value for this handle."""
        return self._keeper.is_confirmed(self._holding)

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Waits for the value and returns it: a copy, or itself on the owner.

        Args:
            timeout: seconds; -1 for the default, 0 for no limit. A call that timed
                out may be repeated.

        Raises:
            Exception: what the function that should have made the value raised.
            RpcTimeoutError: the time is over.
            RRefError: the handle is unusable; the text says why.
            WorkerLostError: the owner is gone.
        """
        finalizers.refuse("to_here")
        return cast(T, self._keeper.to_here(self, timeout))

    def local_value(self) -> T:
        """Returns the value itself, on its owner; waits for it if it is not made yet.

        Raises:
            RuntimeError: this worker is not the owner.
            RpcTimeoutError: in a handler, the time of the call it serves is over.
            CallCancelledError: in a handler, nobody waits for its result any more.
        """
        return cast(T, self._keeper.local_value(self._holding))

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """A proxy: calling a method on it runs it on the owner and returns its result."""
        return rref_proxy.RRefProxy(self, "rpc_sync", timeout)

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """A proxy: calling a method on it runs it on the owner and returns a future."""
        return rref_proxy.RRefProxy(self, "rpc_async", timeout)

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> RRefProxy:
        """A proxy: calling a method on it runs it on the owner and returns an RRef."""
        return rref_proxy.RRefProxy(self, "remote", timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass with the referenced tensor as its root.

        Args:
            dist_autograd_ctx_id: the distributed autograd context; -1, allowed on
                the owner only, means local autograd, into ``.grad``.
            retain_graph: keep the graph for another pass.

        Raises:
            RuntimeError: the value is no tensor, the context is unknown or needed.
        """
        if self.is_owner():
            _backward_here(self, dist_autograd_ctx_id, retain_graph)
            return
        if dist_autograd_ctx_id == -1:
            raise RpcError(
                "User RRefs require 'dist_autograd_ctx_id' to be specified: "
                "local autograd runs on the owner only"
            )
        args = (self, dist_autograd_ctx_id, retain_graph)
        self._keeper.calls.rpc_sync(self.owner(), run_backward, args, None, 0)

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The value's type, asked of the owner once; a future of it if not ``blocking``."""
        future = self._type
        if future is None or _has_failed(future):
            future = self._type = self._ask_for_type(timeout)
        return future.wait() if blocking else future

    def _ask_for_type(self, timeout: float) -> Future[type]:
        if self.is_owner():
            known: Future[type] = Future()
            known.set_result(_rref_typeof_on_owner(self))
            return known
        self._keeper.require_usable(self._holding)
        return self._keeper.calls.rpc_async(
            self.owner(), _rref_typeof_on_owner, (self,), None, timeout
        )

    def _get_future(self) -> Future[None]:
        """A future that is done when the owner has run the function that makes the value."""
        return self._keeper.creation_of(self._holding)

    _get_profiling_future = _get_future

    def _serialize(self) -> NoReturn:
        """Says why the handle cannot be serialized: it is unusable, or this is no call."""
        self._keeper.lending.require_shareable(self._holding)
        raise EncodeError(
            f"{self} can be sent only in the arguments or the result of a call: its owner has to "
            "be told who will hold it"
        )

    def _not_for(self, sender: WorkerInfo) -> RRefError:
        """The error for another worker of this process, ``sender``, that passes the handle on."""
        me, life = self._keeper.me, self._keeper.life
        whose = f"worker {me.name!r} (incarnation {life.incarnation})"
        if self._keeper.stopped:
            return StaleRRefError(
                f"{self} is stale: it was made or received by {whose}, which shut down. "
                "Make or receive a new one in this session"
            )
        return RRefError(
            f"{self} was made or received by {whose}, and cannot be sent by worker "
            f"{sender.name!r}. Send it to {sender.name!r} in a call, which gives it its own handle"
        )

    @staticmethod
    def _deserialize(data: object) -> NoReturn:
        """Says why no handle can be made of ``data``: its owner has to know of every handle."""
        raise DecodeError(
            f"a reference cannot be made of {type(data).__name__} data: it arrives only in the "
            "arguments or the result of a call, as its owner has to be told who will hold it"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise RpcError(
            "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
        )

    def __copy__(self) -> NoReturn:
        self.__reduce_ex__(2)

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__reduce_ex__(2)

    def __repr__(self) -> str:
        reference, fork = self._holding.reference, self._holding.fork
        if self.is_owner() or fork is None:
            return f"OwnerRRef({reference.rref})"
        return f"UserRRef(RRefId = {reference.rref}, ForkId = {fork})"

    __str__ = __repr__

    def __del__(self) -> None:
        holding = getattr(self, "_holding", None)
        if holding is not None:
            self._keeper.dropped(holding)


def _has_failed(future: Future[Any]) -> bool:
    if not future.done():
        return False
    try:
        future.value()
    except Exception:
        return True
    return False


def call_method(
    rref: RRef[Any], name: str, /, *args: Any, **kwargs: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Finds a method of an RRef's value, at its owner; as a function to call, calls it.

    Args:
        rref: refers to the value.
        name: of the method.
        args: for the method.
        kwargs: for the method.
    """
    value = rref._keeper.await_local(rref._holding)
    return getattr(value, name), args, kwargs


def has_attribute(rref: RRef[Any], name: str) -> bool:
    """Says, at the owner, whether the value itself has an attribute that its type lacks."""
    return hasattr(rref._keeper.await_local(rref._holding), name)


def _rref_typeof_on_owner(rref: RRef[Any]) -> type:
    """Returns, at the owner, the type of the value."""
    return type(rref._keeper.await_local(rref._holding))


def run_backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Runs, at the owner, a distributed backward pass from the value."""
    rref.backward(context_id, retain_graph)


def _backward_here(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError(
            "RRef should contain a tensor for .backward(), "
            f"but it contains a {type(value).__name__}"
        )
    if context_id == -1:
        torch.autograd.backward([value], retain_graph=retain_graph)
    else:
        run_distributed_backward(context_id, [value], retain_graph)
