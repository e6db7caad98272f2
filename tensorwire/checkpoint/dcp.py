"""Exchange with ``torch.distributed.checkpoint``: export to its format, import from it.

Only on request, as its metadata is a pickle. An import reads that with an unpickler that
knows the few classes such metadata consists of and no other, so that it cannot run code.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tensorwire.checkpoint.errors import CheckpointError, UnsafeCheckpointError
from tensorwire.checkpoint.files import Checkpoint, Draft, PartWriter
from tensorwire.checkpoint.structure import Json, decode
from tensorwire.checkpoint.writing import saved_values

_DOCUMENT: Final = "tensorwire.state"  # the plain data, as JSON text in a tensor of bytes
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_KNOWN: Final = {
    *(
        (_METADATA, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("torch", "device"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip


def export_dcp(source: str | Path | Checkpoint, folder: str | Path) -> None:
    """Writes a checkpoint in the format of ``torch.distributed.checkpoint``.

    A tensor is named by its object and its own name there, such as ``model.0.weight``.

    Args:
        source: the checkpoint or its path, made by :func:`~tensorwire.checkpoint.save`.
        folder: where to write.

    Raises:
        FileExistsError: something is at ``folder``.
    """
    saved = source if isinstance(source, Checkpoint) else Checkpoint.open(source)
    folder = Path(folder)
    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for name in {each for part in saved.parts.values() for each in part.meta.get("shares", {})}:
        for key, value in saved_values(saved, name).items():
            _flatten(f"{name}.{key}", value, tensors)
    if "common" in saved.parts:
        document = saved.parts["common"].meta["state"]
        _flatten("state", decode(document, lambda name: saved.tensor("common", name)), tensors)
        text = json.dumps(document).encode()
        tensors[_DOCUMENT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with _without_warnings():
        dcp_save(tensors, checkpoint_id=folder, no_dist=True)


def import_dcp(folder: str | Path, path: str | Path) -> Checkpoint:
    """Makes a checkpoint of one of ``torch.distributed.checkpoint``.

    The part of a tensor's name before its first dot names its object: of a state
    ``{"model": {...}}``, :func:`~tensorwire.checkpoint.load` finds ``"model"``. Only tensors
    are taken; what is no tensor is a pickle there.

    Args:
        folder: where that checkpoint is.
        path: of the new one.

    Raises:
        FileExistsError: something is at ``path``.
        UnsafeCheckpointError: its metadata is not that of such a checkpoint.
    """
    sizes = _read_metadata(Path(folder))
    shares: dict[str, dict[str, Json]] = {}
    draft = Draft.create(path)
    try:
        with PartWriter(draft.folder, "imported") as part:
            for full_name, (shape, dtype) in sizes.items():
                tensor = torch.empty(shape, dtype=dtype)
                with _without_warnings():
                    dcp_load({full_name: tensor}, checkpoint_id=folder, no_dist=True)
                name, _, key = full_name.partition(".")
                part.add(f"{name}/{key}", tensor)
                shares.setdefault(name, {})[key] = {"$tensor": f"{name}/{key}"}
            part.finish({"shares": shares})
        with PartWriter(draft.folder, "common") as part:
            part.finish({"state": dict.fromkeys(shares)})
        return draft.commit(["imported", "common"])
    except BaseException:
        draft.discard()
        raise


def _flatten(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors[name] = value
    elif isinstance(value, dict):
        for key, each in value.items():
            _flatten(f"{name}.{key}", each, tensors)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            _flatten(f"{name}.{number}", each, tensors)


def _read_metadata(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and dtype of each tensor."""
    path = folder / ".metadata"
    with open(path, "rb") as file:
        try:
            metadata = _Restricted(file).load()
        except (pickle.UnpicklingError, EOFError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size") and name != _DOCUMENT
    }


class _Restricted(pickle.Unpickler):
    """Knows what the metadata of a checkpoint of torch's consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnsafeCheckpointError(
            f"the metadata names {module}.{name}, which no checkpoint of torch's consists of; "
            "reading it could run any code"
        )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silences torch's warning that it works without process groups, which is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
