"""Checkpoints of what is spread over workers: every owner writes its own part.

:mod:`~tensorwire.checkpoint.files` holds the one writer and reader of the format, which
the parameter server's snapshots use as well.
"""

from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
    UnsavableValueError,
)
from tensorwire.checkpoint.files import Checkpoint, Draft, PartWriter, complete, latest, retain

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpointError",
    "Draft",
    "PartWriter",
    "UnsafeCheckpointError",
    "UnsavableValueError",
    "complete",
    "latest",
    "retain",
]
