"""Every error of ``tensorwire.checkpoint``, in one tree.

RuntimeError
└── CheckpointError
    ├── NoCheckpointError        nothing is at that path (also a FileNotFoundError)
    ├── DamagedCheckpointError   a manifest or shard is missing, cut short or not what it says
    │   └── MismatchError        it is of something else than what is to take it over
    │       └── NotSavedError    it holds nothing of that name (also a KeyError)
    ├── UnsafeCheckpointError    a pickle: reading it could run code
    ├── UnsavableValueError      a value that a checkpoint cannot hold (also a TypeError)
    ├── NoPublisherError         no publisher of versions answers there (also a ConnectionError)
    └── WrongKeyError            reader and publisher have different keys (also a PermissionError)

Reading raises these alone. Saving where something is raises ``FileExistsError``.
"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Root of the tree above."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """Nothing is at that path."""


class DamagedCheckpointError(CheckpointError):
    """A manifest or a shard is missing, cut short, or not what it says it is."""


class MismatchError(DamagedCheckpointError):
    """A checkpoint, which may be whole, is of something else than what is to take it over."""


class NotSavedError(MismatchError, KeyError):
    """A checkpoint holds nothing of that name."""

    def __str__(self) -> str:
        return RuntimeError.__str__(self)


class UnsafeCheckpointError(CheckpointError):
    """The file is a pickle, which can run code when it is read."""


class UnsavableValueError(CheckpointError, TypeError):
    """A value is neither a tensor nor plain data, so no checkpoint holds it."""


class NoPublisherError(CheckpointError, ConnectionError):
    """No publisher of versions answers at that address."""


class WrongKeyError(CheckpointError, PermissionError):
    """The reader and the publisher of versions do not have the same reader key."""
