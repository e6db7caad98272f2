"""Every error of ``tensorwire.checkpoint``, in one tree.

RuntimeError
└── CheckpointError
    ├── DamagedCheckpointError   a manifest or shard is missing, cut short or not what it says
    ├── UnsafeCheckpointError    a pickle: reading it could run code
    └── UnsavableValueError      a value that a checkpoint cannot hold (also a TypeError)

A path where nothing is raises ``FileNotFoundError``, one that is taken ``FileExistsError``.
"""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Root of the tree above."""


class DamagedCheckpointError(CheckpointError):
    """A manifest or a shard is missing, cut short, or not what it says it is."""


class UnsafeCheckpointError(CheckpointError):
    """The file is a pickle, which can run code when it is read."""


class UnsavableValueError(CheckpointError, TypeError):
    """A value is neither a tensor nor plain data, so no checkpoint holds it."""
