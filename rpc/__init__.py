"""The successor of ``torch.distributed.rpc``: remote calls and remote references.

Every worker of a group calls :func:`init_rpc`, calls functions on the others
with :func:`rpc_sync`, :func:`rpc_async` and :func:`remote`, and leaves with
:func:`shutdown`.
"""

from rpc import api, backend_registry, constants, functions, options, tracing
from rpc import extend as extend
from rpc import internal as internal
from rpc import rref_proxy as rref_proxy
from rpc.agent import Agent
from rpc.api import AllGatherStates as AllGatherStates
from rpc.api import _get_current_rpc_agent as _get_current_rpc_agent
from rpc.api import _init_rpc_backend as _init_rpc_backend
from rpc.api import _is_current_rpc_agent_set as _is_current_rpc_agent_set
from rpc.api import (
    _set_rpc_timeout,
    cancelled,
    debug_info,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    is_available,
    method_factory,
    metrics,
    on_membership,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
    workers,
)
from rpc.api import _wait_all as _wait_all
from rpc.api import new_method as new_method
from rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    register_backend,
)
from rpc.backend_registry import init_backend as init_backend
from rpc.builtin_backends import TensorPipeAgent
from rpc.debug import _get_debug_info as _get_debug_info
from rpc.debug import _rref_context_get_debug_info as _rref_context_get_debug_info
from rpc.debug import enable_gil_profiling
from rpc.errors import (
    AgentClosedError,
    BringUpError,
    CallCancelledError,
    DecodeError,
    DeviceMapError,
    EncodeError,
    FrameError,
    NotInitializedError,
    QueueFullError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    RRefCreationError,
    RRefDeletedError,
    RRefError,
    StaleRRefError,
    UnknownWorkerError,
    WorkerLeftError,
    WorkerLostError,
)
from rpc.group.events import MembershipChange, MembershipEvent
from rpc.observe.debug_dump import install_debug_signal
from rpc.observe.watching import progress, slow_phase
from rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions, WhenFull
from rpc.outcomes.futures import Future
from rpc.protocol.retry import Retry
from rpc.rrefs.rref import RRef
from rpc.serving import serve, set_event
from rpc.transports.tensorwire import TensorWireRpcBackendOptions
from rpc.transports.tensorwire.tls import TlsOptions
from rpc.worker_info import WorkerInfo

__version__ = "0.2.0"

PyRRef = RRef
RpcAgent = Agent

__all__ = [
    "AgentClosedError",
    "BackendType",
    "BackendValue",
    "BringUpError",
    "CallCancelledError",
    "DecodeError",
    "DeviceMapError",
    "EncodeError",
    "FrameError",
    "Future",
    "MembershipChange",
    "MembershipEvent",
    "NotInitializedError",
    "PyRRef",
    "QueueFullError",
    "RRef",
    "RRefCreationError",
    "RRefDeletedError",
    "RRefError",
    "RemoteError",
    "Retry",
    "RpcAgent",
    "RpcBackendOptions",
    "RpcError",
    "RpcTimeoutError",
    "StaleRRefError",
    "TensorPipeAgent",
    "TensorPipeRpcBackendOptions",
    "TensorWireRpcBackendOptions",
    "TlsOptions",
    "UnknownWorkerError",
    "WhenFull",
    "WorkerInfo",
    "WorkerLeftError",
    "WorkerLostError",
    "_set_rpc_timeout",
    "api",
    "backend_registered",
    "backend_registry",
    "cancelled",
    "constants",
    "construct_rpc_backend_options",
    "debug_info",
    "enable_gil_profiling",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "install_debug_signal",
    "is_available",
    "method_factory",
    "metrics",
    "on_membership",
    "options",
    "progress",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "serve",
    "set_event",
    "shutdown",
    "slow_phase",
    "tracing",
    "workers",
]
