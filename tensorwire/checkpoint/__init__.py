"""Checkpoints of what is spread over workers: every owner writes its own part.

:func:`save` and :func:`load` take a program's whole state. On disk a checkpoint is a folder of
safetensors files and a JSON manifest; :mod:`~tensorwire.checkpoint.files` is the one writer and
reader of it, which the parameter server's snapshots use as well.
"""

from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
    NotSavedError,
    UnsafeCheckpointError,
    UnsavableValueError,
)
from tensorwire.checkpoint.files import Checkpoint, Draft, PartWriter, complete, latest, retain
from tensorwire.checkpoint.loading import Stateful
from tensorwire.checkpoint.saving import Saving, load, save, save_in_background

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpointError",
    "Draft",
    "MismatchError",
    "NoCheckpointError",
    "NotSavedError",
    "PartWriter",
    "Saving",
    "Stateful",
    "UnsafeCheckpointError",
    "UnsavableValueError",
    "complete",
    "latest",
    "load",
    "retain",
    "save",
    "save_in_background",
]
