"""The module-level functions: check the arguments, find the current agent, delegate.

They accept what ``torch.distributed.rpc``'s accept, so that a program written
for it changes its imports and nothing else.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._distributed_c10d import Store

from rpc import current
from rpc.agent import Agent
from rpc.backend_registry import BackendType, construct_rpc_backend_options, init_backend, ours
from rpc.builtin_backends import default_backend, register_builtin_backends, store_key
from rpc.calls.gathering import AllGatherStates as AllGatherStates
from rpc.calls.gathering import all_gather as _all_gather
from rpc.calls.gathering import barrier as _barrier  # noqa: F401  (programs call rpc.api._barrier)
from rpc.calls.retrying import require_retriable
from rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rpc.current import (
    Process,
    find_agent,
    joined_before,
    joining,
    keep_store,
    leaving,
    of_context,
    set_process_agent,
)
from rpc.errors import RpcError
from rpc.functions import is_async_execution
from rpc.group.directory import Destination
from rpc.group.environment import find_place
from rpc.group.events import MembershipEvent
from rpc.group.keys import read_group_key
from rpc.group.opening import open_store
from rpc.group.seats import refuse_former_life
from rpc.internal import (
    PythonUDF,
    _internal_rpc_pickler,
    _InternalRPCPickler,
    run_serialized,
    run_serialized_async,
    serialize_call,
)
from rpc.observe.metrics import Snapshot
from rpc.observe.watching import report_to_launcher
from rpc.options import RpcBackendOptions, require_shutdown_timeout, whole_number
from rpc.outcomes import collecting
from rpc.outcomes.futures import Future
from rpc.protocol.retry import Retry
from rpc.rrefs.rref import RRef
from rpc.runtime import deadlines, torch_contexts
from rpc.runtime import signals as interrupts
from rpc.wire import torch_objects
from rpc.wire.callables import require_arguments
from rpc.wire.script_functions import check_arguments
from rpc.worker_info import WorkerInfo

T = TypeVar("T")
P = ParamSpec("P")

current_agent: Callable[[], Agent] = current.current_agent

# What programs of the original set or look at, and so are plain module variables.
_ignore_rref_leak = True
_default_pickler = _internal_rpc_pickler
_thread_local_var = threading.local()


def is_available() -> bool:
    """True if this installation can run RPC: torch was built with distributed support."""
    return torch.distributed.is_available()


def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Joins the group and makes this process one of its workers.

    Returns once all ``world_size`` workers are there. Without a ``world_size``, given
    or in the environment, the group is dynamic: workers join and leave at any time.

    Without a name, everything that is not given comes from the launcher: rpcrun, torchrun,
    Slurm's srun, or mpirun (Open MPI, MPICH and others that speak PMI). A worker of rpcrun
    joins a dynamic group under the name of its seat, such as ``trainer:3``; the others are
    called ``worker:RANK``, or after the role that torchrun was given.

    Args:
        name: unique in the group; letters, digits, ``-``, ``_``, ``:``, at most 127.
            Default what the launcher says.
        backend: how workers are connected; default what the options are for, or
            the environment variable ``RPC_BACKEND``, or ``TENSORWIRE``.
        rank: this worker's id, 0 to ``world_size - 1``; default, with ``env://``,
            the environment variable ``RANK``.
        world_size: number of workers; default, with ``env://``, ``WORLD_SIZE``.
        rpc_backend_options: timeouts, threads, device maps, where to meet.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the value of an argument, or of ``RPC_BACKEND``, cannot be; or there is
            no name and no launcher, or a variable that it should have set is missing.
        BringUpError: workers are missing or disagree; says which and how.
        RuntimeError: RPC is initialized already, or the name is not unique.

    Example::

        rpc.init_rpc()  # under rpcrun, torchrun, srun or mpirun
        rpc.init_rpc("worker0", rank=0, world_size=2)
    """
    register_builtin_backends()
    backend = None if backend is None else ours(backend)
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError(
            "Argument rpc_backend_options must be an instance of RpcBackendOptions, but got "
            f"{rpc_backend_options!r}{torch_objects.import_remedy(rpc_backend_options)}"
        )
    if not isinstance(name, str | None):
        raise TypeError(f"name={name!r} is a {type(name).__name__}, not a str")
    rank = whole_number("rank", rank)
    world_size = None if world_size is None else whole_number("world_size", world_size)
    chosen = backend or default_backend(rpc_backend_options, os.environ.get("RPC_BACKEND"))
    options = rpc_backend_options or construct_rpc_backend_options(chosen)
    life = 0
    if name is None:
        place = find_place(os.environ)
        life = place.life
        name = place.name
        rank = place.rank if rank < 0 else rank
        world_size = place.world_size if world_size in (None, -1) else world_size
        options = _meeting_at(options, place.init_method)
    WorkerInfo(name, 0)  # a bad name fails before anyone is waited for
    with joining():
        meeting = open_store(
            options.init_method,
            rank,
            world_size,
            options.bring_up_timeout,
            options.bind_address,
            store_key(options),
        )
        keep_store(meeting.store)
        if life:
            refuse_former_life(meeting.store, read_group_key(os.environ), name, life)
        _init_rpc_backend(chosen, meeting.store, name, meeting.rank, meeting.world_size, options)


def _meeting_at(options: RpcBackendOptions, init_method: str) -> RpcBackendOptions:
    """The options with the launcher's meeting place, unless the program named one itself."""
    if options.init_method != DEFAULT_INIT_METHOD:
        return options
    options = copy.copy(options)
    options.init_method = init_method
    return options


def _init_rpc_backend(
    backend: BackendType,
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> None:
    """Joins the group that meets at ``store``; see :func:`init_rpc`."""
    agent = init_backend(backend, store, name, rank, world_size, rpc_backend_options)
    _set_and_start_rpc_agent(agent)


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leaves the group and frees everything RPC holds in this process.

    Args:
        graceful: wait until every living worker called ``shutdown`` and all
            calls, and the calls they caused, are done; meanwhile keep serving.
            Otherwise leave at once: outstanding calls fail, here and at peers.
        timeout: seconds to wait, 0 for the options' ``shutdown_timeout``, ``math.inf``
            for no limit.

    A handler that is not waited for, and runs on after some tenths of a second, is
    left to itself; the end of the process waits for it a few seconds. Over TENSORPIPE, what
    is not done even then may be ended by a ``SystemExit`` that is raised in it.

    Raises:
        RpcTimeoutError: this worker or others did not finish in time; says what was waited
            for. RPC is shut down all the same.
        RuntimeError: ``init_rpc`` was never called, or this is a handler, which a graceful
            shutdown would wait for. After an ``init_rpc`` that failed, or another
            ``shutdown``, there is nothing to do.
        TypeError: ``timeout`` is no number.
        ValueError: ``timeout`` is negative or not a number.
    """
    require_shutdown_timeout(timeout)
    if find_agent() is None and joined_before():
        return
    agent = current_agent()
    if graceful:
        agent.group_shutdown.refuse_in_handler()
    context = contextvars.copy_context()
    agent.group_shutdown.release = lambda: context.run(_delete_all_user_and_unforked_owner_rrefs)
    try:
        if graceful and _wait_all_workers is not _OWN_STEP:
            _wait_as_replaced(agent, timeout)
        agent.shutdown(graceful, timeout or agent.options.shutdown_timeout)
        if graceful and agent.group_shutdown.leaks and not _ignore_rref_leak:
            raise RpcError("Leaking RRef: " + "; ".join(agent.group_shutdown.leaks))
    finally:
        _end_session(agent)


def _end_session(agent: Agent) -> None:
    """Undoes what :func:`_set_and_start_rpc_agent` did, if no other thread has done so."""
    with leaving(agent) as is_current:
        if is_current:
            collecting.stop_using()
            torch_contexts.stop_using()
    if is_current:
        interrupts.stop()


def rpc_sync(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    retry: Retry | None = None,
) -> T:
    """Runs ``func(*args, **kwargs)`` on worker ``to`` and returns its result.

    Args:
        to: a ``WorkerInfo``, a worker's name or its id.
        func: anything callable: a function, class, method, lambda, torch operator,
            ``async def`` or a function marked with ``functions.async_execution``.
        args: positional arguments, copied to the other worker.
        kwargs: keyword arguments, likewise.
        timeout: seconds; -1 for the default, 0 for no limit. Calls made by
            ``func`` inherit what is left.
        retry: how to try again when an attempt takes too long or the worker is lost, for
            functions marked with ``functions.idempotent``; ``timeout`` is then for all
            attempts together. Default not at all.

    Raises:
        Exception: what ``func`` raised, as its own type and ``RuntimeError``.
        RpcTimeoutError: the time is over; ``func`` may still be running.
        WorkerLostError: the worker died or was cut off.
        UnknownWorkerError: there is no such worker.
        EncodeError: an argument cannot be sent; names it.

    Example::

        total = rpc.rpc_sync("server", torch.add, args=(a, b))
    """
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _serialized(func, args, kwargs, retry)
    agent: Agent = of_context() or Process.agent or current_agent()
    result: T = agent.rpc_sync(to, func, args, kwargs, timeout, retry)
    return result


def rpc_async(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    retry: Retry | None = None,
) -> Future[T]:
    """Calls a function on another worker and returns a future of its result at once.

    For ``to``, ``func``, ``args``, ``kwargs``, ``timeout`` and ``retry`` see :func:`rpc_sync`.
    Errors in the arguments are raised here, those of the call by the future's ``wait()``. A
    call to a worker that has not joined its dynamic group yet is made when it joins, within
    the timeout; its arguments are taken then.

    Example::

        futures = [rpc.rpc_async(worker, torch.ones, (2,)) for worker in ("ps0", "ps1")]
        total = sum(future.wait() for future in futures)
    """
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _serialized(func, args, kwargs, retry)
    agent: Agent = of_context() or Process.agent or current_agent()
    future = agent.rpc_async(to, func, args, kwargs, timeout, retry)
    collected: list[torch.futures.Future[Any]] | None = getattr(
        _thread_local_var, "future_list", None
    )
    if collected is not None:
        collected.append(future)
    return future


def remote(
    to: Destination,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    retry: Retry | None = None,
) -> RRef[T]:
    """Runs ``func`` on worker ``to``, which keeps the result; returns a reference to it.

    Args:
        to: the owner-to-be; see :func:`rpc_sync` for this and the others.
        func: makes the value.
        args: positional arguments.
        kwargs: keyword arguments.
        timeout: seconds for the creation; if it fails, every use of the reference
            raises ``RRefCreationError``.
        retry: as in :func:`rpc_sync`: the request is sent again when it takes too long,
            and the value is made once. The reference means one life of its owner, so a
            creation ends when that is lost.

    Example::

        model = rpc.remote("server", nn.Linear, args=(4, 2))
        y = model.rpc_sync().forward(x)
    """
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _serialized(func, args, kwargs, retry)
    if isinstance(func, torch.jit.ScriptFunction):
        require_arguments(args, kwargs)
        check_arguments(func, args or (), kwargs or {})
    return current_agent().remote(to, func, args, kwargs, timeout, retry)


def method_factory(method_name: str, docstring: str | None) -> Callable[..., Any]:
    """Makes a function that calls the method of an :class:`RRef` with this name.

    The original makes the methods of its ``RRef`` so, out of those of its ``PyRRef``.

    Args:
        method_name: whose method.
        docstring: of the function.

    Raises:
        AttributeError: there is no such method.
    """
    original = getattr(RRef, method_name)

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    method.__doc__ = docstring
    return method


new_method = method_factory("to_here", RRef.to_here.__doc__)
"""The one method that is left of those that the original makes in this way."""


def get_worker_info(
    worker_name: str | int | None = None, *, wait_for_return: float | None = None
) -> WorkerInfo:
    """Returns the :class:`rpc.WorkerInfo` of a worker.

    Args:
        worker_name: name or id of the worker; default this one.
        wait_for_return: in a dynamic group, seconds to wait for a worker that left or was
            lost, and will come back under its name, or has not joined yet; 0 for no limit.
            Default: do not wait.

    Raises:
        UnknownWorkerError: there is no such worker.
        WorkerLeftError: it left the group.
        WorkerLostError: it was lost.

    Example::

        try:
            rpc.rpc_sync("ps:0", push, (gradients,))
        except rpc.WorkerLostError:
            rpc.get_worker_info("ps:0", wait_for_return=60.0)
            rpc.rpc_sync("ps:0", push, (gradients,))
    """
    if wait_for_return is not None and not 0 <= wait_for_return < float("inf"):
        raise ValueError(f"wait_for_return={wait_for_return!r} must be seconds from 0, or None")
    return current_agent().get_worker_info(worker_name, wait_for_return=wait_for_return)


def workers(prefix: str | None = None) -> list[WorkerInfo]:
    """The workers that are in the group now, this one included, by id.

    Args:
        prefix: only those whose name begins with it; default all.

    Raises:
        TypeError: ``prefix`` is no text.

    Example::

        for trainer in rpc.workers("trainer"):
            rpc.rpc_async(trainer, start)
    """
    if not isinstance(prefix, str | None):
        raise TypeError(f"prefix={prefix!r} is a {type(prefix).__name__}, not a str")
    living = current_agent().get_worker_infos()
    return [worker for worker in living if worker.name.startswith(prefix or "")]


def on_membership(callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
    """Tells ``callback`` from now on of every worker that joins, leaves, is lost or returns.

    Events come one after the other, on a thread that the callback may block. One of
    this worker's own says that the others declared it lost.

    Args:
        callback: what it raises is logged.

    Returns:
        A function that ends this.

    Example::

        def tell(event: rpc.MembershipEvent) -> None:
            print(event.worker.name, event.change.value, event.reason)

        rpc.on_membership(tell)
    """
    return current_agent().events.subscribe(callback)


def cancelled() -> bool:
    """True, in a handler, if nobody waits for its result any more; False elsewhere.

    That is so when the caller cancelled the call, when the call's time is over, and
    when the caller was lost. A handler that runs for long should look now and then.

    Example::

        def search(space):
            for part in space:
                if rpc.cancelled():
                    return None
                look_at(part)
    """
    agent = find_agent()
    return agent is not None and deadlines.cancelled(agent.clock.now())


def get_rpc_timeout() -> float:
    """The default timeout of this worker's calls in seconds; 0 for none."""
    return current_agent().rpc_timeout


def _set_rpc_timeout(seconds: float) -> None:
    """Changes the default timeout of calls made from now on.

    Args:
        seconds: 0 for no limit; a billion or more means the same.

    Raises:
        TypeError: ``seconds`` is no number.
        ValueError: ``seconds`` is negative.
    """
    seconds = deadlines.seconds_of(seconds, "rpc_timeout")
    if not seconds >= 0:
        raise ValueError(f"rpc_timeout must be >= 0 seconds, but got {seconds}")
    current_agent().rpc_timeout = deadlines.limit_of(seconds)


@contextmanager
def _wait_all() -> Iterator[None]:
    """Waits, at the end of the block, for every ``rpc_async`` that this thread made in it."""
    futures: list[torch.futures.Future[Any]] = []
    _thread_local_var.future_list = futures
    try:
        yield
    finally:
        del _thread_local_var.future_list
        torch.futures.wait_all(futures)


@contextmanager
def _use_rpc_pickler(rpc_pickler: _InternalRPCPickler) -> Iterator[None]:
    """Serializes the calls of this process with ``rpc_pickler`` inside the block.

    What it is, is looked at when a call is made: a ``TypeError`` says if it cannot serialize.
    """
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


def _serialized(
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: dict[str, Any] | None,
    retry: Retry | None,
) -> tuple[Callable[..., Any], tuple[Any, ...], None]:
    if retry is not None:
        require_retriable(func, retry)  # what is sent in its place can always be retried
    require_arguments(args, kwargs)
    call = PythonUDF(func, tuple(args or ()), kwargs or {})
    run = run_serialized_async if is_async_execution(func) else run_serialized
    return run, serialize_call(_default_pickler, call), None


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when every worker has called this; ``timeout`` in seconds, 0 for no limit."""
    _all_gather(None, timeout=timeout)


_OWN_STEP = _wait_all_workers


def _wait_as_replaced(agent: Agent, timeout: float) -> None:
    """Waits by the function that a program put in the place of ours."""
    try:
        _wait_all_workers(timeout)
    except BaseException:
        agent.shutdown(graceful=False)
        raise


def _require_initialized(func: Callable[P, T]) -> Callable[P, T]:
    """Makes ``func`` raise ``NotInitializedError`` while this process is no worker."""

    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        current_agent()
        return func(*args, **kwargs)

    return checked


def _delete_all_user_and_unforked_owner_rrefs() -> None:
    """Makes every reference to a value of another worker unusable and tells the owners."""
    current_agent().references.release_all_users()


def _get_current_rpc_agent() -> Agent:
    return current_agent()


def _is_current_rpc_agent_set() -> bool:
    return find_agent() is not None


def _set_and_start_rpc_agent(agent: Agent) -> None:
    """Makes a started agent this process's."""
    set_process_agent(agent)
    collecting.use()
    torch_contexts.use()
    report_to_launcher(agent)


def debug_info() -> dict[str, Any]:
    """Tells what this worker waits for, serves and keeps: calls with their age and destination,
    requests being served, references by kind, threads, workers.

    What an extension counts comes under the names that it gives; if it fails to, why it does
    under the name of the extension.
    """
    return current_agent().debug_info()


def metrics() -> Snapshot:
    """Reports on the calls that this worker made and served so far: counts, errors, latency, bytes.

    Always counted, per method and peer; see :class:`rpc.observe.metrics.Snapshot`.

    Example::

        for row in rpc.metrics().made:
            print(row.method, row.peer, row.calls, row.latency.quantile(0.99))
        text = rpc.metrics().to_prometheus()
    """
    return current_agent().metrics()
