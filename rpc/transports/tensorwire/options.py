"""The options of the TENSORWIRE backend.

Everything that TENSORPIPE's options accept is accepted, so that a program needs
to change nothing but the class; ``_transports`` and ``_channels`` choose among
those of TensorPipe and are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpc.constants import (
    DEFAULT_BRING_UP_TIMEOUT_SEC,
    DEFAULT_BUSY_POLL_SEC,
    DEFAULT_INIT_METHOD,
    DEFAULT_LINK_RESUME_TIMEOUT_SEC,
    DEFAULT_LIVENESS_TIMEOUT_SEC,
    DEFAULT_MAX_BYTES_IN_FLIGHT,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
    DEFAULT_SHARED_MEMORY_BYTES,
)
from rpc.devices import DeviceLike
from rpc.options import TensorPipeRpcBackendOptions, WhenFull
from rpc.transports.tensorwire.settings import Settings
from rpc.transports.tensorwire.tls import TlsOptions

_DEFAULT = Settings()


class TensorWireRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Options of the TENSORWIRE backend.

    Args:
        num_worker_threads: handlers that run at the same time. Default 16.
        rpc_timeout: see :class:`rpc.RpcBackendOptions`.
        init_method: see :class:`rpc.RpcBackendOptions`.
        device_maps: by destination worker, this worker's devices to the destination's.
        devices: the CUDA devices RPC may use. Default those the device maps name.
        bind_address: address or host name to listen on for TCP. Default what follows from
            the address given for the group's store: the loopback interface, which only
            workers on this host can reach, if that is a loopback address or a file, and
            otherwise this host's address on the way to it.
        group_key: secret that every worker of the group was given. Default what the
            environment variable ``RPC_GROUP_KEY_FD`` or ``RPC_GROUP_KEY_FILE`` leads to: an
            inherited descriptor, or a file of mode 0600. Without a key, whoever can read
            the group's store can connect.
        shared_memory: bound, in bytes, on the shared memory for tensors sent to workers
            of this host; beyond it they go through sockets. Default 1 GiB.
        max_bytes_in_flight: bound, in bytes, on the requests to one worker that were not
            replied to, and on what waits for its sockets. Each request counts for at least
            4096; those below and above 64 KiB are counted apart, and one that is larger
            than the bound travels alone. Default 32 MiB.
        when_full: what a call does at that bound. Default wait.
        local_paths: use Unix sockets and shared memory on one host. Default True.
        tcp_connections: connections per peer and direction for large tensors. Default 2.
        max_message_bytes: bound on one message, at least 4096. Default 64 GiB.
        busy_poll: seconds, at most 0.01, that a thread which waits for messages polls for
            them before it sleeps, as long as it often finds some that way. Default 95e-6.
            That is an average: what one wait leaves is there for later ones, up to four
            times as much, but no more than makes 5e-4 together. Where most waits that take longer
            usually end within 1e-3 (for a reply) or 5e-4 (for a request), those are polled for.
            Longer pays where workers have cores of their own and work on each other's
            answers in turn; it takes processor time from what else runs there, Python's
            other threads in the process included. 0 to sleep at once.
        tls: certificates with which connections over TCP are encrypted and workers prove who
            they are, besides the key; see :class:`rpc.TlsOptions`. Default no TLS.
        bring_up_timeout: see :class:`rpc.RpcBackendOptions`.
        shutdown_timeout: see :class:`rpc.RpcBackendOptions`.
        liveness_timeout: see :class:`rpc.RpcBackendOptions`.
        link_resume_timeout: seconds within which a connection that broke while both ends
            live is opened again; then everything goes on where it stopped, and nothing is
            lost or repeated. A worker that cannot be reached for so long is lost; one whose
            process is gone is lost at once, and so is one to which the same message was sent
            on more than 32 connections in a row and arrived on none. 0: every connection that
            breaks is a loss. Default 5.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a number is out of range.

    Example:
        >>> options = TensorWireRpcBackendOptions(bind_address="0.0.0.0")
        >>> options.settings().bind_address
        '0.0.0.0'
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[DeviceLike, DeviceLike]] | None = None,
        devices: Sequence[DeviceLike] | None = None,
        bind_address: str | None = None,
        group_key: bytes = b"",
        shared_memory: int = DEFAULT_SHARED_MEMORY_BYTES,
        max_bytes_in_flight: int = DEFAULT_MAX_BYTES_IN_FLIGHT,
        when_full: WhenFull = WhenFull.BLOCK,
        local_paths: bool = True,
        tcp_connections: int = _DEFAULT.bulk_connections,
        max_message_bytes: int = _DEFAULT.max_message_bytes,
        busy_poll: float = DEFAULT_BUSY_POLL_SEC,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        tls: TlsOptions | None = None,
        bring_up_timeout: float = DEFAULT_BRING_UP_TIMEOUT_SEC,
        shutdown_timeout: float | None = None,
        liveness_timeout: float | None = DEFAULT_LIVENESS_TIMEOUT_SEC,
        link_resume_timeout: float = DEFAULT_LINK_RESUME_TIMEOUT_SEC,
    ) -> None:
        super().__init__(
            num_worker_threads=num_worker_threads,
            rpc_timeout=rpc_timeout,
            init_method=init_method,
            device_maps=device_maps,
            devices=devices,
            _transports=_transports,
            _channels=_channels,
            bring_up_timeout=bring_up_timeout,
            shutdown_timeout=shutdown_timeout,
            liveness_timeout=liveness_timeout,
            shared_memory=shared_memory,
            max_bytes_in_flight=max_bytes_in_flight,
            when_full=when_full,
        )
        self._settings = Settings(
            bind_address=bind_address,
            group_key=group_key,
            local_paths=local_paths,
            bulk_connections=tcp_connections,
            max_message_bytes=max_message_bytes,
            busy_poll_seconds=busy_poll,
            resume_seconds=link_resume_timeout,
            tls=tls,
        )

    @property
    def link_resume_timeout(self) -> float:
        """Seconds within which a connection that broke is opened again; 0: it never is."""
        return self._settings.resume_seconds

    @link_resume_timeout.setter
    def link_resume_timeout(self, seconds: float) -> None:
        self._settings = replace(self._settings, resume_seconds=seconds)

    @property
    def bind_address(self) -> str | None:
        """The address this worker listens on for TCP; None to derive it from the store's."""
        return self._settings.bind_address

    def settings(self) -> Settings:
        """Returns the settings of the transport."""
        return replace(
            self._settings,
            shared_memory_bytes=self.shared_memory,
            max_bytes_in_flight=self.max_bytes_in_flight,
            when_full=self.when_full,
            device_maps=self.device_maps,
            devices=tuple(self.devices),
        )

    @classmethod
    def adopted(cls, options: TensorPipeRpcBackendOptions) -> TensorWireRpcBackendOptions:
        """The same for TENSORWIRE, of a program that changed its backend and nothing else."""
        if isinstance(options, cls):
            return options
        return cls(
            num_worker_threads=options.num_worker_threads,
            rpc_timeout=options.rpc_timeout,
            init_method=options.init_method,
            device_maps=options.device_maps,  # type: ignore[arg-type]  # keys are invariant
            devices=options.devices,
            bring_up_timeout=options.bring_up_timeout,
            shutdown_timeout=options.shutdown_timeout,
            liveness_timeout=options.liveness_timeout,
            shared_memory=options.shared_memory,
            max_bytes_in_flight=options.max_bytes_in_flight,
            when_full=options.when_full,
        )
