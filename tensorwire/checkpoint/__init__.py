"""Checkpoints of what is spread over workers: every owner writes its own part.

:func:`save` and :func:`load` take a program's whole state. On disk a checkpoint is a folder of
safetensors files and a JSON manifest; :mod:`~tensorwire.checkpoint.files` is the one writer and
reader of it, which the parameter server's snapshots use as well. A chain (:class:`Chain`) is a
folder of versions, each whole or the changes since the one before.
"""

from tensorwire.checkpoint.chain import Chain, Kind, Version, VersionFile
from tensorwire.checkpoint.chain_writer import ChainWriter
from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MismatchError,
    NoCheckpointError,
    NoPublisherError,
    NotSavedError,
    UnsafeCheckpointError,
    UnsavableValueError,
    WrongKeyError,
)
from tensorwire.checkpoint.files import Checkpoint, Draft, PartWriter, complete, latest, retain
from tensorwire.checkpoint.loading import Stateful
from tensorwire.checkpoint.remote.keys import reader_key
from tensorwire.checkpoint.remote.objects import ChainCopier
from tensorwire.checkpoint.remote.server import ChainServer
from tensorwire.checkpoint.saving import Saving, load, save, save_in_background
from tensorwire.checkpoint.weights import Following, Publishing, State, follow, publish

__all__ = [
    "Chain",
    "ChainCopier",
    "ChainServer",
    "ChainWriter",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpointError",
    "Draft",
    "Following",
    "Kind",
    "MismatchError",
    "NoCheckpointError",
    "NoPublisherError",
    "NotSavedError",
    "PartWriter",
    "Publishing",
    "Saving",
    "State",
    "Stateful",
    "UnsafeCheckpointError",
    "UnsavableValueError",
    "Version",
    "VersionFile",
    "WrongKeyError",
    "complete",
    "follow",
    "latest",
    "load",
    "publish",
    "reader_key",
    "retain",
    "save",
    "save_in_background",
]
