"""Every error ``rpc`` raises of its own accord, in one tree.

    RuntimeError
    └── RpcError
        ├── NotInitializedError       no current agent: init_rpc was not called, or shutdown was
        ├── BringUpError              a group could not be formed; names who is missing and why
        ├── UnknownWorkerError        a destination that is not in the group
        ├── RpcTimeoutError           a deadline passed (also a TimeoutError)
        ├── CallCancelledError        the call was given up with ``future.cancel()``
        ├── WorkerLostError           the other worker died, froze or was cut off
        │   └── WorkerLeftError       the other worker left the group of its own accord
        ├── AgentClosedError          this worker shut down while the call was outstanding
        ├── QueueFullError            back-pressure: too many bytes are in flight to one worker
        ├── FrameError                bytes from a peer are not a message
        ├── DeviceMapError            a tensor's device has no counterpart at the destination
        ├── EncodeError               a value cannot be sent (also a TypeError)
        ├── DecodeError               a value that arrived cannot be rebuilt here
        ├── RemoteError               a remote exception whose own type cannot be rebuilt here
        └── RRefError
            ├── RRefCreationError     ``remote()`` failed or timed out; its handle is unusable
            ├── RRefDeletedError      the handle was deleted by shutdown
            └── StaleRRefError        the owner, or the life of it or of the holder, is gone

Exceptions raised by user code on another worker do not appear here: they come
back as their own type (see ``remote_errors``).
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

NOBODY_LISTENS: Final = "nobody listens at its address any more"
ANOTHER_ANSWERS: Final = "what answers at its address says: "
"""The words in which a loss is reported; what follows the second may be a stranger's."""
NO_MEMBER: Final = "this life of the worker is no member any more"
"""The answer of a worker to one that it has declared lost, if it comes before the words above."""

ErrorT = TypeVar("ErrorT", bound=BaseException)


def caused(error: ErrorT, cause: BaseException | None) -> ErrorT:
    """Gives an error its cause, as ``raise ... from`` does, but for compiled code.

    Therefore modules that can be compiled say ``raise caused(error, cause) from cause``.

    Args:
        error: about to be raised.
        cause: of it; None if the error that is being handled is not to be shown with it.
    """
    error.__cause__ = cause
    return error


class RpcError(RuntimeError):
    """Root of the tree above."""


class NotInitializedError(RpcError):
    """There is no current agent in this thread or process.

    Args:
        parent: the worker that this process was forked from, if it was.
    """

    def __init__(self, parent: str = "") -> None:
        where = f" in this process, which was forked from worker {parent!r}" if parent else ""
        super().__init__(f"RPC has not been initialized{where}. Call rpc.init_rpc first.")
        self._parent = parent

    def __reduce__(self) -> tuple[type[NotInitializedError], tuple[str]]:
        return type(self), (self._parent,)


class BringUpError(RpcError):
    """The group could not be formed."""


class UnknownWorkerError(RpcError):
    """A call names a worker that is not in the group.

    Attributes:
        is_final: no worker of that name will ever come, so it is not waited for, and the call is
            not tried again.
    """

    is_final = False


class RpcTimeoutError(RpcError, TimeoutError):
    """A call, or a wait for a value, passed its deadline."""


class CallCancelledError(RpcError):
    """The caller gave the call up; its handler did not start, or was told."""


class WorkerLostError(RpcError):
    """The worker at the other end is gone.

    Attributes:
        name: the lost worker's name.
        incarnation: which life of that name was lost.
        reason: what was observed, for people.
        has_ended: its process has certainly ended.
    """

    _fate = "was lost"

    def __init__(self, name: str, incarnation: int, reason: str) -> None:
        super().__init__(f"worker {name!r} (incarnation {incarnation}) {self._fate}: {reason}")
        self.name = name
        self.incarnation = incarnation
        self.reason = reason

    @property
    def has_ended(self) -> bool:
        """True if its process has certainly ended, as nobody listens at its address.

        Otherwise it may have ended, too, or is stopped or cut off. The worker that noticed says so
        in the reason.
        """
        return NOBODY_LISTENS in self.reason.partition(ANOTHER_ANSWERS)[0]

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[Any, ...]]:
        return type(self), (self.name, self.incarnation, self.reason)


class WorkerLeftError(WorkerLostError):
    """The worker at the other end left the group: it called ``shutdown``."""

    _fate = "is gone"


class AgentClosedError(RpcError):
    """This worker's agent was shut down while the operation was outstanding."""


class QueueFullError(RpcError):
    """More bytes are in flight to one worker than the options allow."""


class FrameError(RpcError):
    """Bytes received from a peer do not form a valid message."""


class DeviceMapError(RpcError):
    """A tensor lives on a device that the device map does not cover."""


class EncodeError(RpcError, TypeError):
    """A value cannot be serialized; raised before anything is sent."""


class DecodeError(RpcError):
    """A received value cannot be rebuilt on this worker."""


class RemoteError(RpcError):
    """Stands in for a remote exception whose type cannot be rebuilt here."""


class RRefError(RpcError):
    """Root of what can go wrong with a remote reference."""


class RRefCreationError(RRefError):
    """The call that should have created the referenced value failed."""


class RRefDeletedError(RRefError):
    """The handle was deleted, usually by ``shutdown``."""


class StaleRRefError(RRefError):
    """The reference points at a value, or a life of its owner, that no longer exists.

    Or the worker that held it shut down, and its handle was used by the next one.
    """
