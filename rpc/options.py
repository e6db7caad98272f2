"""The options of a worker: timeouts, threads, rendezvous, device maps.

Decides which values are acceptable and says what is wrong with the others.
Reading the environment, opening stores and touching devices happen elsewhere.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, SupportsIndex

import torch

from rpc.constants import (
    DEFAULT_BRING_UP_TIMEOUT_SEC,
    DEFAULT_INIT_METHOD,
    DEFAULT_LIVENESS_TIMEOUT_SEC,
    DEFAULT_MAX_BYTES_IN_FLIGHT,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
    DEFAULT_SHARED_MEMORY_BYTES,
)
from rpc.devices import DeviceLike, DeviceMap, as_device, as_device_map
from rpc.errors import RpcError
from rpc.runtime.deadlines import FOREVER

_TRANSPORTS: Final = frozenset({"ibv", "shm", "uv"})
_CHANNELS: Final = frozenset(
    {"basic", "cma", "cuda_basic", "cuda_gdr", "cuda_ipc", "cuda_xth", "mpt_uv"}
)
"""Channels that some build of torch has, by torch's names; not every build, nor host, has each."""


class WhenFull(enum.Enum):
    """Choices of what a call does when ``max_bytes_in_flight`` to a worker is reached."""

    BLOCK = "block"
    """Wait until replies have come back."""
    RAISE = "raise"
    """Raise :class:`rpc.QueueFullError`."""


class RpcBackendOptions:
    """The base of every backend's options. Subclass it for a backend of your own.

    Args:
        rpc_timeout: seconds a call may take by default; 0 means no limit. Default 60.
        init_method: URL of the store that workers meet at: ``env://``,
            ``tcp://host:port`` or ``file:///path``. Default ``env://``.
        bring_up_timeout: seconds to wait for the other workers in ``init_rpc``. Default 300.
        shutdown_timeout: seconds a graceful ``shutdown`` waits for the other workers
            when it is not told otherwise; None waits without limit. Default None.
        liveness_timeout: seconds after which a worker that gives no sign of life is
            declared lost, although its connections are open; 1 or more is sensible,
            None or 0 never does. Default 5.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a number is out of range.
    """

    def __init__(
        self,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        *,
        bring_up_timeout: float = DEFAULT_BRING_UP_TIMEOUT_SEC,
        shutdown_timeout: float | None = None,
        liveness_timeout: float | None = DEFAULT_LIVENESS_TIMEOUT_SEC,
    ) -> None:
        self.rpc_timeout = rpc_timeout
        self.init_method = init_method
        self.bring_up_timeout = bring_up_timeout
        self.shutdown_timeout = shutdown_timeout
        self.liveness_timeout = liveness_timeout

    @property
    def bind_address(self) -> str | None:
        """The address at which this worker listens, for backends that let the program choose it."""
        return None

    @property
    def rpc_timeout(self) -> float:
        """Seconds a call may take by default; 0 means no limit."""
        return self._rpc_timeout

    @rpc_timeout.setter
    def rpc_timeout(self, seconds: float) -> None:
        self._rpc_timeout = _seconds("rpc_timeout", seconds)

    @property
    def init_method(self) -> str:
        """URL of the store that workers meet at."""
        return self._init_method

    @init_method.setter
    def init_method(self, url: str) -> None:
        if not isinstance(url, str):
            raise _wrong_type("init_method", url, "a URL such as 'env://' or 'tcp://host:port'")
        if "://" not in url:
            raise ValueError(
                f"init_method={url!r} is not a URL; use env://, tcp://host:port or file:///path"
            )
        self._init_method = url

    @property
    def bring_up_timeout(self) -> float:
        """Seconds to wait for the other workers in ``init_rpc``, a billion at most."""
        return self._bring_up_timeout

    @bring_up_timeout.setter
    def bring_up_timeout(self, seconds: float) -> None:
        value = _seconds("bring_up_timeout", seconds)
        if value == 0:
            raise ValueError("bring_up_timeout=0 leaves no time to meet; give seconds above 0")
        if value > FOREVER:  # what stores and threads can wait is not much more
            raise ValueError(f"bring_up_timeout={seconds!r} must be at most {FOREVER:g} seconds")
        self._bring_up_timeout = value

    @property
    def shutdown_timeout(self) -> float | None:
        """Seconds a graceful ``shutdown`` waits for the other workers; None waits on."""
        return self._shutdown_timeout

    @shutdown_timeout.setter
    def shutdown_timeout(self, seconds: float | None) -> None:
        self._shutdown_timeout = None if seconds is None else _seconds("shutdown_timeout", seconds)

    @property
    def liveness_timeout(self) -> float | None:
        """Seconds of silence after which a worker is declared lost; None never does."""
        return self._liveness_timeout

    @liveness_timeout.setter
    def liveness_timeout(self, seconds: float | None) -> None:
        value = 0.0 if seconds is None else _seconds("liveness_timeout", seconds)
        self._liveness_timeout = value or None


class TensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of the TENSORPIPE backend.

    A worker whose connection breaks is lost at once: torch never opens it again. Of the
    backends here only TENSORWIRE does, see ``link_resume_timeout`` of its options.

    Args:
        num_worker_threads: handlers that run at the same time. Default 16.
        rpc_timeout: see :class:`RpcBackendOptions`.
        init_method: see :class:`RpcBackendOptions`.
        device_maps: by destination worker, this worker's devices to the destination's;
            a number means that CUDA device. Default none.
        devices: the CUDA devices RPC may use. Default those the device maps name.
        bring_up_timeout: see :class:`RpcBackendOptions`.
        shutdown_timeout: see :class:`RpcBackendOptions`.
        liveness_timeout: see :class:`RpcBackendOptions`.
        shared_memory: bound, in bytes, on the shared memory for tensors sent to workers of
            this host; what finds no room there goes through torch. 0: everything does, in
            both directions. Default 1 GiB.
        max_bytes_in_flight: bound, in bytes, on the requests to one worker that were not
            replied to. Each counts for at least 4096; those below and above 64 KiB are
            counted apart, and one that is larger than the bound travels alone. Likewise on
            the replies to one worker that carry tensors or more than 16 KiB, do not go
            through shared memory, and have not arrived: beyond it a function that ended
            waits to reply, and keeps its thread. Default 32 MiB.
        when_full: what a call does at that bound. Default wait.
        _transports: torch's names, best first. Default torch's choice; ``["uv"]``, which is
            TCP, in a dynamic group, as torch keeps what a peer in shared memory took, and
            where a static group is known to have more workers on this host than cores, as
            a thread of torch's keeps a core busy in each of them otherwise.
        _channels: torch's names, best first. Default torch's choice.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a number is out of range.
        RuntimeError: if no transport or channel has such a name.

    Example:
        >>> options = TensorPipeRpcBackendOptions(num_worker_threads=8)
        >>> options.set_device_map("worker1", {0: 1})
        >>> options.device_maps["worker1"]
        {device(type='cuda', index=0): device(type='cuda', index=1)}
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]] | None = None,
        devices: Sequence[DeviceLike] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        bring_up_timeout: float = DEFAULT_BRING_UP_TIMEOUT_SEC,
        shutdown_timeout: float | None = None,
        liveness_timeout: float | None = DEFAULT_LIVENESS_TIMEOUT_SEC,
        shared_memory: int = DEFAULT_SHARED_MEMORY_BYTES,
        max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
        when_full: WhenFull = WhenFull.BLOCK,
    ) -> None:
        super().__init__(
            rpc_timeout,
            init_method,
            bring_up_timeout=bring_up_timeout,
            shutdown_timeout=shutdown_timeout,
            liveness_timeout=liveness_timeout,
        )
        self.num_worker_threads = num_worker_threads
        self.device_maps = {} if device_maps is None else device_maps
        self.devices = [] if devices is None else devices
        self._transports = _names("_transports", _transports, _TRANSPORTS)
        self._channels = _names("_channels", _channels, _CHANNELS)
        self.shared_memory = shared_memory
        self.max_bytes_in_flight = max_bytes_in_flight
        self.when_full = when_full

    @property
    def shared_memory(self) -> int:
        """Bound, in bytes, on the shared memory for tensors sent to workers of this host."""
        return self._shared_memory

    @shared_memory.setter
    def shared_memory(self, size: int) -> None:
        self._shared_memory = _bytes("shared_memory", size, 0)

    @property
    def max_bytes_in_flight(self) -> int:
        """Bound, in bytes, on the requests to one worker that were not replied to."""
        return self._max_bytes_in_flight

    @max_bytes_in_flight.setter
    def max_bytes_in_flight(self, size: int) -> None:
        self._max_bytes_in_flight = _bytes("max_bytes_in_flight", size, 1)

    @property
    def when_full(self) -> WhenFull:
        """The choice of what a call does at that bound."""
        return self._when_full

    @when_full.setter
    def when_full(self, choice: WhenFull) -> None:
        if not isinstance(choice, WhenFull):
            raise _wrong_type("when_full", choice, "WhenFull.BLOCK or WhenFull.RAISE")
        self._when_full = choice

    @property
    def num_worker_threads(self) -> int:
        """Handlers that run at the same time."""
        return self._num_worker_threads

    @num_worker_threads.setter
    def num_worker_threads(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise _wrong_type("num_worker_threads", count, "a whole number")
        if count <= 0:
            raise ValueError(f"num_worker_threads={count} must be positive")
        self._num_worker_threads = count

    @property
    def device_maps(self) -> dict[str, DeviceMap]:
        """By destination worker, this worker's devices to the destination's. A copy."""
        return {to: dict(device_map) for to, device_map in self._device_maps.items()}

    @device_maps.setter
    def device_maps(self, device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]]) -> None:
        _require_map("device_maps", device_maps, "a map from workers' names to their device maps")
        for to in device_maps:
            _require_name(to)
        self._device_maps = {to: as_device_map(each) for to, each in device_maps.items()}

    @property
    def devices(self) -> list[torch.device]:
        """The CUDA devices RPC may use; empty means those the device maps name. A copy."""
        return list(self._devices)

    @devices.setter
    def devices(self, devices: Iterable[DeviceLike]) -> None:
        if isinstance(devices, str) or not isinstance(devices, Iterable):
            raise _wrong_type("devices", devices, "a list of CUDA devices")
        self._devices = [_cuda_device(device) for device in devices]

    def set_device_map(self, to: str, device_map: Mapping[DeviceLike, DeviceLike]) -> None:
        """Adds to the map for one destination; may be called repeatedly.

        Args:
            to: the destination worker's name.
            device_map: this worker's devices to the destination's.

        Raises:
            TypeError: if ``to`` is no name.
            ValueError: if a device would be mapped to two.
        """
        _require_name(to)
        known = self._device_maps.get(to, {})
        added = as_device_map(device_map)
        for source, target in added.items():
            if known.get(source, target) != target:
                raise ValueError(
                    "`set_device_map` only supports 1-to-1 mapping, "
                    f"trying to map {source} to {target} and {known[source]}"
                )
        self._device_maps[to] = known | added

    def set_devices(self, devices: Iterable[DeviceLike]) -> None:
        """Names the CUDA devices RPC may use.

        Args:
            devices: numbers, names or ``torch.device``.

        Raises:
            TypeError: if it is no list.
            ValueError: if one is not a CUDA device.
        """
        self.devices = devices


def whole_number(argument: str, value: SupportsIndex) -> int:
    """A rank or size as the user gave it; -1 stands for one that is not given.

    Args:
        argument: what the user calls it.
        value: the number.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below -1.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{argument}={value!r} is a {type(value).__name__}, not a whole number")
    number = operator.index(value)
    if number < -1:
        raise ValueError(f"{argument}={number} is negative; give it from 0, or leave it out")
    return number


def require_shutdown_timeout(timeout: float) -> None:
    """Refuses what is no time for a shutdown.

    Args:
        timeout: seconds as the user gave them.

    Raises:
        TypeError: it is no number.
        ValueError: it is negative.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r} is a {type(timeout).__name__}, not seconds")
    if not timeout >= 0:
        raise ValueError(
            f"timeout={timeout!r} must be seconds: 0 for the options' shutdown_timeout, more, "
            "or math.inf for no limit"
        )


def _require_map(argument: str, value: object, wanted: str) -> None:
    if not isinstance(value, Mapping):
        raise _wrong_type(argument, value, wanted)


def _require_name(to: object) -> None:
    if not isinstance(to, str):
        raise TypeError(
            f"device maps go by the name of the destination, but got {to!r}, "
            f"which is a {type(to).__name__}"
        )


def _seconds(argument: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_type(argument, value, "a number of seconds")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{argument}={value!r} must be a finite number of seconds, 0 or more")
    return float(value)


def _bytes(argument: str, size: int, least: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise _wrong_type(argument, size, "a whole number of bytes")
    if size < least:
        raise ValueError(f"{argument}={size} must be {least} or more bytes")
    return size


def _names(argument: str, value: Sequence[str] | None, known: frozenset[str]) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str) or not (
        isinstance(value, Iterable) and all(isinstance(name, str) for name in value)
    ):
        raise _wrong_type(argument, value, "a list of names")
    for name in value:
        if name not in known:
            kind = argument.strip("_").removesuffix("s")
            names = ", ".join(sorted(known))
            raise RpcError(f"Unknown {kind}: {name}, in {argument}={value!r}; there are: {names}")
    return list(value)


def _cuda_device(device: DeviceLike) -> torch.device:
    converted = as_device(device)
    if converted.type != "cuda":
        raise ValueError(
            f"`set_devices` expect a list of CUDA devices, but got device type {converted.type}."
        )
    return converted


def _wrong_type(argument: str, value: object, wanted: str) -> TypeError:
    return TypeError(
        f"incompatible constructor arguments: {argument}={value!r} "
        f"is a {type(value).__name__}, not {wanted}"
    )
