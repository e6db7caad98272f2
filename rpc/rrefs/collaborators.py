"""The calling side of a worker and its control channel, as the reference keeper uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from rpc.ids import GlobalId, Life
from rpc.outcomes.futures import Future
from rpc.wire.control import ControlMessage
from rpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    from rpc.rrefs.rref import RRef


class SendsControl(Protocol):
    """Sends control messages, many to a frame."""

    def queue(self, to: Life, message: ControlMessage) -> None:
        """Queues one."""

    def flush(self) -> None:
        """Sends what is queued."""


class Calls(Protocol):
    """The calling side of a worker, as references use it."""

    @property
    def rpc_sync(self) -> Callable[..., Any]:
        """Makes a call and waits; see ``rpc.rpc_sync``."""

    @property
    def rpc_async(self) -> Callable[..., Future[Any]]:
        """Makes a call; see ``rpc.rpc_async``."""

    @property
    def remote(self) -> Callable[..., RRef[Any]]:
        """Makes a call whose result stays there; see ``rpc.remote``."""

    def later(self, start: Callable[[], Future[Any]]) -> Future[Any]:
        """Makes a call soon, on another thread."""

    def fetch(self, rref: RRef[Any], owner: WorkerInfo, timeout: float) -> Any:
        """Asks the owner of a value for a copy, and waits."""

    def future(self, description: str) -> Future[Any]:
        """Makes a future that is waited for as the transport likes it."""

    def wait(self, done: Callable[[], object], block: Callable[[], None]) -> None:
        """Waits as the transport likes it."""

    def creation_gone(self, fork: GlobalId, reason: BaseException) -> None:
        """Fails the calls that need a value which will not be made."""
