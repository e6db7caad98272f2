"""Every error of the parameter server, in one tree.

RuntimeError
└── rpc.RpcError
    └── ParameterServerError
        ├── ServerLostError       state is lost, and there is nothing to go back to
        ├── RolledBack            everything went back to a snapshot; training may go on from it
        ├── UnreachableError      no server answers, or none that can decide, for too long
        ├── NotATrainerError      this trainer was declared lost, or has finished
        ├── DeclarationError      a table or dense group was declared otherwise before
        │   └── RestoreError      a snapshot has something else by that name (see SnapshotError)
        ├── OutOfMemoryError      a push was refused whole, as a server has no memory for it
        ├── GradientError         gradients are not numbers (see ``NanPolicy``)
        └── SnapshotError         a snapshot could not be written, or cannot be read

``SnapshotError`` is a ``tensorwire.checkpoint.CheckpointError``, too; ``RestoreError`` is its
``MismatchError``.
"""

from __future__ import annotations

from collections.abc import Mapping

from rpc import RpcError
from tensorwire.checkpoint import CheckpointError, MismatchError


class ParameterServerError(RpcError):
    """Root of the tree above."""


class ServerLostError(ParameterServerError):
    """Servers were lost with state of which there is neither a backup nor a snapshot."""


class UnreachableError(ParameterServerError, TimeoutError):
    """Servers could not be reached for as long as ``connect(timeout=...)`` allows."""


class RolledBack(ParameterServerError):
    """All servers and trainers are back at the last snapshot.

    The cluster can be used at once. For the same result as without the failure, go back to the data
    that followed the snapshot.

    Attributes:
        step: pushes of this trainer that are in the state now.
        lost: by name of a trainer, how many of its pushes are not in the state any more, also of
            those that had finished or died before. One that died together with the servers is
            not named.
        snapshot: folder of the snapshot.
    """

    def __init__(self, step: int, lost: Mapping[str, int], snapshot: str) -> None:
        gone = ", ".join(f"{count} of {name}" for name, count in sorted(lost.items()))
        super().__init__(
            f"servers were lost; everything is back at step {step}, as in the snapshot "
            f"{snapshot!r}. Pushes that were undone: {gone or 'none'}"
        )
        self.step = step
        self.lost = dict(lost)
        self.snapshot = snapshot


class NotATrainerError(ParameterServerError):
    """The cluster does not take pushes from this worker any more."""


class DeclarationError(ParameterServerError, ValueError):
    """A name stands for two different things."""


class RestoreError(DeclarationError, MismatchError):
    """A snapshot has something else under a name than what is declared."""


class OutOfMemoryError(ParameterServerError):
    """A server has no room for the rows of a push; nothing of it was taken by any server.

    Unless the message says otherwise: if several trainers push very much at once, the others may
    have taken their parts.
    """


class GradientError(ParameterServerError, ValueError):
    """A gradient has elements that are infinite or not numbers; nothing was pushed."""


class SnapshotError(ParameterServerError, CheckpointError):
    """A snapshot could not be written, and the last one still stands; or one cannot be read."""
