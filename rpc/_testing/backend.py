"""The options, agents and registration of the faulty backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ParamSpec, TypeVar

from torch._C._distributed_c10d import Store

from rpc._testing.kinds import Callables
from rpc._testing.transport import Faults, FaultyTransport
from rpc.agent import Agent
from rpc.backend_registry import BackendValue, add_once
from rpc.bring_up import address_towards, form_group, prefers_tcp
from rpc.constants import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
)
from rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpc.transports.base import Transport
from rpc.transports.tensorpipe.transport import TensorPipeTransport, available
from rpc.transports.tensorwire import TensorWireRpcBackendOptions, TensorWireTransport

_P = ParamSpec("_P")
_T = TypeVar("_T")

FAULTY_TENSORPIPE = "FAULTY_TENSORPIPE"
FAULTY_TENSORWIRE = "FAULTY_TENSORWIRE"


def is_available() -> bool:
    """True if torch was built with TensorPipe."""
    return available()


class _FaultyOptions(RpcBackendOptions):
    """The faults, mixed into the options of the backend that has them."""

    def __init__(
        self,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method
        )
        self.faults = Faults.of(messages_to_fail, messages_to_delay or {}, num_fail_sends)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends


class FaultyTensorPipeRpcBackendOptions(_FaultyOptions, TensorPipeRpcBackendOptions):
    """Options of the FAULTY_TENSORPIPE backend.

    Args:
        num_worker_threads: see :class:`TensorPipeRpcBackendOptions`.
        rpc_timeout: see :class:`TensorPipeRpcBackendOptions`.
        init_method: see :class:`TensorPipeRpcBackendOptions`.
        messages_to_fail: types of messages whose sending fails; see ``rpc._testing.kinds``.
        messages_to_delay: seconds that messages of a type come late.
        num_fail_sends: how often the sending of each message fails. Those that
            are sent again are delivered after that; calls just fail.

    Raises:
        ValueError: there is no message of such a type.
    """


class FaultyTensorWireRpcBackendOptions(_FaultyOptions, TensorWireRpcBackendOptions):
    """Options of the FAULTY_TENSORWIRE backend: those of FAULTY_TENSORPIPE.

    Args:
        num_worker_threads: see :class:`FaultyTensorPipeRpcBackendOptions`.
        rpc_timeout: see :class:`FaultyTensorPipeRpcBackendOptions`.
        init_method: see :class:`FaultyTensorPipeRpcBackendOptions`.
        messages_to_fail: see :class:`FaultyTensorPipeRpcBackendOptions`.
        messages_to_delay: see :class:`FaultyTensorPipeRpcBackendOptions`.
        num_fail_sends: see :class:`FaultyTensorPipeRpcBackendOptions`.

    Raises:
        ValueError: there is no message of such a type.
    """


class FaultyAgent(Agent):
    """An agent whose transport is told what kind of function each call is for."""

    transport: FaultyTransport

    def _lend_methods(self) -> None:
        """Wraps the methods that make calls, so that the transport learns what is called."""
        super()._lend_methods()
        call, self.remote = self._telling(self.rpc_async), self._telling(self.remote)
        self.rpc_async = call
        self.rpc_sync = lambda *args, **kwargs: call(*args, **kwargs).wait()

    def _telling(self, call: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wraps a method of a caller, whose second argument is the function to call."""

        def telling(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            func = args[1] if len(args) > 1 else kwargs["func"]
            with self.transport.callables.calling(func):
                return call(*args, **kwargs)

        return telling


class FaultyTensorPipeAgent(FaultyAgent):
    """A worker connected by FAULTY_TENSORPIPE."""


def register() -> None:
    """Makes the backends known; does nothing the second time."""
    add_once(FAULTY_TENSORPIPE, BackendValue(FaultyTensorPipeRpcBackendOptions, _init_tensorpipe))
    add_once(FAULTY_TENSORWIRE, BackendValue(FaultyTensorWireRpcBackendOptions, _init_tensorwire))


def _init_tensorpipe(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: FaultyTensorPipeRpcBackendOptions,
) -> Agent:
    _require(rpc_backend_options, FaultyTensorPipeRpcBackendOptions)
    over_tcp = prefers_tcp(rpc_backend_options.init_method, world_size)
    inner = TensorPipeTransport(rpc_backend_options, over_tcp)
    return _form(
        FAULTY_TENSORPIPE,
        (store, name, rank, world_size),
        rpc_backend_options,
        inner,
        FaultyTensorPipeAgent,
    )


def _init_tensorwire(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: FaultyTensorWireRpcBackendOptions,
) -> Agent:
    _require(rpc_backend_options, FaultyTensorWireRpcBackendOptions)
    address = address_towards(rpc_backend_options.init_method)
    inner = TensorWireTransport(replace(rpc_backend_options.settings(), bind_address=address))
    return _form(
        FAULTY_TENSORWIRE, (store, name, rank, world_size), rpc_backend_options, inner, FaultyAgent
    )


def _form(
    backend: str,
    member: tuple[Store, str, int, int | None],
    options: FaultyTensorPipeRpcBackendOptions | FaultyTensorWireRpcBackendOptions,
    inner: Transport,
    agent: type[FaultyAgent],
) -> Agent:
    """Joins as ``member``: the group's store, this worker's name and rank, the world size."""
    transport = FaultyTransport(inner, options.faults, Callables())
    return form_group(backend, *member, options, transport, lambda records: None, agent)


def _require(options: object, kind: type) -> None:
    if not isinstance(options, kind):
        raise TypeError(f"`rpc_backend_options` must be a `{kind.__name__}`, but got {options!r}")
