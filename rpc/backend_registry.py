"""Keeps the backends by name, with the function that makes a worker of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch._C._distributed_c10d import Store

from rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC
from rpc.errors import RpcError
from rpc.options import RpcBackendOptions
from rpc.wire import torch_objects
from rpc.wire.callables import require_callable

if TYPE_CHECKING:
    from rpc.agent import Agent


@dataclass(frozen=True, slots=True)
class BackendValue:
    """The two functions that a backend is made of.

    Args:
        construct_rpc_backend_options_handler: makes its options.
        init_backend_handler: forms the group and returns this worker's agent.
    """

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., Agent]


class _Members(type):
    """Lets ``BackendType`` be used like an enum to which members can be added."""

    _members: ClassVar[dict[str, BackendType]] = {}

    def __getitem__(cls, name: str) -> BackendType:
        return _known()[name]

    def __getattr__(cls, name: str) -> BackendType:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return _known()[name]
        except KeyError:
            known = ", ".join(cls._members)
            raise AttributeError(
                f"no RPC backend {name!r} is registered; there are: {known}"
            ) from None

    def __iter__(cls) -> Iterator[BackendType]:
        return iter(_known().values())

    def __len__(cls) -> int:
        return len(_known())

    @property
    def __members__(cls) -> dict[str, BackendType]:
        return dict(_known())


class BackendType(metaclass=_Members):
    """A way for workers to be connected: ``BackendType.TENSORPIPE`` and what was registered."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: BackendValue) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"

    def __reduce__(self) -> tuple[Callable[[str], BackendType], tuple[str]]:
        return _by_name, (self.name,)


def _known() -> dict[str, BackendType]:
    """All backends; the built-in ones are registered when someone first looks."""
    from rpc.builtin_backends import register_builtin_backends

    register_builtin_backends()
    return _Members._members


def _by_name(name: str) -> BackendType:
    return BackendType[name]


def ours(backend: object) -> BackendType:
    """Returns ``backend``, or ours of the same name for a member of torch's ``BackendType``.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(backend, BackendType):
        return backend
    name = getattr(backend, "name", None)
    if torch_objects.is_torchs(backend, "BackendType") and name in BackendType.__members__:
        return BackendType[name]
    raise TypeError(
        f"Argument backend must be a member of BackendType, but got {backend!r}"
        f"{torch_objects.import_remedy(backend)}"
    )


def backend_registered(backend_name: str) -> bool:
    """True if a backend of that name exists.

    Args:
        backend_name: such as ``"TENSORWIRE"``.
    """
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., Any],
) -> BackendType:
    """Adds a backend.

    Args:
        backend_name: how it is chosen: ``BackendType.<backend_name>``.
        construct_rpc_backend_options_handler: called with ``rpc_timeout``,
            ``init_method`` and what the user gave; returns the options.
        init_backend_handler: called with ``store, name, rank, world_size,
            rpc_backend_options``; returns the agent.

    Raises:
        TypeError: the name is no text, or a handler cannot be called.
        ValueError: the name is empty.
        RuntimeError: the name is taken.
    """
    _require_name(backend_name)
    require_callable("construct_rpc_backend_options_handler", construct_rpc_backend_options_handler)
    require_callable("init_backend_handler", init_backend_handler)
    if backend_registered(backend_name):
        raise RpcError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    return add_once(backend_name, value)


def _require_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"backend_name={name!r} is a {type(name).__name__}, not a str")
    if not name:
        raise ValueError("backend_name is empty; a backend is chosen by it")


def add_once(backend_name: str, value: BackendValue) -> BackendType:
    """Adds a backend unless there is one of that name; for those that come with the library."""
    return _Members._members.setdefault(backend_name, BackendType(backend_name, value))


def construct_rpc_backend_options(
    backend: BackendType,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Makes the options of a backend.

    Args:
        backend: the backend, a member of :class:`rpc.BackendType`.
        rpc_timeout: seconds a call may take. Default 60.
        init_method: where the group's store is. Default ``"env://"``.
        kwargs: the other arguments of the backend's options.

    Raises:
        TypeError: ``backend`` is none, or what it makes are no options.
    """
    backend = ours(backend)
    make = backend.value.construct_rpc_backend_options_handler
    made: object = make(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)
    if not isinstance(made, RpcBackendOptions):
        raise _not_returned("construct_rpc_backend_options", backend, made, "RpcBackendOptions")
    return made


def init_backend(
    backend: BackendType,
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> Agent:
    """Forms the group over ``backend`` and returns this worker's agent.

    Args:
        backend: the backend, a member of :class:`rpc.BackendType`.
        store: where the workers of the group meet.
        name: of this worker.
        rank: this worker's id.
        world_size: number of workers; None for a dynamic group.
        rpc_backend_options: options that fit the backend.

    Raises:
        TypeError: ``backend`` is none, or what it returns is no agent.
    """
    backend = ours(backend)
    made: object = backend.value.init_backend_handler(
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
    )
    # Programs written for torch may bring an agent of their own, which has at least this.
    if not hasattr(made, "get_worker_infos"):
        raise _not_returned("init_backend", backend, made, "rpc.RpcAgent")
    return cast("Agent", made)


def _not_returned(handler: str, backend: BackendType, made: object, wanted: str) -> TypeError:
    return TypeError(
        f"the {handler}_handler of {backend!r} must return an instance of {wanted}, but "
        f"returned {made!r}"
    )
