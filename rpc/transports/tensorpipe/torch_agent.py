"""The one module that holds torch's TensorPipe agent.

Owns the agent and everything torch wants to be told before it carries a call:
a store, names, addresses, device maps. Knows nothing of frames or of what a
lost connection means. The agent is a group of one (a static one: torch guards
the tables of a static group with locks, those of a dynamic group not at all);
peers are added to its tables by hand and its store is private to the process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch._C._autograd import _profiler_type
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from rpc.devices import DeviceMap, check_present
from rpc.errors import BringUpError
from rpc.runtime.executor import SECONDS_TO_END, abandon
from rpc.runtime.threads import Thread
from rpc.transports.tensorpipe import scheduling
from rpc.transports.tensorpipe.pool_threads import PoolThreads

if TYPE_CHECKING:
    from torch._C import _distributed_rpc as torch_rpc

    from rpc.options import TensorPipeRpcBackendOptions

_log = logging.getLogger(__name__)

SELF_ID = 0
"""The name of every process for torch; its ids never leave the process."""

_LAST_ID = 32_767
_LEGACY = torch._C._profiler.ActiveProfilerType.LEGACY
POOL_THREADS = 6
"""Threads of torch's pool: torch gives each call to the one that has slept longest, so the fewer,
the warmer.
"""
_NO_TIMEOUT = 0.0
_FROM_THE_PIPE = "(this error originated at"
"""A part of all that TensorPipe says of a broken pipe, and of nothing that torch answers."""
_ENDED_EARLY = "Future marked complete from outside the thread pool"
_PRIMING_SECONDS = 60.0
_SECONDS_TO_STOP = 10.0
_SECONDS_TO_STOP_KEPT = 2.0
_SECONDS_TO_LET_GO = 2.0
_SECONDS_TO_UNWIND = 0.5
_changing = threading.Lock()
"""Held while torch's current agent is looked at and taken back."""


def available() -> bool:
    """Returns whether this build of torch has TensorPipe."""
    return hasattr(getattr(torch._C, "_distributed_rpc", None), "TensorPipeAgent")


class PipeBrokenError(RuntimeError):
    """A call ended before it was made: its pipe is broken."""


class TorchAgent:
    """torch's agent, started.

    Args:
        name: this worker's name.
        options: channels and device maps.
        transports: by torch's names, best first; None leaves the choice to torch.
        devices: the CUDA devices that calls may use.
        own_reverse_map: for answers to this worker's calls to itself.

    Attributes:
        threads: of torch, which run all that comes in.

    Raises:
        BringUpError: torch already runs an agent in this process, or cannot start one.
        DeviceMapError: this process lacks one of the devices.
    """

    def __init__(
        self,
        name: str,
        options: TensorPipeRpcBackendOptions,
        transports: list[str] | None,
        devices: list[torch.device],
        own_reverse_map: DeviceMap,
    ) -> None:
        import torch.distributed.rpc.internal as internal
        from torch._C import _distributed_rpc as module

        self._torch: Any = module
        self.name = name
        self.tensor_tables: Any = internal._thread_local_tensor_tables
        self.threads = PoolThreads(POOL_THREADS)
        self._devices: list[torch.device] = []
        self._reverse_maps = {name: own_reverse_map} if own_reverse_map else {}
        self._naming = threading.Lock()
        self._ids: dict[str, int] = {}
        self._next_id = SELF_ID + 1
        self._abandoned: list[tuple[torch_rpc.WorkerInfo, Any]] = []
        _make_way(module)
        if module._is_current_rpc_agent_set():
            raise BringUpError(
                "torch allows one RPC agent per process and this process already runs one; shut "
                "it down first, or use another transport for the second worker"
            )
        self._begin_to_use(devices)
        _allow_calls()
        _give_torch_an_agent_to_keep(module)
        store = HashStore()
        self._addresses: Store = PrefixStore("addrs", store)
        torch_options = _torch_options(options, transports)
        self._agent: Any = _make(
            module, store, name, torch_options, self._reverse_maps, self._devices
        )
        self._told = len(self._devices)
        """The number of workers that torch has heard of."""
        try:
            module._set_and_start_rpc_agent(self._agent)
        except RuntimeError as error:
            self._torch._reset_current_rpc_agent()
            raise BringUpError(
                f"torch's agent did not start with _transports={transports!r} and "
                f"_channels={options._channels!r}, which may not work on this host: {error}"
            ) from error
        self.url: bytes = self._addresses.get(name)
        scheduling.shorten_reactors()

    def reach(self, name: str, url: bytes, reverse_map: DeviceMap) -> torch_rpc.WorkerInfo:
        """Makes the worker at ``url`` callable under ``name``, in place of an earlier one.

        Args:
            name: the peer's name.
            url: the ``url`` of the peer's agent.
            reverse_map: our devices to the peer's, for answers to its calls.

        Returns:
            What ``ask`` and ``tell`` take.

        Raises:
            DeviceMapError: this process lacks one of the devices.
        """
        with self._naming:
            self._hang_up()
            return self._reach(name, url, reverse_map)

    def _reach(self, name: str, url: bytes, reverse_map: DeviceMap) -> torch_rpc.WorkerInfo:
        self._begin_to_use(reverse_map)
        if name in self._ids:
            if self._reverse_maps.get(name) != reverse_map:  # torch keeps what is named to it
                self._reverse_maps.pop(name, None)
            self._update(name, self._ids[name], False)
        if self._next_id > _LAST_ID:
            raise BringUpError(
                f"torch has no ids left for worker {name!r}: workers joined or came back "
                f"{_LAST_ID} times in the life of this process"
            )
        self._ids[name] = self._next_id
        self._next_id += 1
        self._addresses.set(name, url.decode())
        if reverse_map:
            self._reverse_maps[name] = reverse_map
        self._update(name, self._ids[name], True)
        return self._route(name, self._ids[name])

    def use(self, devices: Iterable[torch.device]) -> None:
        """Lets what peers send arrive on these devices of this process, too.

        Raises:
            DeviceMapError: this process lacks one of them.
        """
        with self._naming:
            self._begin_to_use(devices)
            if self._told < len(self._devices):
                self._update(self.name, SELF_ID, True)

    def _begin_to_use(self, devices: Iterable[torch.device]) -> None:
        """Makes CUDA ready before torch hears of its devices.

        A message with a tensor for a device that torch does not know, or that is not there, or
        before CUDA was initialised, ends the process: torch takes memory for it where nothing
        catches what that raises.
        """
        new = {device for device in devices if device.type != "cpu"} - {*self._devices}
        check_present(new)
        if new:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._devices += sorted(new, key=lambda device: device.index)

    def abandon(self, route: torch_rpc.WorkerInfo) -> None:
        """Lets torch close a pipe that nobody needs any more once the other end has closed it.

        torch closes a pipe, which holds several descriptors, only when a call on it fails. One
        is made when the next worker is reached, so that there are never more of them than
        there were workers at a time; torch logs that it fails. A group that merely ends, one
        worker after the other, makes none.
        """
        with self._naming:
            self._abandoned.append((route, None))

    def _hang_up(self) -> None:
        """Calls whom was abandoned, until the call fails. Needs the lock for names."""
        abandoned, self._abandoned = self._abandoned, []
        for route, call in abandoned:
            if call is None or (call.done() and not error_of(call)):
                with contextlib.suppress(PipeBrokenError):  # then it is closed
                    self._abandoned.append((route, self.tell(route, self._primer, [])))
            elif not call.done():
                self._abandoned.append((route, call))

    def myself(self) -> torch_rpc.WorkerInfo:
        """Returns what ``ask`` and ``tell`` take to call this process."""
        return self._route(self.name, SELF_ID)

    def prime(self, pickle: bytes) -> None:
        """Calls this process once, so that torch imports what it needs before real traffic.

        Args:
            pickle: a call that any transport answers at once, and ignores.

        Raises:
            BringUpError: if the call does not come through.
        """
        self._primer = pickle
        try:
            self._call_myself(pickle, _PRIMING_SECONDS).wait()
        except RuntimeError as error:
            raise BringUpError(
                f"TensorPipe cannot reach this process at its own address {self.url.decode()}; "
                "TP_SOCKET_IFNAME names the network interface to use"
            ) from error

    def ask(self, to: torch_rpc.WorkerInfo, pickle: bytes, tensors: list[torch.Tensor]) -> Any:
        """Calls; the callee answers later, through a future.

        Raises:
            PipeBrokenError: it cannot be reached that way any more.
        """
        if profiler_enabled() and _profiler_type() == _LEGACY:
            return _unprofiled(lambda: self.ask(to, pickle, tensors))
        try:
            return self._torch._invoke_rpc_python_udf(to, pickle, tensors, _NO_TIMEOUT, True)
        except RuntimeError as error:
            _refuse_broken(error)
            raise

    def tell(self, to: torch_rpc.WorkerInfo, pickle: bytes, tensors: list[torch.Tensor]) -> Any:
        """Calls; the callee answers at once.

        Raises:
            PipeBrokenError: it cannot be reached that way any more.
        """
        if profiler_enabled() and _profiler_type() == _LEGACY:
            return _unprofiled(lambda: self.tell(to, pickle, tensors))
        try:
            return self._torch._invoke_rpc_python_udf(to, pickle, tensors, _NO_TIMEOUT, False)
        except RuntimeError as error:
            _refuse_broken(error)
            raise

    def _call_myself(self, pickle: bytes, seconds: float) -> Any:
        return self._torch._invoke_rpc_python_udf(self.myself(), pickle, [], seconds, False)

    def future(self) -> Any:
        """A future that may be answered with tensors on any device in use."""
        return torch._C.Future(self._devices)

    def let_threads_go(self, pickle: bytes) -> None:
        """Calls this process on each of torch's threads at once.

        Args:
            pickle: a call that has :attr:`threads` let its thread go.
        """
        calls = []
        with contextlib.suppress(RuntimeError):  # what is not let go stays, and does no harm
            for _ in range(self.threads.count - self.threads.is_here()):
                calls.append(self._call_myself(pickle, _SECONDS_TO_LET_GO))
        if self.threads.is_here():
            self.threads.meet()
        for call in calls:
            with contextlib.suppress(RuntimeError):
                call.wait()

    def stop(self, until: float) -> None:
        """Closes every pipe and joins torch's threads; what is under way is dropped.

        Handlers that run on after ``until``, on the monotonic clock, keep their threads, which
        are abandoned; so does, at once, one that calls this.
        """
        stopping = _Stopping(self._torch, self._agent)
        stopping.start()
        if not self.threads.is_here():
            self._await_stop(stopping, until)
        if stopping.is_alive():
            self._abandon(stopping)
        del self._agent

    def _await_stop(self, stopping: Thread, until: float) -> None:
        stopping.join(max(0.0, until - time.monotonic()))
        if not self.threads.in_python():
            stopping.join(_SECONDS_TO_STOP)
        if not stopping.is_alive():
            return
        if stuck := len(self.threads.in_python()):
            _log.error("%d handlers on torch's threads do not end, and are abandoned", stuck)
        else:  # see _give_torch_an_agent_to_keep
            _log.error("torch's agent does not stop, and is abandoned")

    def _abandon(self, stopping: Thread) -> None:
        """Leaves torch's threads to what they run, which the end of the process waits for.

        What runs on even then is ended, by a finalizer, as the program's exit hooks come
        before these. Until its thread is free ``stopping`` keeps torch's agent: destroying
        one that has threads aborts the process.
        """
        abandon([stopping], time.monotonic() + SECONDS_TO_END)
        weakref.finalize(stopping, _end_handlers, self.threads, weakref.ref(stopping))

    def _route(self, name: str, torch_id: int) -> torch_rpc.WorkerInfo:
        route: torch_rpc.WorkerInfo = self._torch.WorkerInfo(name, torch_id)
        return route

    def _update(self, name: str, torch_id: int, joins: bool) -> None:
        self._agent._update_group_membership(
            self._route(name, torch_id), self._devices, self._reverse_maps, joins
        )
        self._told = len(self._devices)


class _Stopping(Thread):
    """Stops an agent, once all its threads are free.

    Until then it stays torch's current one, which torch asks for as it leaves a handler,
    unless another one takes its place.
    """

    def __init__(self, module: Any, agent: Any) -> None:
        super().__init__(name="tensorpipe-stop", daemon=True)
        self._torch = module
        self._agent = agent

    def run(self) -> None:
        self._agent.shutdown()
        self.make_way()
        self._agent = None

    def make_way(self) -> None:
        """Lets another agent become the current one."""
        with _changing:
            is_set = self._torch._is_current_rpc_agent_set()
            if is_set and self._torch._get_current_rpc_agent() is self._agent:
                self._torch._reset_current_rpc_agent()


def _make_way(module: Any) -> None:
    for thread in threading.enumerate():
        if isinstance(thread, _Stopping):
            thread.make_way()


def _end_handlers(threads: PoolThreads, stopping: weakref.ref[Thread]) -> None:
    running = stopping()
    if running is not None and running.is_alive():  # else its threads are others' by now
        threads.interrupt()
        running.join(_SECONDS_TO_UNWIND)


class UnsentAnswers:
    """Answers that were given and may not have left yet.

    The only sign of that which torch gives is that it lets go of a tensor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unwritten: set[threading.Event] = set()

    def sign(self) -> torch.Tensor:
        """A tensor to send with an answer, and to keep no reference to."""
        written, sign = threading.Event(), torch.zeros(1)
        weakref.finalize(sign, written.set).atexit = False
        with self._lock:
            self._unwritten = {each for each in self._unwritten if not each.is_set()} | {written}
        return sign

    def wait(self, deadline: float) -> None:
        """Waits until all have left, or until then on the monotonic clock."""
        with self._lock:
            unwritten = list(self._unwritten)
        for written in unwritten:
            written.wait(max(0.0, deadline - time.monotonic()))


def _refuse_broken(error: RuntimeError) -> None:
    """Raises a PipeBrokenError if a call could not be made as its pipe broke."""
    if _ENDED_EARLY in str(error):
        raise PipeBrokenError("it broke before a call was made") from error


def error_of(future: Any) -> str:
    """Returns what went wrong with a call that ended; empty if nothing did."""
    try:
        future.value()
    except RuntimeError as error:
        return str(error).partition(" (this error")[0] or "unknown error"
    return ""


def refusal_of(future: Any) -> str:
    """Returns the error that a call was answered with instead of a value.

    Empty if it has a value, or its pipe broke.
    """
    try:
        future.value()
    except Exception as error:
        text = str(error)
        return "" if _FROM_THE_PIPE in text else text or type(error).__name__
    return ""


def _unprofiled(send: Callable[[], Any]) -> Any:
    """Sends on a thread without profiler: under its legacy one torch wants the name of a call
    of its own, and would send our frame as a call to be profiled.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(send).result()


def _make(
    module: Any,
    store: Store,
    name: str,
    options: torch_rpc._TensorPipeRpcBackendOptionsBase,
    reverse_maps: dict[str, DeviceMap],
    devices: list[torch.device],
) -> torch_rpc.TensorPipeAgent:
    agent: torch_rpc.TensorPipeAgent = module.TensorPipeAgent(
        store, name, SELF_ID, 1, options, reverse_maps, devices
    )
    # Alone in its group, it joins at once; from then on torch takes a peer that closes its
    # pipe for the end of a job and logs nothing about it.
    agent.join(True)
    return agent


def _torch_options(
    options: TensorPipeRpcBackendOptions, transports: list[str] | None
) -> torch_rpc._TensorPipeRpcBackendOptionsBase:
    from torch._C import _distributed_rpc as module

    return module._TensorPipeRpcBackendOptionsBase(
        POOL_THREADS,
        transports,
        options._channels,
        device_maps=options.device_maps,
        devices=options.devices,
    )


def _allow_calls() -> None:
    """Tells torch's distributed autograd the worker's id, without which torch refuses calls."""
    from torch._C import _distributed_autograd

    with contextlib.suppress(RuntimeError):  # it was told another id earlier, which does as well
        _distributed_autograd._init(SELF_ID)


def _give_torch_an_agent_to_keep(module: Any) -> None:
    """Starts a minimal agent first: torch keeps a process's first, with its threads, for ever.

    Once in tens of thousands of times it never stops: torch wakes the thread that watches over
    timeouts without holding its lock, just before that goes to sleep.
    """
    options = module._TensorPipeRpcBackendOptionsBase(1, ["uv"], ["basic"])
    agent: Any = _make(module, HashStore(), "kept", options, {}, [])
    module._set_and_start_rpc_agent(agent)
    module._rref_context_get_debug_info()
    stopping = _Stopping(module, agent)
    stopping.start()
    stopping.join(_SECONDS_TO_STOP_KEPT)
    if stopping.is_alive():
        _log.info("an agent that torch keeps did not stop; its threads stay, asleep")
        stopping.make_way()
